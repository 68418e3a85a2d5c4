// See selection.h. Compiled once an instruction set.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
const T* row_of(const Logits& logits, int64_t r) {
    return static_cast<const T*>(logits.data) + r * logits.stride;
}

struct Best {
    int64_t id;
    float value;
};

// Block by block, so that only one block has to be searched for the place of the largest.
template <typename T>
Best largest_of(const T* x, int64_t n) {
    constexpr int64_t block = 1024;
    const Vec lowest = broadcast(-kInfinity);
    const auto first_where = [&](int64_t begin, auto&& test) {
        int64_t found = -1;
        along(std::min(block, n - begin), [&](int64_t i, auto part) {
            const unsigned lanes = test(fill(load(x + begin + i, part), part, lowest));
            if (found < 0 && lanes) found = begin + i + __builtin_ctz(lanes);
        });
        return found;
    };
    Best best = {0, -kInfinity};
    int64_t where = 0;
    for (int64_t begin = 0; begin < n; begin += block) {
        Vec top = lowest;
        unsigned nan = 0;
        along(std::min(block, n - begin), [&](int64_t i, auto part) {
            const Vec v = fill(load(x + begin + i, part), part, lowest);
            nan |= not_a_number(v);
            top = max(v, top);
        });
        if (nan) return {first_where(begin, not_a_number), std::numeric_limits<float>::quiet_NaN()};
        if (largest(top) > best.value) best.value = largest(top), where = begin;
    }
    best.id = first_where(where, [&](Vec v) { return equal(v, broadcast(best.value)); });
    return best;
}

struct Share {
    int64_t count = 0;
    double mass = 0.0;
};

// How many of n values are at least `floor`, and their sum.
template <bool with_mass>
Share at_least(const float* x, int64_t n, float floor) {
    const Vec limit = broadcast(floor);
    Share share;
    DoubleSum mass;
    along(n, [&](int64_t i, auto part) {
        const Vec v = fill(load(x + i, part), part, broadcast(-kInfinity));
        const unsigned out = below(v, limit);
        share.count += Vec::lanes - __builtin_popcount(out);
        if (with_mass && out != (1u << Vec::lanes) - 1) mass.add(select_below(v, limit, zero(), v));
    });
    if (n % Vec::lanes && floor == -kInfinity) share.count -= Vec::lanes - n % Vec::lanes;
    share.mass = mass.value();
    return share;
}

// The values in [low, high), in order, to `out`, which may be x; returns how many.
int64_t gather(const float* x, int64_t n, float low, float high, float* out) {
    int64_t count = 0;
    along(n, [&](int64_t i, auto part) {
        const Vec v = fill(load(x + i, part), part, broadcast(kInfinity));
        for (unsigned in = ~below(v, broadcast(low)) & below(v, broadcast(high)); in; in &= in - 1)
            out[count++] = x[i + __builtin_ctz(in)];
    });
    return count;
}

struct Descending {
    bool operator()(float a, float b) const { return a > b; }
};

constexpr int64_t kFew = 1024;     // so many candidates are cheaper to sort than to narrow down by another pass
constexpr int kMostHalvings = 16;  // equal values cannot be told apart by any number of passes

// The k-th largest of n values of which the largest is 0. Passes that only count find a floor that few more than k
// values reach; those alone are looked at one by one. `spare` holds n floats.
float kth_largest(const float* x, int64_t n, int64_t k, float* spare) {
    float low = -1.0f, high = 1.0f;
    int64_t count = at_least<false>(x, n, low).count;
    while (count < k) {
        high = low;
        low = low < -1e4f ? -kInfinity : 2.0f * low;
        count = at_least<false>(x, n, low).count;
    }
    for (int i = 0; i < kMostHalvings && count > k + kFew; ++i) {
        const float middle = 0.5f * (low + high);
        const int64_t reached = at_least<false>(x, n, middle).count;
        (reached >= k ? low : high) = middle;
        if (reached >= k) count = reached;
    }
    gather(x, n, low, kInfinity, spare);
    std::nth_element(spare, spare + k - 1, spare + count, Descending{});
    return spare[k - 1];
}

// The smallest weight in the nucleus: the largest weights that together reach `top_p` of the mass; the largest weight
// is 1. Floors sixteen times lower and lower find the range that it lies in; only that is narrowed down and sorted.
float nucleus_floor(const float* weights, int64_t n, float top_p, float* spare) {
    const double target = static_cast<double>(top_p) * at_least<true>(weights, n, 0.0f).mass;
    float low = 1.0f, high = kInfinity;
    Share from_low = at_least<true>(weights, n, low), from_high;
    while (from_low.mass < target && low > 0.0f) {
        high = low, from_high = from_low;
        low = low < 1e-30f ? 0.0f : 0.0625f * low;
        from_low = at_least<true>(weights, n, low);
    }
    int64_t count = gather(weights, n, low, high, spare);
    double mass = from_high.mass;  // of all that is above the candidates
    for (int i = 0; i < kMostHalvings && count > kFew; ++i) {
        const float middle = 0.5f * (low + std::min(high, 1.0f));
        const double upper = at_least<true>(spare, count, middle).mass;
        if (mass + upper >= target)
            low = middle;
        else
            high = middle, mass += upper;
        count = gather(spare, count, low, high, spare);
    }
    std::sort(spare, spare + count, Descending{});
    for (int64_t i = 0; i < count; ++i) {
        mass += spare[i];
        if (mass >= target) return spare[i];
    }
    return low;
}

// argmax of weight / noise over weights of at least `floor`. -log(1 - u) is at least u, so that a token with
// weight / u below the best score so far cannot win: the logarithm is taken of a handful of tokens only.
int64_t drawn(const float* weights, int64_t n, float floor, uint64_t key) {
    constexpr float slack = 1.00001f;  // more than all roundings of the comparison together
    Uniform noise(key, 0);
    int64_t id = 0;
    float best = 0.0f;
    along(n, [&](int64_t i, auto part) {
        Vec w = load(weights + i, part);
        w = select_below(w, broadcast(floor), zero(), w);
        const Vec u = to_unit(noise.next());
        unsigned candidates = below(u * broadcast(best), w * broadcast(slack));
        if (!candidates) return;
        float some_u[Vec::lanes], some_w[Vec::lanes];
        store(some_u, u);
        store(some_w, w);
        for (; candidates; candidates &= candidates - 1) {
            const int lane = __builtin_ctz(candidates);
            const float exponential = static_cast<float>(-std::log1p(-static_cast<double>(some_u[lane])));
            const float score = some_w[lane] / exponential;
            if (score > best) best = score, id = i + lane;
        }
    });
    return id;
}

template <typename T>
int64_t draw_row(const T* x, int64_t n, const Draw& draw, const DrawReals& reals) {
    float *weights = scratch(2 * n), *spare = weights + n;
    const Vec top = broadcast(static_cast<float>(reals.largest));
    const Vec temperature = broadcast(static_cast<float>(reals.temperature));
    along(n, [&](int64_t i, auto part) { store(weights + i, (load(x + i, part) - top) / temperature, part); });
    float floor = static_cast<float>(reals.log_min_p);
    if (draw.top_k > 0 && draw.top_k < n) floor = std::max(floor, kth_largest(weights, n, draw.top_k, spare));
    along(n, [&](int64_t i, auto part) {
        const Vec v = load(weights + i, part);
        store(weights + i, select_below(v, broadcast(floor), zero(), exp(v)), part);
    });
    const float top_p = static_cast<float>(reals.top_p);
    return drawn(weights, n, top_p < 1.0f ? nucleus_floor(weights, n, top_p, spare) : 0.0f,
                 static_cast<uint64_t>(draw.key));
}

void largest(const Logits& logits, int64_t rows, int64_t* ids, float* values) {
    with_type(logits.type, [&](auto element) {
        using T = decltype(element);
        over_rows(rows, rows * logits.vocab, [&](int64_t r) {
            const Best best = largest_of(row_of<T>(logits, r), logits.vocab);
            ids[r] = best.id;
            values[r] = best.value;
        });
    });
}

void draw(const Logits& logits, int64_t count, const Draw* draws, const DrawReals* reals, int64_t* ids) {
    with_type(logits.type, [&](auto element) {
        using T = decltype(element);
        over_rows(count, count * logits.vocab, [&](int64_t i) {
            ids[i] = draw_row(row_of<T>(logits, draws[i].row), logits.vocab, draws[i], reals[i]);
        });
    });
}

template <typename T>
void score_row(const T* x, int64_t n, int64_t id, double* logprob, int64_t* rank, double* total) {
    const float top = largest_of(x, n).value, chosen = widened(x[id]);
    DoubleSum weights;
    int64_t larger = 0;
    along(n, [&](int64_t i, auto part) {
        const Vec v = fill(load(x + i, part), part, broadcast(-kInfinity));
        weights.add(only(exp(v - broadcast(top)), part));
        larger += __builtin_popcount(below(broadcast(chosen), v));
    });
    const double log_mass = std::log(weights.value());
    *logprob = static_cast<double>(chosen) - top - log_mass;
    *rank = 1 + larger;
    *total = top + log_mass;
}

void score(const Logits& logits, int64_t count, const int64_t* rows, const int64_t* ids, double* logprobs,
           int64_t* ranks, double* totals) {
    with_type(logits.type, [&](auto element) {
        using T = decltype(element);
        over_rows(count, count * logits.vocab, [&](int64_t i) {
            score_row(row_of<T>(logits, rows[i]), logits.vocab, ids[i], logprobs + i, ranks + i, totals + i);
        });
    });
}

constexpr SelectionKernels table = {largest, draw, score};

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
