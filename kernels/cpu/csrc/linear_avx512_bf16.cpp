#include "avx512_bf16_begin.h"
#include "linear.h"
#include "vec.h"
#include "linear_ops.h"
#include "linear_impl.h"

namespace pagefleet {
const LinearKernels linear_avx512_bf16 = {avx512_bf16::w16, nullptr, avx512_bf16::w8a16, avx512_bf16::w4a16};
}
