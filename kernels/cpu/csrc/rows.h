// Operations on rows of tensors; a table of them for each instruction set.
#pragma once

#include <cstdint>

#include "types.h"

namespace pagefleet {

// Below this, waking threads costs more than they save.
inline constexpr int64_t kParallelElements = 1 << 15;

enum class NormKind : int64_t { rms = 0, layer = 1 };

struct RowKernels {
    // out[r] = x[r] normalised over its n elements; weight and bias fp32 [n] or null. Rows are `stride` elements apart.
    void (*norm)(Type type, const void* x, void* out, int64_t rows, int64_t n, int64_t x_stride, int64_t out_stride,
                 NormKind kind, const float* weight, const float* bias, float eps);
};

extern const RowKernels rows_avx2;
extern const RowKernels rows_avx512;

}  // namespace pagefleet
