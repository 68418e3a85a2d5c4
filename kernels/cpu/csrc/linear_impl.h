// See linear.h and linear_ops.h. Compiled once an instruction set.
#include <omp.h>

namespace pagefleet::PAGEFLEET_ISA {
namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // two registers of sums a row, and room for weights
constexpr int64_t kPrefetchBytes = 4096;

// -- rows, prepared --------------------------------------------------------------------------------------------------

template <typename T>
float largest_magnitude(const T* x, int64_t k) {
    Vec most = zero(), strange = zero();  // x - x is NaN where x is not finite
    for (int64_t i = 0; i < k; i += kLanes) {
        const Vec v = k - i >= kLanes ? load(x + i) : load(x + i, static_cast<int>(k - i));
        most = max(absolute(v), most);
        strange = strange + (v - v);
    }
    return largest(most) + sum(strange);
}

// One quantised element a lane, of `count` lanes; the rest is 0.
template <typename T>
Ints quantised(const T* x, int count, float inverse) {
    return to_ints((count >= kLanes ? load(x) : load(x, count)) * broadcast(inverse));
}

// Rows of fp32, bf16 pairs, int16 pairs or uint8 quads, as an Op takes them; `width` elements of 4 bytes.
struct AsFloats {
    using Element = float;
    template <typename T>
    static void prepare(const T* x, float* out, int64_t k, int64_t width, float*) {
        for (int64_t i = 0; i < width; i += kLanes) {
            const int count = static_cast<int>(std::clamp<int64_t>(k - i, 0, kLanes));
            const int kept = static_cast<int>(std::min<int64_t>(width - i, kLanes));
            store(out + i, load(x + i, count), kept);
        }
    }
};

struct AsShorts {
    using Element = int32_t;
    template <typename T>
    static void prepare(const T* x, int32_t* out, int64_t k, int64_t width, float* scale) {
        const float most = largest_magnitude(x, k), inverse = most < kTiny ? 0.0f : 127.0f / most;
        *scale = most < kTiny ? 0.0f : most / 127.0f;
        int16_t some[kLanes];
        for (int64_t i = 0; i < 2 * width; i += kLanes) {
            const int count = static_cast<int>(std::clamp<int64_t>(k - i, 0, kLanes));
            store_shorts(some, quantised(x + i, count, inverse));
            std::memcpy(reinterpret_cast<int16_t*>(out) + i, some, 2 * std::min<int64_t>(2 * width - i, kLanes));
        }
    }
    static constexpr float kTiny = 1e-30f;  // its inverse would overflow
};

#if PAGEFLEET_LANES == 16
struct AsBytes {
    using Element = int32_t;
    template <typename T>
    static void prepare(const T* x, int32_t* out, int64_t k, int64_t width, float* scale) {
        const float most = largest_magnitude(x, k), inverse = most < AsShorts::kTiny ? 0.0f : 127.0f / most;
        *scale = most < AsShorts::kTiny ? 0.0f : most / 127.0f;
        for (int64_t i = 0; i < width; i += kLanes / 4) {
            const int count = static_cast<int>(std::clamp<int64_t>(k - 4 * i, 0, kLanes));
            const Ints value = add_ints(quantised(x + 4 * i, count, inverse), broadcast_int(128));
            const int kept = static_cast<int>(std::min<int64_t>(width - i, kLanes / 4));
            _mm_mask_storeu_epi32(out + i, first_lanes(kept), _mm512_cvtepi32_epi8(value));
        }
    }
};

struct AsBf16 {
    using Element = int32_t;
    template <typename T>
    static void prepare(const T* x, int32_t* out, int64_t k, int64_t width, float*) {
        auto* halves = reinterpret_cast<bf16*>(out);
        for (int64_t i = 0; i < 2 * width; i += kLanes) {
            const int count = static_cast<int>(std::clamp<int64_t>(k - i, 0, kLanes));
            store(halves + i, load(x + i, count), static_cast<int>(std::min<int64_t>(2 * width - i, kLanes)));
        }
    }
};
#endif

template <class Rows, typename T>
void prepare_row(const LinearCall& c, int64_t row, int64_t width) {
    auto* out = reinterpret_cast<typename Rows::Element*>(c.prepared) + row * width;
    Rows::prepare(static_cast<const T*>(c.x) + row * c.layer->k, out, c.layer->k, width, c.row_scales + row);
}

// -- tiles -----------------------------------------------------------------------------------------------------------

// A panel of weights, and the rows to multiply it with.
struct Task {
    const uint8_t* weights;
    int64_t groups, steps_of_group, step_bytes;
    const fp16* group;  // scales of the first; anything where there are none
    int64_t group_stride;
    const int32_t* starts;
    const uint8_t* rows;
    int64_t row_bytes;
    const uint8_t* ahead;  // what memory should bring to the cache meanwhile: the next panel
    int64_t ahead_bytes;
};

// f(0), f(1), ... as constants, so that sums[...] are registers and never an array in memory
template <class F, int... i>
__attribute__((always_inline)) inline void each(std::integer_sequence<int, i...>, F f) {
    (f(std::integral_constant<int, i>{}), ...);
}
template <int count>
using Upto = std::make_integer_sequence<int, count>;

template <class Op, int rows, int part>
__attribute__((always_inline)) inline void multiply(const Op (&op)[2], const typename Op::Element* a, int64_t stride, const uint8_t* b,
                     typename Op::Acc (&sums)[rows][2]) {
    if constexpr (part < Op::parts) {
        const auto first = op[0].template weight<part>(b), second = op[1].template weight<part>(b + Op::bytes);
        each(Upto<rows>{}, [&](auto r) {
            Op::add(sums[r][0], a + r * stride + part, first);
            Op::add(sums[r][1], a + r * stride + part, second);
        });
        multiply<Op, rows, part + 1>(op, a, stride, b, sums);
    }
}

// Sums of `rows` rows, as floats: out [rows][kPanel].
template <class Op, int rows>
void tile(const Task& t, const uint8_t* from, const uint8_t* ahead, int64_t ahead_step, float* out) {
    using Element = typename Op::Element;
    typename Op::Acc sums[rows][2];
    Op op[2];
    each(Upto<2 * rows>{}, [&](auto i) { sums[i / 2][i % 2] = Op::start(t.starts + (i % 2) * kLanes); });
    const auto* a = reinterpret_cast<const Element*>(from);
    const int64_t stride = t.row_bytes / static_cast<int64_t>(sizeof(Element));
    const uint8_t* b = t.weights;
    const fp16* group = t.group;
    for (int64_t g = 0; g < t.groups; ++g, group += t.group_stride) {
        for (int j = 0; j < 2; ++j) op[j].begin_group(group + j * kLanes);
        for (int64_t s = 0; s < t.steps_of_group; ++s, a += Op::parts, b += 2 * Op::bytes, ahead += ahead_step) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
            if (Op::bytes > 32) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T0);
            multiply<Op, rows, 0>(op, a, stride, b, sums);
        }
    }
    each(Upto<2 * rows>{}, [&](auto i) { store(out + i * kLanes, Op::total(sums[i / 2][i % 2])); });
}

template <class Op>
void tile_of(int rows, const Task& t, const uint8_t* from, const uint8_t* ahead, int64_t ahead_step, float* out) {
    switch (rows) {
        case 1: return tile<Op, 1>(t, from, ahead, ahead_step, out);
        case 2: return tile<Op, 2>(t, from, ahead, ahead_step, out);
        case 3: return tile<Op, 3>(t, from, ahead, ahead_step, out);
        case 4: return tile<Op, 4>(t, from, ahead, ahead_step, out);
        case 5: return tile<Op, 5>(t, from, ahead, ahead_step, out);
        case 6: return tile<Op, 6>(t, from, ahead, ahead_step, out);
#if PAGEFLEET_LANES == 16
        case 7: return tile<Op, 7>(t, from, ahead, ahead_step, out);
        case 8: return tile<Op, 8>(t, from, ahead, ahead_step, out);
        case 9: return tile<Op, 9>(t, from, ahead, ahead_step, out);
        case 10: return tile<Op, 10>(t, from, ahead, ahead_step, out);
        case 11: return tile<Op, 11>(t, from, ahead, ahead_step, out);
        case 12: return tile<Op, 12>(t, from, ahead, ahead_step, out);
#endif
    }
}

// Scales, bias and the output's type.
template <typename T>
void finish(const LinearCall& c, int64_t row, int64_t rows, int64_t channel, const float* sums) {
    const PackedLinear& l = *c.layer;
    auto* out = static_cast<T*>(c.out) + row * l.n + channel;
    const float* scales = l.scales ? reinterpret_cast<const float*>(l.at(l.scales)) + channel : nullptr;
    const float* bias = l.bias ? reinterpret_cast<const float*>(l.at(l.bias)) + channel : nullptr;
    const int64_t channels = std::min<int64_t>(kPanel, l.n - channel);
    for (int64_t r = 0; r < rows; ++r) {
        const Vec row_scale = broadcast(l.scheme == Scheme::w8a8 ? c.row_scales[row + r] : 1.0f);
        for (int64_t i = 0; i < channels; i += kLanes) {
            Vec y = load(sums + r * kPanel + i);
            if (scales) y = y * (load(scales + i) * row_scale);
            if (bias) y = y + load(bias + i);
            const int count = static_cast<int>(std::min<int64_t>(kLanes, channels - i));
            count == kLanes ? store(out + r * l.n + i, y) : store(out + r * l.n + i, y, count);
        }
    }
}

template <class Op>
void multiply_panel(const LinearCall& c, const Task& task, int64_t channel, int64_t first, int64_t last) {
    alignas(64) float sums[kTileRows * kPanel];
    const int64_t tiles = (last - first + kTileRows - 1) / kTileRows;
    const int64_t steps = task.groups * task.steps_of_group;
    const int64_t ahead_step = tiles == 1 ? task.step_bytes : (task.ahead_bytes + tiles * steps - 1) / (tiles * steps);
    for (int64_t t = 0; t < tiles; ++t) {  // of like sizes
        const int64_t row = first + (last - first) * t / tiles;
        const int64_t rows = first + (last - first) * (t + 1) / tiles - row;
        const uint8_t* ahead = tiles == 1 ? task.weights + kPrefetchBytes : task.ahead + t * task.ahead_bytes / tiles;
        tile_of<Op>(static_cast<int>(rows), task, task.rows + row * task.row_bytes, ahead, ahead_step, sums);
        switch (c.type) {
            case Type::fp32: finish<float>(c, row, rows, channel, sums); break;
            case Type::bf16: finish<bf16>(c, row, rows, channel, sums); break;
            case Type::fp16: finish<fp16>(c, row, rows, channel, sums); break;
            case Type::int8: break;  // the caller has refused it
        }
    }
}

// The weights of a panel as `Wide` takes them; returns the task of multiplying those.
template <class Op, class Wide, int part>
inline void expand_step(const Op (&op)[2], const uint8_t* b, uint8_t* out) {
    if constexpr (part < Op::parts) {
        for (int j = 0; j < 2; ++j) {
            const auto weight = op[j].template weight<part>(b + j * Op::bytes);
            std::memcpy(out + (2 * part + j) * Wide::bytes, &weight, Wide::bytes);
        }
        expand_step<Op, Wide, part + 1>(op, b, out);
    }
}

template <class Op, class Wide>
Task expanded(const Task& t, uint8_t* out) {
    Op op[2];
    const uint8_t* b = t.weights;
    const fp16* group = t.group;
    uint8_t* to = out;
    for (int64_t g = 0; g < t.groups; ++g, group += t.group_stride) {
        for (int j = 0; j < 2; ++j) op[j].begin_group(group + j * kLanes);
        for (int64_t s = 0; s < t.steps_of_group; ++s, b += 2 * Op::bytes, to += 2 * Op::parts * Wide::bytes)
            expand_step<Op, Wide, 0>(op, b, to);
    }
    Task wide = t;
    wide.weights = out;
    wide.groups = 1;
    wide.steps_of_group = t.groups * t.steps_of_group * Op::parts;
    wide.step_bytes = 2 * Wide::bytes;
    return wide;
}

// -- the whole product -----------------------------------------------------------------------------------------------

// Rows of `direct` type whose k fills whole elements are multiplied where they are. More rows than one tile are
// multiplied with an expanded panel (`Wide`), if that is another Op: the same numbers in the same order.
template <class Op, class Rows, class Wide = Op>
void product(const LinearCall& c, bool direct) {
    const PackedLinear& l = *c.layer;
    const int64_t width = l.steps * Op::parts, row_bytes = direct ? l.k * (c.type == Type::fp32 ? 4 : 2) : 4 * width;
    const int64_t panels = l.panels(), groups = l.num_groups();
#pragma omp parallel if (c.rows * l.n * l.k >= kParallelProducts)
    {
        if (!direct) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < c.rows; ++r) {
                switch (c.type) {
                    case Type::fp32: prepare_row<Rows, float>(c, r, width); break;
                    case Type::bf16: prepare_row<Rows, bf16>(c, r, width); break;
                    case Type::fp16: prepare_row<Rows, fp16>(c, r, width); break;
                    case Type::int8: break;
                }
            }
        }
        // where panels are few for the threads there are, rows are shared out too
        const int64_t wanted = (4 * omp_get_num_threads() + panels - 1) / panels;
        const int64_t blocks = std::clamp<int64_t>(wanted, 1, (c.rows + kTileRows - 1) / kTileRows);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < panels * blocks; ++i) {
            const int64_t p = i / blocks, first = c.rows * (i % blocks) / blocks;
            const int64_t last = c.rows * (i % blocks + 1) / blocks;
            Task task;
            task.weights = l.at(l.weights) + p * l.steps * l.step_bytes;
            task.groups = groups;
            task.steps_of_group = l.steps / groups;
            task.step_bytes = l.step_bytes;
            task.group_stride = kPanel * (l.packing == Packing::int4_eights ? 2 : 1);
            task.group = reinterpret_cast<const fp16*>(l.at(l.groups)) + (l.groups ? p * groups * task.group_stride : 0);
            task.starts = reinterpret_cast<const int32_t*>(l.at(l.starts)) + (l.starts ? p * kPanel : 0);
            task.rows = direct ? static_cast<const uint8_t*>(c.x) : c.prepared;
            task.row_bytes = row_bytes;
            task.ahead_bytes = l.steps * l.step_bytes;
            task.ahead = task.weights + task.ahead_bytes;
            if constexpr (!std::is_same_v<Op, Wide>) {
                if (last - first > Op::tiles_worth_expanding * kTileRows) {
                    uint8_t* room = c.expanded + omp_get_thread_num() * c.expanded_bytes;
                    multiply_panel<Wide>(c, expanded<Op, Wide>(task, room), p * kPanel, first, last);
                    continue;
                }
            }
            multiply_panel<Op>(c, task, p * kPanel, first, last);
        }
    }
}

// -- what a level has -------------------------------------------------------------------------------------------------

#if defined(PAGEFLEET_BF16)

// x itself has the elements that an Op takes
inline bool whole_rows(const LinearCall& c, int parts) {
    const bool aligned = reinterpret_cast<uintptr_t>(c.x) % 4 == 0;
    return c.type == Type::bf16 && c.layer->k == 2 * c.layer->steps * parts && aligned;
}

void w16(const LinearCall& c) { product<Bf16Pairs, AsBf16>(c, whole_rows(c, 1)); }

void w8a16(const LinearCall& c) {
    if (c.layer->group) return product<Int8AsBf16<true>, AsBf16, Bf16Pairs>(c, whole_rows(c, 1));
    product<Int8AsBf16<false>, AsBf16, Bf16Pairs>(c, whole_rows(c, 1));
}

void w4a16(const LinearCall& c) { product<Int4AsBf16, AsBf16, Bf16Pairs>(c, whole_rows(c, 4)); }

#elif defined(PAGEFLEET_VNNI)

void w8a8(const LinearCall& c) { product<Int8Quads, AsBytes>(c, false); }

#else

inline bool whole_rows(const LinearCall& c, int parts) {
    return c.type == Type::fp32 && c.layer->k == c.layer->steps * parts;
}

void w16(const LinearCall& c) { product<Bf16AsFp32, AsFloats>(c, whole_rows(c, 2)); }

void w8a8(const LinearCall& c) { product<Int8Pairs, AsShorts>(c, false); }

void w8a16(const LinearCall& c) {
    if (c.layer->group) return product<Int8AsFp32<true>, AsFloats, Fp32Weights>(c, whole_rows(c, 2));
    product<Int8AsFp32<false>, AsFloats, Fp32Weights>(c, whole_rows(c, 2));
}

void w4a16(const LinearCall& c) { product<Int4AsFp32, AsFloats, Fp32Weights>(c, whole_rows(c, 8)); }

#endif

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
