#include "avx2_begin.h"
#include "kv.h"
#include "vec.h"
#include "kv_write.h"
#include "kv_impl.h"

const pagefleet::KvKernels pagefleet::kv_avx2 = {pagefleet::avx2::write_kv};
