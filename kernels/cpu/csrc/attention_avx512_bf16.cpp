#include <limits>
#include <type_traits>

#include "avx512_bf16_begin.h"
#include "attention.h"
#include "parallel.h"
#include "vec.h"
#include "loops.h"
#include "attention_math.h"
#include "attention_impl.h"

namespace pagefleet {
namespace k = avx512_bf16;
const AttentionKernels attention_avx512_bf16 = {k::scratch_bytes<k::Bf16>, k::run_item<k::Bf16>, k::fold<k::Bf16>};
}  // namespace pagefleet
