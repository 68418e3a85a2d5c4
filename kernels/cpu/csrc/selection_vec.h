// What selection needs of a register beside vec.h: comparisons as bit masks, sums in double, and the noise of a
// register of token ids. Include it after loops.h.

namespace pagefleet::PAGEFLEET_ISA {

inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMix1 = 0xBF58476D1CE4E5B9u, kMix2 = 0x94D049BB133111EBu;

#if PAGEFLEET_LANES == 16

inline unsigned below(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }  // bit i: a[i] < b[i]
inline unsigned equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline unsigned not_a_number(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }

inline Vec fill(Vec a, First few, Vec rest) { return {_mm512_mask_blend_ps(first_lanes(few.count), rest.v, a.v)}; }

struct DoubleSum {
    __m512d low, high;
    DoubleSum() : low(_mm512_setzero_pd()), high(low) {}
    void add(Vec a) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)));
    }
    double value() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};

// Uniform numbers of the ids from `first` on: the upper halves of SplitMix64's outputs for `key`, over 2^32.
class Uniform {
public:
    Uniform(uint64_t key, uint64_t first) {
        const __m512i lanes = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
        const __m512i ids = _mm512_add_epi64(lanes, _mm512_set1_epi64(static_cast<int64_t>(first)));
        low_ = _mm512_add_epi64(_mm512_mullo_epi64(ids, golden(1)), _mm512_set1_epi64(static_cast<int64_t>(key)));
        high_ = _mm512_add_epi64(low_, golden(8));
    }
    Vec next() {
        const __m256 low = _mm512_cvtepu64_ps(mixed(low_)), high = _mm512_cvtepu64_ps(mixed(high_));
        low_ = _mm512_add_epi64(low_, golden(16));
        high_ = _mm512_add_epi64(high_, golden(16));
        return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
    }

private:
    static __m512i golden(uint64_t n) { return _mm512_set1_epi64(static_cast<int64_t>(n * kGolden)); }
    static __m512i mixed(__m512i x) {
        x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 30));
        x = _mm512_mullo_epi64(x, _mm512_set1_epi64(static_cast<int64_t>(kMix1)));
        x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 27));
        x = _mm512_mullo_epi64(x, _mm512_set1_epi64(static_cast<int64_t>(kMix2)));
        return _mm512_srli_epi64(x, 32);
    }
    __m512i low_, high_;
};

#else

inline unsigned below(Vec a, Vec b) {  // bit i: a[i] < b[i]
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)));
}
inline unsigned equal(Vec a, Vec b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)));
}
inline unsigned not_a_number(Vec a) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)));
}

inline Vec fill(Vec a, First few, Vec rest) {
    return {_mm256_blendv_ps(rest.v, a.v, _mm256_castsi256_ps(first_lanes(few.count)))};
}

struct DoubleSum {
    __m256d low, high;
    DoubleSum() : low(_mm256_setzero_pd()), high(low) {}
    void add(Vec a) {
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(a.v)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1)));
    }
    double value() const {
        const __m256d both = _mm256_add_pd(low, high);
        const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(both), _mm256_extractf128_pd(both, 1));
        return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
    }
};

// Uniform numbers of the ids from `first` on: the upper halves of SplitMix64's outputs for `key`, over 2^32.
class Uniform {
public:
    Uniform(uint64_t key, uint64_t first) {
        alignas(32) uint64_t start[8];
        for (uint64_t i = 0; i < 8; ++i) start[i] = key + (first + i + 1) * kGolden;
        low_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(start));
        high_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(start + 4));
    }
    Vec next() {
        const __m256 low = _mm256_castsi256_ps(mixed(low_)), high = _mm256_castsi256_ps(mixed(high_));
        low_ = _mm256_add_epi64(low_, broadcast64(8 * kGolden));
        high_ = _mm256_add_epi64(high_, broadcast64(8 * kGolden));
        // the upper halves of all eight, in order
        const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
        const __m256i upper = _mm256_permute4x64_epi64(odd, _MM_SHUFFLE(3, 1, 2, 0));
        // unsigned to float: both parts are exact, so that only their sum is rounded
        const __m256 high_part = _mm256_cvtepi32_ps(_mm256_srli_epi32(upper, 16));
        const __m256 low_part = _mm256_cvtepi32_ps(_mm256_and_si256(upper, _mm256_set1_epi32(0xffff)));
        return {_mm256_fmadd_ps(high_part, _mm256_set1_ps(65536.0f), low_part)};
    }

private:
    static __m256i broadcast64(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
    static __m256i times(__m256i a, uint64_t b) {  // the lower 64 bits of the product
        const __m256i b_low = broadcast64(b), b_high = broadcast64(b >> 32);
        const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b_low), _mm256_mul_epu32(a, b_high));
        return _mm256_add_epi64(_mm256_mul_epu32(a, b_low), _mm256_slli_epi64(cross, 32));
    }
    static __m256i mixed(__m256i x) {
        x = times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), kMix1);
        return times(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), kMix2);
    }
    __m256i low_, high_;
};

#endif

// a in the elements that count, `rest` in the others.
inline Vec fill(Vec a, Whole, Vec) { return a; }

inline float widened(float x) { return x; }
template <typename T>
inline float widened(T x) { return sum(load(&x, 1)); }

// 32-bit integers as floats to uniform numbers in (0, 1): the largest is 1 - 2^-24, which keeps the exponential finite.
inline Vec to_unit(Vec upper) {
    return min((upper + broadcast(0.5f)) * broadcast(0x1p-32f), broadcast(1.0f - 0x1p-24f));
}

}  // namespace pagefleet::PAGEFLEET_ISA
