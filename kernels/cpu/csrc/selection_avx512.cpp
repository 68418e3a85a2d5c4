#include "avx512_begin.h"
#include "parallel.h"
#include "scratch.h"
#include "selection.h"
#include "vec.h"
#include "loops.h"
#include "selection_vec.h"
#include "selection_impl.h"

const pagefleet::SelectionKernels pagefleet::selection_avx512 = pagefleet::avx512::table;
