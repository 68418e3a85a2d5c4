// Paged attention, in two parts. `attention_plan.h` lays a step out once for all layers; here a layer's arithmetic is
// done, item by item.
//
// A query's arithmetic is fixed by its position and its keys alone. Cached tokens are taken in tiles of `kTile`, aligned
// at multiples of it. A tile gives a row (one head of one query) a state of its own: the highest score, the sum of
// weights, and the weighted values. States are folded in the order of the tiles. What an item holds (which rows, how
// many tiles, one sequence or several that share blocks) decides only when a tile is computed and where its state waits
// to be folded: a row's bits are the same whatever runs beside it, on any number of threads.
#pragma once

#include <cstdint>

#include "attention_plan.h"
#include "kv_cache.h"

namespace pagefleet {

// One layer of one step.
struct AttentionCall {
    const KvLayer& layer;
    const AttentionPlan& plan;
    Type type;  // of query and out
    const void* query;  // [tokens, heads, key_size]; query_stride elements from token to token
    int64_t query_stride;
    void* out;  // [tokens, heads, value_size]
    float scale;
    float softcap;       // 0: none
    const float* sinks;  // [heads] or null
    float* partial;      // states that wait to be folded: see PartialStates
};

// For each slot (of the plan) and query head: highest score, sum of weights, then the weighted values.
struct PartialStates {
    float* highest;
    float* total;
    float* values;
    int64_t width;  // elements of one row of values
};

// Columns of a row of values in scratch memory: the value size, up to a whole number of registers of any level.
inline int64_t padded_size(int64_t size) { return (size + 15) / 16 * 16; }

inline PartialStates partial_states(const AttentionCall& call) {
    const int64_t rows = call.plan.slots * call.plan.heads();
    return {call.partial, call.partial + rows, call.partial + 2 * rows, padded_size(call.layer.value_size)};
}

inline int64_t partial_floats(const AttentionPlan& plan, const KvLayer& layer) {
    return plan.slots * plan.heads() * (2 + padded_size(layer.value_size));
}

struct AttentionKernels {
    int64_t (*scratch_bytes)(const AttentionCall& call);  // for one thread
    void (*run_item)(const AttentionCall& call, const AttentionPlan::Item& item, char* scratch);
    // Folds the states of one query and KV head, and writes the result.
    void (*fold)(const AttentionCall& call, const AttentionPlan::Query& query, int64_t kv_head, char* scratch);
};

extern const AttentionKernels attention_avx2;
extern const AttentionKernels attention_avx512;
extern const AttentionKernels attention_avx512_bf16;  // bf16 queries over bf16 or int8 keys and values

}  // namespace pagefleet
