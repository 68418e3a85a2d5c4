#include <limits>
#include <type_traits>

#include "avx2_begin.h"
#include "attention.h"
#include "parallel.h"
#include "vec.h"
#include "loops.h"
#include "attention_math.h"
#include "attention_impl.h"

namespace pagefleet {
namespace k = avx2;
const AttentionKernels attention_avx2 = {k::scratch_bytes<k::Fp32>, k::run_item<k::Fp32>, k::fold<k::Fp32>};
}  // namespace pagefleet
