// Operations on rows of tensors; a table of them for each instruction set. A row is computed in a fixed order by one
// thread and sees no other row, so its bits depend on nothing but its own values.
#pragma once

#include <cstdint>

#include "norm.h"
#include "types.h"

namespace pagefleet {

// As `ACTIVATIONS` in backends/ops.py numbers them.
enum class Activation : int64_t { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, relu2 = 4, identity = 5 };

// Rows of a tensor: `stride` elements apart, their elements side by side.
struct ConstRows {
    const void* data;
    int64_t stride;
};
struct Rows {
    void* data;
    int64_t stride;
};

template <typename T>
inline const T* row(ConstRows x, int64_t r) {
    return static_cast<const T*>(x.data) + r * x.stride;
}
template <typename T>
inline T* row(Rows x, int64_t r) {
    return static_cast<T*>(x.data) + r * x.stride;
}

struct RowKernels {
    // out[r] = x[r] normalised over its n elements.
    void (*norm)(Type type, int64_t rows, int64_t n, ConstRows x, Rows out, const Norm& norm);
    // residual[r] += scale * post(x[r]), in place; out[r] = norm(residual[r]) unless `norm` is none.
    void (*add_norm)(Type type, int64_t rows, int64_t n, ConstRows x, Rows residual, Rows out, const Norm& norm,
                     const Norm& post, float scale);
    // out[r] = activation(x[r]).
    void (*activation)(Type type, int64_t rows, int64_t n, ConstRows x, Rows out, Activation name);
    // out[r] = activation(first n elements of x[r]) * the n after them.
    void (*gated_activation)(Type type, int64_t rows, int64_t n, ConstRows x, Rows out, Activation name);
};

extern const RowKernels rows_avx2;
extern const RowKernels rows_avx512;

}  // namespace pagefleet
