// From a merged projection to queries and the cache in one pass; a table of it for each instruction set. A token is
// computed in a fixed order by one thread and sees no other token.
#pragma once

#include <cstdint>

#include "kv_cache.h"
#include "norm.h"

namespace pagefleet {

// As `Heads` in backends/ops.py; a norm of kind none is absent.
struct Heads {
    int64_t query_heads;
    int64_t kv_heads;
    int64_t key_size;
    int64_t value_size;
    Norm query_norm, key_norm, value_norm;
    bool norm_all_heads;
    bool norm_after_rotary;
};

// As `Rotary` there: cos and sin are [rows, half]; half 0 for no rotation.
struct Rotary {
    int64_t rows;
    const float* cos;
    const float* sin;
    int64_t half;
    bool interleaved;
};

// Rows of queries, keys and values, `stride` elements apart.
struct Merged {
    Type type;
    const void* data;
    int64_t stride;
    int64_t tokens;
};

struct HeadKernels {
    // Queries [tokens, query_heads, key_size] of qkv's type to `query`; keys and values to `slots` of the layer, a
    // negative one storing nothing. Computed in fp32, rounded once.
    void (*query_and_store)(const KvLayer& layer, const Merged& qkv, const Heads& heads, const Rotary& rotary,
                            const int64_t* slots, void* query);
};

extern const HeadKernels heads_avx2;
extern const HeadKernels heads_avx512;

}  // namespace pagefleet
