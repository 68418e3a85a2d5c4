#include "attention_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace pagefleet {
namespace {

constexpr int64_t kItemsPerThread = 6;  // enough to even out, few enough to stay cheap

struct Sequence {
    int64_t number;
    int64_t first_query, end_query;  // in AttentionPlan::queries
    int64_t first_tile, end_tile;
    int64_t shareable;  // tiles before this one hold only tokens that all of its queries see unless a window hides them
};

// Sequences that have the same blocks in tiles [first_tile, end_tile).
struct Shared {
    std::vector<int64_t> members;  // of Planner::sequences_
    int64_t first_tile, end_tile;
};

class Planner {
public:
    explicit Planner(const AttentionStep& step) : step_(step) {
        plan_.block_tables = step.block_tables;
        plan_.table_width = step.table_width;
        plan_.block_size = step.block_size;
        plan_.kv_heads = step.kv_heads;
        plan_.group = step.group;
        plan_.tokens = step.sequences ? step.query_starts[step.sequences] : 0;
    }

    AttentionPlan plan() {
        list_queries();
        if (sequences_.empty()) return std::move(plan_);
        std::vector<int64_t> all(sequences_.size());
        std::iota(all.begin(), all.end(), 0);
        share(all, 0);
        cut_into_items();
        give_slots();
        return std::move(plan_);
    }

private:
    void list_queries() {
        for (int64_t s = 0; s < step_.sequences; ++s) {
            const int64_t first = step_.query_starts[s], end = step_.query_starts[s + 1];
            if (first == end) continue;
            const int64_t start = step_.kv_lengths[s] - (end - first);
            Sequence sequence{s, static_cast<int64_t>(plan_.queries.size()), 0, 0, 0, start / kTile};
            for (int64_t t = first; t < end; ++t) {
                const int64_t position = start + t - first;
                const int64_t oldest = step_.window ? std::max<int64_t>(0, position - step_.window + 1) : 0;
                plan_.queries.push_back({t, position, oldest, -1});
            }
            sequence.end_query = static_cast<int64_t>(plan_.queries.size());
            sequence.first_tile = plan_.queries[sequence.first_query].first_tile();
            sequence.end_tile = plan_.queries.back().end_tile();
            sequences_.push_back(sequence);
        }
    }

    // Blocks that hold a tile: whole ones, so neighbouring tiles may have one in common.
    int64_t first_block(int64_t tile) const { return tile * kTile / step_.block_size; }
    int64_t blocks(int64_t tile) const {
        return ((tile + 1) * kTile + step_.block_size - 1) / step_.block_size - first_block(tile);
    }

    int compare(const Sequence& a, const Sequence& b, int64_t tile) const {
        const int32_t* x = step_.block_tables + a.number * step_.table_width + first_block(tile);
        const int32_t* y = step_.block_tables + b.number * step_.table_width + first_block(tile);
        return std::memcmp(x, y, sizeof(int32_t) * blocks(tile));
    }

    // `members` have the same blocks before `tile`: find how far that goes on, then look at each part of them.
    void share(std::vector<int64_t> members, int64_t tile) {
        if (members.size() == 1) {
            const Sequence& own = sequences_[members[0]];
            shared_.push_back({std::move(members), std::max(tile, own.first_tile), own.end_tile});
            return;
        }
        int64_t limit = sequences_[members[0]].shareable;
        for (const int64_t m : members) limit = std::min(limit, sequences_[m].shareable);
        const int64_t begin = tile;
        const auto all_equal = [&](int64_t t) {
            return std::all_of(members.begin() + 1, members.end(), [&](int64_t m) {
                return compare(sequences_[members[0]], sequences_[m], t) == 0;
            });
        };
        while (tile < limit && all_equal(tile)) ++tile;
        if (tile > begin) {
            int64_t seen = sequences_[members[0]].first_tile;
            for (const int64_t m : members) seen = std::min(seen, sequences_[m].first_tile);
            if (std::max(seen, begin) < tile) shared_.push_back({members, std::max(seen, begin), tile});
        }
        // those whose own tokens begin in this tile go on alone
        const auto alone = std::stable_partition(members.begin(), members.end(),
                                                 [&](int64_t m) { return sequences_[m].shareable > tile; });
        for (auto m = alone; m != members.end(); ++m) share({*m}, tile);
        members.erase(alone, members.end());
        std::stable_sort(members.begin(), members.end(), [&](int64_t a, int64_t b) {
            return compare(sequences_[a], sequences_[b], tile) < 0;
        });
        for (auto first = members.begin(); first != members.end();) {
            auto end = first + 1;
            while (end != members.end() && compare(sequences_[*first], sequences_[*end], tile) == 0) ++end;
            share({first, end}, tile);
            first = end;
        }
    }

    // What an item costs, in cycles of a machine that does one row and tile a cycle: reading a tile is worth some rows.
    static int64_t cost(int64_t rows, int64_t tiles) { return tiles * (16 + rows); }

    // Queries in `order` over tiles: what all KV heads do alike.
    struct Piece {
        int64_t first_query, end_query, sequence, first_tile, end_tile;
    };

    std::vector<Piece> pieces() {
        std::vector<Piece> result;
        const int64_t most_queries = std::max<int64_t>(1, kMostRows / step_.group);
        in_parts_.assign(plan_.queries.size(), false);
        for (const Shared& shared : shared_) {
            const int64_t begin = static_cast<int64_t>(plan_.order.size());
            for (const int64_t m : shared.members)
                for (int64_t q = sequences_[m].first_query; q < sequences_[m].end_query; ++q) plan_.order.push_back(q);
            const int64_t end = static_cast<int64_t>(plan_.order.size());
            const int64_t cuts = (end - begin + most_queries - 1) / most_queries;
            for (int64_t c = 0; c < cuts; ++c) {
                Piece piece{begin + (end - begin) * c / cuts, begin + (end - begin) * (c + 1) / cuts,
                            sequences_[shared.members[0]].number, shared.end_tile, shared.first_tile};
                for (int64_t i = piece.first_query; i < piece.end_query; ++i) {
                    const auto& query = plan_.queries[plan_.order[i]];
                    piece.first_tile = std::min(piece.first_tile, std::max(shared.first_tile, query.first_tile()));
                    piece.end_tile = std::max(piece.end_tile, std::min(shared.end_tile, query.end_tile()));
                    if (query.first_tile() < shared.first_tile || query.end_tile() > shared.end_tile)
                        in_parts_[plan_.order[i]] = true;
                }
                if (piece.first_tile < piece.end_tile) result.push_back(piece);
            }
        }
        return result;
    }

    void cut_into_items() {
        const std::vector<Piece> all = pieces();
        const auto rows_of = [&](const Piece& p) { return (p.end_query - p.first_query) * step_.group; };
        int64_t total = 0;
        for (const Piece& piece : all) {
            plan_.most_rows = std::max(plan_.most_rows, rows_of(piece));
            total += cost(rows_of(piece), piece.end_tile - piece.first_tile) * step_.kv_heads;
        }
        const int64_t share = std::max<int64_t>(1, total / (step_.threads * kItemsPerThread));
        for (const Piece& piece : all) {
            const int64_t rows = rows_of(piece), tiles = piece.end_tile - piece.first_tile;
            bool alone = true;
            for (int64_t i = piece.first_query; i < piece.end_query; ++i) alone &= !in_parts_[plan_.order[i]];
            int64_t cuts = 1;
            if (step_.threads > 1) cuts = std::clamp<int64_t>((cost(rows, tiles) + share / 2) / share, 1, tiles);
            for (int64_t head = 0; head < step_.kv_heads; ++head)
                for (int64_t c = 0; c < cuts; ++c)
                    plan_.items.push_back({piece.first_query, piece.end_query, piece.sequence, head,
                                           piece.first_tile + tiles * c / cuts,
                                           piece.first_tile + tiles * (c + 1) / cuts, alone && cuts == 1});
        }
        const auto cost_of = [&](const AttentionPlan::Item& item) {
            return cost((item.end_query - item.first_query) * step_.group, item.end_tile - item.first_tile);
        };
        std::stable_sort(plan_.items.begin(), plan_.items.end(),
                         [&](const auto& a, const auto& b) { return cost_of(a) > cost_of(b); });
    }

    void give_slots() {
        for (const auto& item : plan_.items) {
            if (item.alone || item.kv_head != 0) continue;
            for (int64_t i = item.first_query; i < item.end_query; ++i) {
                auto& query = plan_.queries[plan_.order[i]];
                if (query.slot >= 0) continue;
                query.slot = plan_.slots;
                plan_.slots += query.end_tile() - query.first_tile();
                plan_.waiting.push_back(plan_.order[i]);
            }
        }
    }

    const AttentionStep& step_;
    AttentionPlan plan_;
    std::vector<Sequence> sequences_;
    std::vector<Shared> shared_;
    std::vector<bool> in_parts_;  // queries whose tiles more than one piece has
};

}  // namespace

AttentionPlan plan_attention(const AttentionStep& step) { return Planner(step).plan(); }

}  // namespace pagefleet
