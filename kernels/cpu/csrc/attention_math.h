// The arithmetic of attention on one level: numbers as products take them, packing, and the products themselves.
//
// A product takes `a` row by row and `b` packed, [depth][columns] of 32-bit units; it is a chain of multiply-adds along
// the depth for every element, so an element's bits do not depend on how many rows or columns are computed with it.
//   Fp32: a unit is one fp32 number.
//   Bf16: a unit is two bf16 numbers that follow each other in depth (VDPBF16PS adds both products).

namespace pagefleet::PAGEFLEET_ISA {

inline Vec load(const int8_t* p, int n) {
#if PAGEFLEET_LANES == 16
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)))};
#else
    int8_t some[8] = {};
    std::memcpy(some, p, n);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(some))))};
#endif
}
inline Vec load(const int8_t* p) {
#if PAGEFLEET_LANES == 16
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#else
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
#endif
}

namespace {

inline constexpr int kPanel = PAGEFLEET_LANES == 16 ? 4 : 2;  // registers of columns in a product
inline constexpr int kProductRows = 6;

inline Vec load_unit(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
inline void store_unit(uint32_t* p, Vec a) { store(reinterpret_cast<float*>(p), a); }
inline Vec broadcast_unit(const uint32_t* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return broadcast(x);
}

struct Fp32 {
    static constexpr int per_unit = 1;  // elements
    template <typename T>
    static Vec load_units(const T* p, int64_t elements) {
        return elements >= Vec::lanes ? load(p) : load(p, static_cast<int>(elements));
    }
    static Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }
    // One row of weights, elements [16 i, 16 i + 16): in place of the scores.
    static void store_weights(uint32_t* row, int64_t i, Vec w) { store_unit(row + i, w); }
};

#ifdef PAGEFLEET_BF16
struct Bf16 {
    static constexpr int per_unit = 2;
    static Vec load_units(const bf16* p, int64_t elements) {
        if (elements >= 32) return {_mm512_castsi512_ps(_mm512_loadu_si512(p))};
        const __mmask32 some = (1u << elements) - 1u;
        return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(some, p))};
    }
    static Vec load_units(const int8_t* p, int64_t elements) {
        const __m256i x = elements >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                         : _mm256_maskz_loadu_epi8((1u << elements) - 1u, p);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
        return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low))};
    }
    static Vec multiply_add(Vec a, Vec b, Vec c) {
        return {_mm512_dpbf16_ps(c.v, (__m512bh)_mm512_castps_si512(a.v), (__m512bh)_mm512_castps_si512(b.v))};
    }
    static void store_weights(uint32_t* row, int64_t i, Vec w) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + i / 2), (__m256i)_mm512_cvtneps_pbh(w.v));
    }
};
#endif

// 2^x for x <= 0, with 2^0 exactly 1; below 2^-126 it may be 0, and NaN gives 0. `degree` 6 is exact to fp32's rounding,
// 3 to 1e-4.
template <int degree>
inline Vec exp2(Vec x) {
    x = max(x, broadcast(-160.0f));
    const Vec n = round(x);
    const Vec r = x - n;
    Vec p;
    if constexpr (degree == 6) {
        p = fma(broadcast(1.5353362e-4f), r, broadcast(1.3398874e-3f));
        p = fma(p, r, broadcast(9.6184373e-3f));
        p = fma(p, r, broadcast(5.5503324e-2f));
        p = fma(p, r, broadcast(2.4022648e-1f));
        p = fma(p, r, broadcast(6.9314720e-1f));
    } else {
        p = fma(broadcast(5.5008931e-2f), r, broadcast(2.4221097e-1f));
        p = fma(p, r, broadcast(6.9328293e-1f));
    }
    p = fma(p, r, broadcast(1.0f));
#if PAGEFLEET_LANES == 16
    return {_mm512_scalef_ps(p.v, n.v)};
#else
    const Vec scaled = scale_by_power_of_two(p, max(n, broadcast(-126.0f)));
    return {_mm256_and_ps(scaled.v, _mm256_cmp_ps(n.v, _mm256_set1_ps(-126.0f), _CMP_GE_OQ))};
#endif
}

// r[i] holds row i of a square of 32-bit units; afterwards column i.
[[gnu::always_inline]] inline void transpose(Vec* r) {
#if PAGEFLEET_LANES == 16
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j].v = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    // r[i + k]: column k (of every four) of rows i to i + 3, a quarter for each of columns k, k + 4, k + 8, k + 12
    for (int k = 0; k < 4; ++k) {
        const __m512 a = _mm512_shuffle_f32x4(r[k].v, r[k + 4].v, 0x88), b = _mm512_shuffle_f32x4(r[k].v, r[k + 4].v, 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(r[k + 8].v, r[k + 12].v, 0x88);
        const __m512 d = _mm512_shuffle_f32x4(r[k + 8].v, r[k + 12].v, 0xdd);
        t[k] = _mm512_shuffle_f32x4(a, c, 0x88);
        t[k + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        t[k + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        t[k + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) r[i].v = t[i];
#else
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
        t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j].v = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            r[i + 2 * j + 1].v = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int k = 0; k < 4; ++k) {
        t[k] = _mm256_permute2f128_ps(r[k].v, r[k + 4].v, 0x20);
        t[k + 4] = _mm256_permute2f128_ps(r[k].v, r[k + 4].v, 0x31);
    }
    for (int i = 0; i < 8; ++i) r[i].v = t[i];
#endif
}

inline void prefetch(const char* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

// Keys of `tokens` (a multiple of 16) from their rows, to [units of a row][kTile]: token t becomes column t.
template <typename Math, typename T>
void pack_keys(const char* const* rows, const char* const* next_rows, int64_t tokens, int64_t size, uint32_t* out) {
    for (int64_t t = 0; t < tokens; t += Vec::lanes) {
        for (int j = 0; next_rows && j < Vec::lanes; ++j) prefetch(next_rows[t + j], size * sizeof(T));
        for (int64_t i = 0; i < size; i += Vec::lanes * Math::per_unit) {
            Vec square[Vec::lanes];
            for (int j = 0; j < Vec::lanes; ++j)
                square[j] = Math::load_units(reinterpret_cast<const T*>(rows[t + j]) + i, size - i);
            transpose(square);
            uint32_t* to = out + i / Math::per_unit * kTile + t;
            const int64_t units = (size - i + Math::per_unit - 1) / Math::per_unit;
            for (int j = 0; j < Vec::lanes && j < units; ++j) store_unit(to + j * kTile, square[j]);
        }
    }
}

// Values of `tokens` (a multiple of 16) from their rows, to [units of tokens][width].
template <typename Math, typename T>
void pack_values(const char* const* rows, const char* const* next_rows, int64_t tokens, int64_t size, int64_t width,
                 uint32_t* out) {
    for (int64_t t = 0; t < tokens; t += Math::per_unit) {
        uint32_t* to = out + t / Math::per_unit * width;
        for (int j = 0; next_rows && j < Math::per_unit; ++j) prefetch(next_rows[t + j], size * sizeof(T));
        if constexpr (Math::per_unit == 1) {
            for (int64_t i = 0; i < width; i += Vec::lanes)
                store_unit(to + i, i < size ? Math::load_units(reinterpret_cast<const T*>(rows[t]) + i, size - i) : zero());
        }
#ifdef PAGEFLEET_BF16
        else {
            const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                                 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
            const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
            for (int64_t i = 0; i < size; i += 32) {
                const auto* even = reinterpret_cast<const T*>(rows[t]) + i;
                const auto* odd = reinterpret_cast<const T*>(rows[t + 1]) + i;
                const __m512i a = _mm512_castps_si512(Math::load_units(even, size - i).v);
                const __m512i b = _mm512_castps_si512(Math::load_units(odd, size - i).v);
                _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(a, low, b));
                if (i + 16 < width) _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi16(a, high, b));
            }
        }
#endif
    }
}

// a: R rows, `a_stride` units apart; b: `columns` registers, b_stride units from one depth to the next.
template <typename Math, int R, int columns>
[[gnu::always_inline]] inline void product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                    Vec (&sum)[R][columns]) {
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < columns; ++c) sum[r][c] = zero();
    for (int64_t k = 0; k < depth; ++k) {
        Vec row[columns];
        for (int c = 0; c < columns; ++c) row[c] = load_unit(b + k * b_stride + c * Vec::lanes);
        for (int r = 0; r < R; ++r) {
            const Vec x = broadcast_unit(a + r * a_stride + k);
            for (int c = 0; c < columns; ++c) sum[r][c] = Math::multiply_add(x, row[c], sum[r][c]);
        }
    }
}

// f(first row, rows as a constant) for all of `rows`, a few at a time.
template <typename F>
inline void by_rows(int64_t rows, F&& f) {
    int64_t r = 0;
    for (; r + kProductRows <= rows; r += kProductRows) f(r, std::integral_constant<int, kProductRows>{});
    switch (rows - r) {
        case 1: return f(r, std::integral_constant<int, 1>{});
        case 2: return f(r, std::integral_constant<int, 2>{});
        case 3: return f(r, std::integral_constant<int, 3>{});
        case 4: return f(r, std::integral_constant<int, 4>{});
        case 5: return f(r, std::integral_constant<int, 5>{});
    }
}

// f(first column, registers as a constant) for all `columns`, a multiple of a register.
template <typename F>
inline void by_columns(int64_t columns, F&& f) {
    int64_t c = 0;
    for (; c + kPanel * Vec::lanes <= columns; c += kPanel * Vec::lanes) f(c, std::integral_constant<int, kPanel>{});
    for (; c < columns; c += Vec::lanes) f(c, std::integral_constant<int, 1>{});
}

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
