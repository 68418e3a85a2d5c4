// See attention.h. Compiled once an instruction set, for the numbers (`Math`) that its products take.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

inline constexpr int64_t kBlockRows = 24;  // rows whose scores are in the cache at once
inline constexpr float kLog2e = 1.44269504088896341f;
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// A tile's cached tokens: where they lie, and which of them nobody may see.
struct Tile {
    const char* keys[kTile];
    const char* values[kTile];
    float key_scales[kTile];
    float value_scales[kTile];
    bool hidden[kTile];
    bool any_hidden;
};

struct Row {
    int64_t query;     // of the plan
    int64_t head;      // of the query heads
    int64_t position, oldest;
};

// What one thread works in.
template <typename Math>
struct Scratch {
    Tile* tiles;  // two: the tile at hand, and the next, to fetch it ahead
    Row* rows;
    char* nothing;     // a row of zeros
    uint32_t* query;   // [rows][key_units]
    uint32_t* keys;    // [key_units][kTile]
    uint32_t* values;  // [kTile / per_unit][width]
    uint32_t* scores;  // [kBlockRows][kTile]; weights take their place
    float* highest;    // [rows]
    float* total;
    float* tile_highest;
    float* tile_total;
    float* keep;  // what a row's values are multiplied with when a tile is folded in,
    float* take;  // and the tile's
    float** to;   // where a row's values of this tile go, if they are not folded at once
    float* sum;   // [rows][width]
    int64_t key_units, width, nothing_bytes, bytes;

    Scratch(const AttentionCall& call, char* memory) {
        key_units = (call.layer.key_size + Math::per_unit - 1) / Math::per_unit;
        width = padded_size(call.layer.value_size);
        const int64_t count = std::max<int64_t>(call.plan.most_rows, call.plan.group);
        const int64_t padded = padded_size(count);
        char* at = memory;
        const auto take_from = [&at](auto*& pointer, int64_t n) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
            at += (n * static_cast<int64_t>(sizeof(*pointer)) + 63) / 64 * 64;
        };
        take_from(tiles, 2);
        take_from(rows, count);
        nothing_bytes = std::max(call.layer.key_size, call.layer.value_size) * element_bytes(call.layer.type);
        take_from(nothing, nothing_bytes);
        take_from(query, count * key_units);
        take_from(keys, key_units * kTile);
        take_from(values, kTile / Math::per_unit * width);
        take_from(scores, kBlockRows * kTile);
        for (float** floats : {&highest, &total, &tile_highest, &tile_total, &keep, &take}) take_from(*floats, padded);
        take_from(to, count);
        take_from(sum, count * width);
        bytes = at - memory;
    }
};

template <typename Math>
int64_t scratch_bytes(const AttentionCall& call) {
    return Scratch<Math>(call, nullptr).bytes;
}

// Tokens [tile * kTile, tile * kTile + end). What nobody may see is a row of zeros, `nothing`: its memory may hold anything.
inline void find_tile(const AttentionCall& call, const AttentionPlan::Item& item, int64_t tile, int64_t end,
                      const char* nothing, Tile& out) {
    const KvLayer& layer = call.layer;
    const int64_t key_bytes = layer.key_size * element_bytes(layer.type);
    const int64_t value_bytes = layer.value_size * element_bytes(layer.type);
    const int32_t* table = call.plan.block_tables + item.sequence * call.plan.table_width;
    const int64_t size = layer.block_size;
    out.any_hidden = false;
    int64_t t = 0;
    for (int64_t token = tile * kTile; t < end;) {
        const int64_t column = token / size, offset = token - column * size;
        const int64_t count = std::min(size - offset, end - t);
        const int64_t block = table[column];
        if (block == 0) {
            out.any_hidden = true;
            for (int64_t i = t; i < t + count; ++i) {
                out.keys[i] = out.values[i] = nothing;
                out.key_scales[i] = out.value_scales[i] = 0.0f;
                out.hidden[i] = true;
            }
        } else {
            const int64_t row = item.kv_head * size + offset;
            const char* keys = layer.keys + block * layer.block_bytes + row * key_bytes;
            const char* values = layer.values + block * layer.block_bytes + row * value_bytes;
            for (int64_t i = 0; i < count; ++i) {
                out.keys[t + i] = keys + i * key_bytes;
                out.values[t + i] = values + i * value_bytes;
                out.hidden[t + i] = false;
            }
            if (layer.type == Type::int8) {
                const int64_t skip = block * layer.block_bytes + row * static_cast<int64_t>(sizeof(float));
                std::memcpy(out.key_scales + t, layer.key_scales + skip, count * sizeof(float));
                std::memcpy(out.value_scales + t, layer.value_scales + skip, count * sizeof(float));
            }
        }
        t += count;
        token += count;
    }
    for (; t % 16; ++t) {  // to whole registers
        out.keys[t] = out.values[t] = nothing;
        out.key_scales[t] = out.value_scales[t] = 0.0f;
        out.hidden[t] = true;
    }
}

// Scores of one row against a tile become weights; returns the highest score (times log2 e) and the sum of weights.
// The row sees columns [low, high).
template <typename Math>
inline void softmax_row(const AttentionCall& call, const Tile& tile, uint32_t* row, int64_t columns, int64_t low,
                        int64_t high, float* highest, float* total) {
    auto* scores = reinterpret_cast<float*>(row);
    const bool scaled = call.layer.type == Type::int8;
    float factor = call.scale * kLog2e;
    if (scaled || call.softcap != 0.0f || factor <= 0.0f) {
        for (int64_t i = 0; i < columns; i += Vec::lanes) {
            Vec s = load(scores + i);
            if (scaled) s = s * load(tile.key_scales + i);
            s = s * broadcast(call.scale);
            if (call.softcap != 0.0f) {  // cap tanh(s / cap) = cap (1 - 2 / (e^(2 s / cap) + 1))
                const Vec grown = exp(s * broadcast(2.0f / call.softcap)) + broadcast(1.0f);
                s = broadcast(call.softcap) - broadcast(2.0f * call.softcap) / grown;
            }
            store(scores + i, s);
        }
        factor = kLog2e;
    }
    for (int64_t i = 0; i < low; ++i) scores[i] = kNothing;
    for (int64_t i = std::max<int64_t>(high, 0); i < columns; ++i) scores[i] = kNothing;
    if (tile.any_hidden)
        for (int64_t i = 0; i < columns; ++i)
            if (tile.hidden[i]) scores[i] = kNothing;

    Vec most = broadcast(kNothing);
    for (int64_t i = 0; i < columns; i += Vec::lanes) most = max(most, load(scores + i));
    const float best = largest(most) * factor;
    const Vec base = broadcast(best == kNothing ? 0.0f : best);
    Vec sum_of_weights = zero();
    for (int64_t i = 0; i < columns; i += Vec::lanes) {
        Vec w = exp2<Math::per_unit == 1 ? 6 : 3>(fma(load(scores + i), broadcast(factor), zero() - base));
        sum_of_weights = sum_of_weights + w;
        if (scaled) w = w * load(tile.value_scales + i);
        Math::store_weights(row, i, w);
    }
    *highest = best;
    *total = sum(sum_of_weights);
}

// Fold a state into another: `keep` and `take` are what their values are to be multiplied with.
inline void fold_states(float* highest, float* total, const float* tile_highest, const float* tile_total, float* keep,
                        float* take, int64_t rows) {
    along(rows, [&](int64_t r, auto some) {
        const Vec old = load(highest + r, some), more = load(tile_highest + r, some);
        const Vec best = max(old, more);
        const Vec a = exp2<6>(old - best), b = exp2<6>(more - best);  // NaN where both see nothing: 0
        store(keep + r, a, some);
        store(take + r, b, some);
        store(total + r, fma(load(tile_total + r, some), b, load(total + r, some) * a), some);
        store(highest + r, best, some);
    });
}

template <typename Math, typename T>
void load_queries(const AttentionCall& call, const Row* rows, int64_t count, uint32_t* out, int64_t units) {
    const int64_t size = call.layer.key_size;
    for (int64_t r = 0; r < count; ++r) {
        const int64_t token = call.plan.queries[rows[r].query].token;
        const T* from = static_cast<const T*>(call.query) + token * call.query_stride + rows[r].head * size;
        uint32_t* to = out + r * units;
        if constexpr (Math::per_unit == 2) {
            to[units - 1] = 0;
            std::memcpy(to, from, size * sizeof(T));
        } else {
            for (int64_t i = 0; i < size; i += Vec::lanes) {
                if (size - i >= Vec::lanes)
                    store_unit(to + i, load(from + i));
                else
                    store(reinterpret_cast<float*>(to + i), load(from + i, static_cast<int>(size - i)),
                          static_cast<int>(size - i));
            }
        }
    }
}

template <typename Math>
void load_queries(const AttentionCall& call, const Row* rows, int64_t count, uint32_t* out, int64_t units) {
    if constexpr (Math::per_unit == 2) return load_queries<Math, bf16>(call, rows, count, out, units);
    switch (call.type) {
        case Type::fp32: return load_queries<Math, float>(call, rows, count, out, units);
        case Type::bf16: return load_queries<Math, bf16>(call, rows, count, out, units);
        case Type::fp16: return load_queries<Math, fp16>(call, rows, count, out, units);
        case Type::int8: return;  // the caller has refused it
    }
}

template <typename T>
void write_row(T* out, const float* sum, float total, int64_t size) {
    const Vec inverse = broadcast(total > 0.0f ? 1.0f / total : 0.0f);
    for (int64_t i = 0; i < size; i += Vec::lanes) {
        const Vec y = load(sum + i) * inverse;
        if (size - i >= Vec::lanes)
            store(out + i, y);
        else
            store(out + i, y, static_cast<int>(size - i));
    }
}

inline void write_row(const AttentionCall& call, int64_t token, int64_t head, const float* sum, float total) {
    const int64_t size = call.layer.value_size, at = (token * call.plan.heads() + head) * size;
    switch (call.type) {
        case Type::fp32: return write_row(static_cast<float*>(call.out) + at, sum, total, size);
        case Type::bf16: return write_row(static_cast<bf16*>(call.out) + at, sum, total, size);
        case Type::fp16: return write_row(static_cast<fp16*>(call.out) + at, sum, total, size);
        case Type::int8: return;
    }
}

// A sink is a token before all others, of weight 1 and without a value.
inline void begin_state(const AttentionCall& call, int64_t head, float* highest, float* total) {
    *highest = call.sinks ? call.sinks[head] * kLog2e : kNothing;
    *total = call.sinks ? 1.0f : 0.0f;
}

template <typename Math, typename F>
inline void with_kv_type(Type type, F&& f) {
    if constexpr (Math::per_unit == 1) {
        if (type == Type::fp32) return f(float{});
        if (type == Type::fp16) return f(fp16{});
    }
    if (type == Type::bf16) return f(bf16{});
    if (type == Type::int8) return f(int8_t{});
}

// Rows [first, first + rows) against the packed tile: scores, weights, then values, folded in or put where they wait.
template <typename Math>
void attend_rows(const AttentionCall& call, const AttentionPlan::Item& item, const Tile& tile, int64_t tile_number,
                 int64_t first, int64_t rows, int64_t columns, Scratch<Math>& s) {
    by_columns(columns, [&](int64_t column, auto registers) {
        by_rows(rows, [&](int64_t r, auto some) {
            constexpr int R = decltype(some)::value, C = decltype(registers)::value;
            Vec sum[R][C];
            product<Math>(s.query + (first + r) * s.key_units, s.key_units, s.keys + column, kTile, s.key_units, sum);
            for (int i = 0; i < R; ++i)
                for (int c = 0; c < C; ++c)
                    store_unit(s.scores + (r + i) * kTile + column + c * Vec::lanes, sum[i][c]);
        });
    });
    const int64_t tile_start = tile_number * kTile;
    for (int64_t r = 0; r < rows; ++r) {
        const Row& row = s.rows[first + r];
        const int64_t low = std::clamp<int64_t>(row.oldest - tile_start, 0, columns);
        const int64_t high = std::min(row.position + 1 - tile_start, columns);
        softmax_row<Math>(call, tile, s.scores + r * kTile, columns, low, high, s.tile_highest + r, s.tile_total + r);
    }
    if (item.alone) {
        fold_states(s.highest + first, s.total + first, s.tile_highest, s.tile_total, s.keep, s.take, rows);
    } else {
        const PartialStates states = partial_states(call);
        for (int64_t r = 0; r < rows; ++r) {
            const Row& row = s.rows[first + r];
            const auto& query = call.plan.queries[row.query];
            s.to[r] = nullptr;
            if (tile_number < query.first_tile() || tile_number >= query.end_tile()) continue;
            const int64_t at = (query.slot + tile_number - query.first_tile()) * call.plan.heads() + row.head;
            states.highest[at] = s.tile_highest[r];
            states.total[at] = s.tile_total[r];
            s.to[r] = states.values + at * states.width;
        }
    }
    by_columns(s.width, [&](int64_t column, auto registers) {
        by_rows(rows, [&](int64_t r, auto some) {
            constexpr int R = decltype(some)::value, C = decltype(registers)::value;
            Vec sum[R][C];
            product<Math>(s.scores + r * kTile, kTile, s.values + column, s.width, columns / Math::per_unit, sum);
            for (int i = 0; i < R; ++i) {
                float* to = item.alone ? s.sum + (first + r + i) * s.width : s.to[r + i];
                if (to == nullptr) continue;
                for (int c = 0; c < C; ++c) {
                    float* at = to + column + c * Vec::lanes;
                    if (item.alone)
                        store(at, fma(sum[i][c], broadcast(s.take[r + i]), load(at) * broadcast(s.keep[r + i])));
                    else
                        store(at, sum[i][c]);
                }
            }
        });
    });
}

template <typename Math>
void run_item(const AttentionCall& call, const AttentionPlan::Item& item, char* memory) {
    Scratch<Math> s(call, memory);
    const AttentionPlan& plan = call.plan;
    int64_t rows = 0, newest = 0;
    for (int64_t i = item.first_query; i < item.end_query; ++i) {
        const auto& query = plan.queries[plan.order[i]];
        newest = std::max(newest, query.position);
        for (int64_t g = 0; g < plan.group; ++g)
            s.rows[rows++] = {plan.order[i], item.kv_head * plan.group + g, query.position, query.oldest};
    }
    load_queries<Math>(call, s.rows, rows, s.query, s.key_units);
    if (item.alone) {
        for (int64_t r = 0; r < rows; ++r) begin_state(call, s.rows[r].head, s.highest + r, s.total + r);
        std::memset(s.sum, 0, rows * s.width * sizeof(float));
    }
    const auto end_of = [&](int64_t tile) { return std::min(kTile, newest + 1 - tile * kTile); };
    std::memset(s.nothing, 0, s.nothing_bytes);
    find_tile(call, item, item.first_tile, end_of(item.first_tile), s.nothing, s.tiles[0]);
    for (int64_t t = item.first_tile; t < item.end_tile; ++t) {
        const Tile& tile = s.tiles[(t - item.first_tile) % 2];
        Tile& next = s.tiles[(t - item.first_tile + 1) % 2];
        const int64_t columns = padded_size(end_of(t));
        const bool more = t + 1 < item.end_tile;
        if (more) {
            find_tile(call, item, t + 1, end_of(t + 1), s.nothing, next);
            for (int64_t i = padded_size(end_of(t + 1)); i < columns; ++i) next.keys[i] = next.values[i] = s.nothing;
        }
        with_kv_type<Math>(call.layer.type, [&](auto type) {
            using T = decltype(type);
            pack_keys<Math, T>(tile.keys, more ? next.keys : nullptr, columns, call.layer.key_size, s.keys);
            pack_values<Math, T>(tile.values, more ? next.values : nullptr, columns, call.layer.value_size, s.width,
                                 s.values);
        });
        for (int64_t first = 0; first < rows; first += kBlockRows) {
            const int64_t count = std::min(kBlockRows, rows - first);
            int64_t seen = 0;  // columns that one of these rows may see
            for (int64_t r = first; r < first + count; ++r)
                if (s.rows[r].oldest < (t + 1) * kTile) seen = std::max(seen, s.rows[r].position + 1 - t * kTile);
            if (seen > 0) attend_rows(call, item, tile, t, first, count, std::min(columns, padded_size(seen)), s);
        }
    }
    if (item.alone)
        for (int64_t r = 0; r < rows; ++r)
            write_row(call, plan.queries[s.rows[r].query].token, s.rows[r].head, s.sum + r * s.width, s.total[r]);
}

template <typename Math>
void fold(const AttentionCall& call, const AttentionPlan::Query& query, int64_t kv_head, char* memory) {
    Scratch<Math> s(call, memory);
    const PartialStates states = partial_states(call);
    const int64_t first = kv_head * call.plan.group, rows = call.plan.group;
    for (int64_t r = 0; r < rows; ++r) begin_state(call, first + r, s.highest + r, s.total + r);
    std::memset(s.sum, 0, rows * s.width * sizeof(float));
    for (int64_t slot = query.slot; slot < query.slot + query.end_tile() - query.first_tile(); ++slot) {
        const int64_t at = slot * call.plan.heads() + first;
        std::memcpy(s.tile_highest, states.highest + at, rows * sizeof(float));
        std::memcpy(s.tile_total, states.total + at, rows * sizeof(float));
        fold_states(s.highest, s.total, s.tile_highest, s.tile_total, s.keep, s.take, rows);
        for (int64_t r = 0; r < rows; ++r) {
            const Vec keep = broadcast(s.keep[r]), take = broadcast(s.take[r]);
            const float* from = states.values + (at + r) * s.width;
            float* to = s.sum + r * s.width;
            for (int64_t i = 0; i < s.width; i += Vec::lanes)
                store(to + i, fma(load(from + i), take, load(to + i) * keep));
        }
    }
    for (int64_t r = 0; r < rows; ++r) write_row(call, query.token, first + r, s.sum + r * s.width, s.total[r]);
}

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
