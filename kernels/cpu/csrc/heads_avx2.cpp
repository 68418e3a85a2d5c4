#include "avx2_begin.h"
#include "heads.h"
#include "parallel.h"
#include "scratch.h"
#include "vec.h"
#include "loops.h"
#include "norm_impl.h"
#include "kv_write.h"
#include "heads_impl.h"

const pagefleet::HeadKernels pagefleet::heads_avx2 = {pagefleet::avx2::query_and_store};
