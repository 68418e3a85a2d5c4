#include "avx512_vnni_begin.h"
#include "linear.h"
#include "vec.h"
#include "linear_ops.h"
#include "linear_impl.h"

namespace pagefleet {
const LinearKernels linear_avx512_vnni = {nullptr, avx512_vnni::w8a8, nullptr, nullptr};
}
