#include "avx512_begin.h"
#include "kv.h"
#include "vec.h"
#include "kv_write.h"
#include "kv_impl.h"

const pagefleet::KvKernels pagefleet::kv_avx512 = {pagefleet::avx512::write_kv};
