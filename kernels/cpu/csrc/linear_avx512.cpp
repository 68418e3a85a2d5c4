#include "avx512_begin.h"
#include "linear.h"
#include "vec.h"
#include "linear_ops.h"
#include "linear_impl.h"

namespace pagefleet {
const LinearKernels linear_avx512 = {avx512::w16, avx512::w8a8, avx512::w8a16, avx512::w4a16};
}
