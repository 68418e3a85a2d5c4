// Where one layer's keys and values lie in a pool of blocks (backends/pool.py describes the layout in words).
#pragma once

#include <cstdint>

#include "types.h"

namespace pagefleet {

// Filled in by Python as an array of int64, in this order; an address is of block 0's first element.
struct KvLayer {
    Type type;
    int64_t num_blocks;
    int64_t block_size;   // tokens
    int64_t block_bytes;  // from one block to the next, all layers included
    int64_t heads;
    int64_t key_size;  // elements of one head of one token
    int64_t value_size;
    char* keys;  // in a block: [heads, block_size, key_size]
    char* values;
    char* key_scales;  // int8 only, in a block: fp32 [heads, block_size]
    char* value_scales;
};
static_assert(sizeof(KvLayer) == 11 * sizeof(int64_t), "Python fills it in as 11 integers");

inline int64_t element_bytes(Type type) {
    return type == Type::fp32 ? 4 : type == Type::int8 ? 1 : 2;
}

// The row of `elements` that `head` of the token in `slot` keeps; `first` is `keys` or `values` of the layer.
inline char* kv_row(const KvLayer& layer, char* first, int64_t elements, int64_t slot, int64_t head) {
    const int64_t block = slot / layer.block_size, offset = slot % layer.block_size;
    return first + block * layer.block_bytes + (head * layer.block_size + offset) * elements * element_bytes(layer.type);
}

// Its scale; `first` is `key_scales` or `value_scales`.
inline float* kv_scale(const KvLayer& layer, char* first, int64_t slot, int64_t head) {
    const int64_t block = slot / layer.block_size, offset = slot % layer.block_size;
    return reinterpret_cast<float*>(first + block * layer.block_bytes) + head * layer.block_size + offset;
}

}  // namespace pagefleet
