// Products of rows with packed weight matrices: out[r, n] = sum over k of x[r, k] * weight[n, k], plus bias[n].
//
// A packed layer is one run of bytes that begins with a `PackedLinear`. Output channels lie in panels as wide as two
// registers; inside a panel, a step holds a few consecutive k of every channel, so that a product reads its weights from
// front to back once for each tile of rows.
#pragma once

#include <cstdint>

#include "types.h"

namespace pagefleet {

// Below this, waking threads costs more than they save.
inline constexpr int64_t kParallelProducts = 1 << 16;

enum class Scheme : int64_t {
    w16 = 0,    // bf16 weights
    w8a8 = 1,   // int8 weights, a scale a channel; rows quantised to int8 as they come, a scale a row
    w8a16 = 2,  // int8 weights, a scale a channel, or one a channel and group of k
    w4a16 = 3,  // 4-bit weights: value * scale + offset, one of each a channel and group of k
};

// What a step of a panel holds for each channel.
enum class Packing : int64_t {
    bf16_pairs = 0,  // 2 k, 4 bytes
    int8_quads = 1,  // 4 k, 4 bytes
    int8_pairs = 2,  // 2 k, 2 bytes
    int4_eights = 3, // 8 k, 4 bytes, the first k in the lowest bits
};

struct PackedLinear {
    int64_t bytes;  // of all of it
    Scheme scheme;
    Packing packing;
    int64_t multiplies_bf16;  // 1: activations are bf16 pairs, 0: fp32 (w8a8: neither)
    int64_t n, k;
    int64_t group;  // k of a group, 0 for none
    int64_t panel;  // channels of a panel
    int64_t steps;  // of a panel
    int64_t step_bytes;
    // distances in bytes from here; 0 for what a scheme has not
    int64_t weights;  // panels, one after another
    int64_t scales;   // fp32 [n]: of channels
    int64_t starts;   // int32 [n]: what sums start from, see w8a8
    int64_t bias;     // fp32 [n]
    int64_t groups;   // fp16 [panels][groups][scales of a panel, then offsets of a panel (4 bits only)]

    const uint8_t* at(int64_t distance) const { return reinterpret_cast<const uint8_t*>(this) + distance; }
    uint8_t* at(int64_t distance) { return reinterpret_cast<uint8_t*>(this) + distance; }
    int64_t panels() const { return (n + panel - 1) / panel; }
    int64_t num_groups() const { return group ? (k + group - 1) / group : 1; }
    int64_t k_of_step() const {
        return packing == Packing::int4_eights ? 8 : packing == Packing::int8_quads ? 4 : 2;
    }
};

// Rows of one call, few enough for their prepared form to stay in a cache.
struct LinearCall {
    const PackedLinear* layer;
    Type type;  // of x and out
    const void* x;
    void* out;
    int64_t rows;
    uint8_t* prepared;  // rows as the kernel multiplies them
    float* row_scales;
    uint8_t* expanded;  // a panel of weights a thread, as the kernel multiplies them
    int64_t expanded_bytes;
};

using LinearKernel = void (*)(const LinearCall&);

struct LinearKernels {
    LinearKernel w16, w8a8, w8a16, w4a16;
};

// Of a level only what it does better than the one before.
extern const LinearKernels linear_avx2, linear_avx512, linear_avx512_vnni, linear_avx512_bf16;

}  // namespace pagefleet
