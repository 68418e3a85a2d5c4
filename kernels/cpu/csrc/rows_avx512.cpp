#include "avx512_begin.h"
#include "parallel.h"
#include "rows.h"
#include "vec.h"
#include "loops.h"
#include "activations.h"
#include "norm_impl.h"
#include "rows_impl.h"

const pagefleet::RowKernels pagefleet::rows_avx512 = pagefleet::avx512::table;
