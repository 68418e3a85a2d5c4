#include "avx2_begin.h"
#include "linear.h"
#include "vec.h"
#include "linear_ops.h"
#include "linear_impl.h"

namespace pagefleet {
const LinearKernels linear_avx2 = {avx2::w16, avx2::w8a8, avx2::w8a16, avx2::w4a16};
}
