// A step, laid out for attention: which rows meet which tiles of cached tokens, in items that threads pick up.
#pragma once

#include <cstdint>
#include <vector>

namespace pagefleet {

inline constexpr int64_t kTile = 128;     // cached tokens
inline constexpr int64_t kMostRows = 192;  // query rows of an item, unless one query has more

struct AttentionPlan {
    struct Query {
        int64_t token;     // its row in the step
        int64_t position;  // it sees the tokens up to here,
        int64_t oldest;    // from here
        int64_t slot;      // first of its tiles' waiting states; -1: one item folds all of its tiles
        int64_t first_tile() const { return oldest / kTile; }
        int64_t end_tile() const { return position / kTile + 1; }
    };

    // Queries order[first_query : end_query] over tiles [first_tile, end_tile) of `sequence`, for one KV head.
    struct Item {
        int64_t first_query, end_query;
        int64_t sequence;  // whose block table leads to the tiles
        int64_t kv_head;
        int64_t first_tile, end_tile;
        bool alone;  // no other item has tiles of these queries
    };

    // The step. The caller keeps block_tables while the plan is used.
    const int32_t* block_tables;  // [sequences, table_width]; 0 is the null block
    int64_t table_width;
    int64_t block_size;
    int64_t kv_heads, group;  // query heads of a KV head
    int64_t heads() const { return kv_heads * group; }

    std::vector<Query> queries;
    std::vector<int64_t> order;    // of queries, as items name them
    std::vector<Item> items;       // dearest first
    std::vector<int64_t> waiting;  // queries whose states are folded at the end
    int64_t tokens = 0;
    int64_t slots = 0;
    int64_t most_rows = 0;  // of an item
};

struct AttentionStep {
    const int32_t* block_tables;
    int64_t sequences, table_width;
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* kv_lengths;    // [sequences]
    int64_t block_size;
    int64_t window;  // tokens a query sees, its own included; 0: all
    int64_t kv_heads, group;
    int64_t threads;
};

// Sequences whose tables begin with the same blocks read those together.
AttentionPlan plan_attention(const AttentionStep& step);

}  // namespace pagefleet
