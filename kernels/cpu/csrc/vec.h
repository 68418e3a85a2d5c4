// A register of floats and what kernels do with it, for the instruction set of the file that includes this.
//
// A kernel is written once, in a `*_impl.h` that uses `Vec`, and compiled once a level: a small .cpp includes standard
// headers first (their inline functions must not be compiled for one level and linked into another), then
// `avx2_begin.h` or `avx512_begin.h`, this file, and the implementation. All of it lives in a namespace of the level.
//
// No include guard on purpose: one inclusion a translation unit.
#include "types.h"

#ifndef PAGEFLEET_ISA
#error "include avx2_begin.h or avx512_begin.h first"
#endif

namespace pagefleet::PAGEFLEET_ISA {

#if PAGEFLEET_LANES == 16

struct Vec {
    static constexpr int lanes = 16;
    __m512 v;
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline Vec vec(__m512 v) { return {v}; }
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

inline Vec widen(__m256i halves, bf16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
inline Vec widen(__m256i halves, fp16) { return {_mm512_cvtph_ps(halves)}; }
inline __m256i narrow(Vec a, fp16) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// round to nearest, ties to even; NaN stays NaN
inline __m256i narrow(Vec a, bf16) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

template <typename T>
inline Vec load(const T* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <typename T>
inline Vec load(const T* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), T{});
}
template <typename T>
inline void store(T* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a, T{}));
}
template <typename T>
inline void store(T* p, Vec a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a, T{}));
}

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec select_below(Vec a, Vec b, Vec yes, Vec no) {  // where a < b
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Vec keep_first(Vec a, int n) { return {_mm512_maskz_mov_ps(first_lanes(n), a.v)}; }  // the others are zero
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }

#else

struct Vec {
    static constexpr int lanes = 8;
    __m256 v;
};

inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }

inline Vec widen(__m128i halves, bf16) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}
inline Vec widen(__m128i halves, fp16) { return {_mm256_cvtph_ps(halves)}; }
inline __m128i narrow(Vec a, fp16) { return _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// round to nearest, ties to even; NaN stays NaN
inline __m128i narrow(Vec a, bf16) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i kept = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
    const __m256i high = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

template <typename T>
inline Vec load(const T* p) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
}
template <typename T>
inline Vec load(const T* p, int n) {
    T some[8] = {};
    std::memcpy(some, p, n * sizeof(T));
    return load(some);
}
template <typename T>
inline void store(T* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a, T{}));
}
template <typename T>
inline void store(T* p, Vec a, int n) {
    T some[8];
    store(some, a);
    std::memcpy(p, some, n * sizeof(T));
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec select_below(Vec a, Vec b, Vec yes, Vec no) {  // where a < b
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// n is whole and within [-126, 127] for a result that is not subnormal
inline Vec scale_by_power_of_two(Vec a, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
inline Vec keep_first(Vec a, int n) { return {_mm256_and_ps(a.v, _mm256_castsi256_ps(first_lanes(n)))}; }
inline float sum(Vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(Vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

#endif

// e^x by range reduction and a polynomial of degree 6 (Cephes' expf); within 2 units in the last place. Below -87.3 it
// is 0 to within 2^-126, above 88.3 it is 2^127.4; NaN stays NaN.
inline Vec exp(Vec x) {
    x = min(broadcast(88.3f), max(broadcast(-87.3f), x));
    const Vec n = round(x * broadcast(1.44269504088896341f));
    Vec r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    return scale_by_power_of_two(fma(p, r * r, r + broadcast(1.0f)), n);
}

}  // namespace pagefleet::PAGEFLEET_ISA
