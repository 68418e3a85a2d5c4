// How a panel's step is multiplied with a row: one `Op` for each packing of weights and form of activations.
//
// An Op has: Element, a prepared activation (4 bytes: one fp32, 2 bf16, 2 int16 or 4 uint8); Acc, a register of sums, one
// a channel; `bytes` that a register of channels takes in a step; `parts`, the elements of a row that a step multiplies.
// `weight<part>` gives a register of weights, `add` multiplies. Weights that must be made from what is packed are made
// anew for each tile of rows, up to `tiles_worth_expanding`; for more, once. No include guard: one inclusion a translation unit.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

#if PAGEFLEET_LANES == 16

using Ints = __m512i;
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_bytes_as_shorts(const void* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
template <int bits>
inline Ints shift_left(Ints a) { return _mm512_slli_epi32(a, bits); }
template <int bits>
inline Ints shift_right(Ints a) { return _mm512_srli_epi32(a, bits); }
template <int bits>
inline Ints shift_right_signed(Ints a) { return _mm512_srai_epi32(a, bits); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Vec as_floats(Ints a) { return {_mm512_castsi512_ps(a)}; }
inline Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a)}; }
inline Ints to_ints(Vec a) { return _mm512_cvtps_epi32(a.v); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints add_products_of_shorts(Ints sum, Ints a, Ints b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
inline Vec absolute(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline void store_shorts(int16_t* p, Ints a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
}
// the float of the lowest 4 bits of each lane
inline Vec nibble(Ints a) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(a, values)};
}

#else

using Ints = __m256i;
inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Ints broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints load_bytes_as_shorts(const void* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
template <int bits>
inline Ints shift_left(Ints a) { return _mm256_slli_epi32(a, bits); }
template <int bits>
inline Ints shift_right(Ints a) { return _mm256_srli_epi32(a, bits); }
template <int bits>
inline Ints shift_right_signed(Ints a) { return _mm256_srai_epi32(a, bits); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Vec as_floats(Ints a) { return {_mm256_castsi256_ps(a)}; }
inline Vec to_floats(Ints a) { return {_mm256_cvtepi32_ps(a)}; }
inline Ints to_ints(Vec a) { return _mm256_cvtps_epi32(a.v); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints add_products_of_shorts(Ints sum, Ints a, Ints b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline Vec absolute(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline void store_shorts(int16_t* p, Ints a) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, a), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline Vec nibble(Ints a) { return to_floats(both(a, broadcast_int(15))); }

#endif

constexpr int kLanes = Vec::lanes;

// Ops whose sums are floats: fp32 activations, or what is multiplied as floats.
struct FloatSums {
    using Acc = Vec;
    static Acc start(const int32_t*) { return zero(); }
    static Vec total(Acc sum) { return sum; }
    void begin_group(const fp16*) {}
};

struct IntSums {
    using Acc = Ints;
    static Vec total(Acc sum) { return to_floats(sum); }
    void begin_group(const fp16*) {}
};

struct Fp32Activations : FloatSums {
    using Element = float;
    static void add(Acc& sum, const Element* a, Vec weight) { sum = fma(broadcast(*a), weight, sum); }
};

// Weights that were expanded to fp32.
struct Fp32Weights : Fp32Activations {
    static constexpr int bytes = kLanes * 4, parts = 1;
    template <int>
    Vec weight(const uint8_t* p) const {
        return load(reinterpret_cast<const float*>(p));
    }
};

struct Bf16AsFp32 : Fp32Activations {
    static constexpr int bytes = kLanes * 4, parts = 2;
    template <int part>
    Vec weight(const uint8_t* p) const {
        const Ints pair = load_ints(p);
        return as_floats(part == 0 ? shift_left<16>(pair) : both(pair, broadcast_int(-0x10000)));
    }
};

// int8 pairs as fp32; with groups, times the group's scale
template <bool grouped>
struct Int8AsFp32 : Fp32Activations {
    static constexpr int bytes = kLanes * 2, parts = 2;
    static constexpr int tiles_worth_expanding = 2;
    Vec scale;
    void begin_group(const fp16* group) {
        if (grouped) scale = load(group);
    }
    template <int part>
    Vec weight(const uint8_t* p) const {
        const Ints pair = load_bytes_as_shorts(p);
        const Vec value = to_floats(shift_right_signed<16>(part == 0 ? shift_left<16>(pair) : pair));
        return grouped ? value * scale : value;
    }
};

struct Int4AsFp32 : Fp32Activations {
    static constexpr int bytes = kLanes * 4, parts = 8;
    static constexpr int tiles_worth_expanding = 1;
    Vec scale, offset;
    void begin_group(const fp16* group) {
        scale = load(group);
        offset = load(group + 2 * kLanes);
    }
    template <int part>
    Vec weight(const uint8_t* p) const {
        return fma(nibble(shift_right<4 * part>(load_ints(p))), scale, offset);
    }
};

// int8 weights with int16 activations: products of 8 bits cannot saturate in 16, and sums are int32
struct Int8Pairs : IntSums {
    using Element = int32_t;
    static constexpr int bytes = kLanes * 2, parts = 1;
    static Acc start(const int32_t*) { return broadcast_int(0); }
    template <int>
    Ints weight(const uint8_t* p) const {
        return load_bytes_as_shorts(p);
    }
    static void add(Acc& sum, const Element* a, Ints weight) {
        sum = add_products_of_shorts(sum, broadcast_int(*a), weight);
    }
};

#ifdef PAGEFLEET_VNNI
// VPDPBUSD: activations are value + 128, which the sums' start takes away again
struct Int8Quads : IntSums {
    using Element = int32_t;
    static constexpr int bytes = kLanes * 4, parts = 1;
    static Acc start(const int32_t* starts) { return load_ints(starts); }
    template <int>
    Ints weight(const uint8_t* p) const {
        return load_ints(p);
    }
    static void add(Acc& sum, const Element* a, Ints weight) {
        Acc next = sum;  // not the intrinsic: GCC 12 copies the sums before each one of those
        asm("vpdpbusd %2, %1, %0" : "+v"(next) : "v"(broadcast_int(*a)), "v"(weight));
        sum = next;
    }
};
#endif

#ifdef PAGEFLEET_BF16
struct Bf16Activations : FloatSums {
    using Element = int32_t;
    static void add(Acc& sum, const Element* a, Ints weight) {
        sum.v = _mm512_dpbf16_ps(sum.v, (__m512bh)broadcast_int(*a), (__m512bh)weight);
    }
    // two registers of floats, rounded to bf16, as pairs
    static Ints pairs(Vec first, Vec second) {
        const Ints apart = (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
        const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                                                0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d,
                                                0x1e000e, 0x1f000f);
        return _mm512_permutexvar_epi16(order, apart);
    }
};

struct Bf16Pairs : Bf16Activations {
    static constexpr int bytes = kLanes * 4, parts = 1;
    template <int>
    Ints weight(const uint8_t* p) const {
        return load_ints(p);
    }
};

template <bool grouped>
struct Int8AsBf16 : Bf16Activations {
    static constexpr int bytes = kLanes * 2, parts = 1;
    static constexpr int tiles_worth_expanding = 2;
    Int8AsFp32<grouped> values;
    void begin_group(const fp16* group) { values.begin_group(group); }
    template <int>
    Ints weight(const uint8_t* p) const {
        const Vec first = values.template weight<0>(p), second = values.template weight<1>(p);
        if (grouped) return pairs(first, second);
        // 8 bits are exact in bf16: the lower half of the float is 0
        const Ints high = _mm512_castps_si512(second.v), low = _mm512_castps_si512(first.v);
        return _mm512_or_si512(high, shift_right<16>(low));
    }
};

struct Int4AsBf16 : Bf16Activations {
    static constexpr int bytes = kLanes * 4, parts = 4;
    static constexpr int tiles_worth_expanding = 1;
    Int4AsFp32 values;
    void begin_group(const fp16* group) { values.begin_group(group); }
    template <int part>
    Ints weight(const uint8_t* p) const {
        return pairs(values.weight<2 * part>(p), values.weight<2 * part + 1>(p));
    }
};
#endif

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
