// Writing one row of keys or values into the cache. Include after vec.h; no guard, one inclusion a translation unit.
#include "kv_cache.h"

namespace pagefleet::PAGEFLEET_ISA {
namespace {

template <typename From, typename To>
inline void convert_row(const From* x, To* row, int64_t n) {
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) store(row + i, load(x + i));
    if (i < n) store(row + i, load(x + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

// int8: q = round(x / scale), scale = largest |x| / 127; kernels/reference/cache.py does the same operations.
template <typename From>
inline void quantize_row(const From* x, int8_t* row, float* scale, int64_t n) {
    const Vec minus = broadcast(-0.0f);
    Vec most = zero();
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) {
        const Vec v = load(x + i);
        most = max(max(v, minus - v), most);
    }
    if (i < n) {
        const Vec v = load(x + i, static_cast<int>(n - i));
        most = max(max(v, minus - v), most);
    }
    *scale = largest(most) / 127.0f;
    const Vec inverse = broadcast(*scale > 0.0f ? 1.0f / *scale : 0.0f);
    const Vec low = broadcast(-127.0f), high = broadcast(127.0f);
    for (i = 0; i < n; i += Vec::lanes) {
        const int count = static_cast<int>(std::min<int64_t>(Vec::lanes, n - i));
        const Vec v = count == Vec::lanes ? load(x + i) : load(x + i, count);
        float rounded[Vec::lanes];
        store(rounded, min(max(round(v * inverse), low), high));
        for (int j = 0; j < count; ++j) row[i + j] = static_cast<int8_t>(rounded[j]);
    }
}

// Stores x [n] for `head` of the token in `slot`, converted to the cache's type. `first` and `scales` are the layer's
// `keys` and `key_scales`, or `values` and `value_scales`.
template <typename From>
inline void write_kv_row(const KvLayer& layer, char* first, char* scales, int64_t slot, int64_t head, const From* x,
                         int64_t n) {
    char* row = kv_row(layer, first, n, slot, head);
    switch (layer.type) {
        case Type::fp32: return convert_row(x, reinterpret_cast<float*>(row), n);
        case Type::bf16: return convert_row(x, reinterpret_cast<bf16*>(row), n);
        case Type::fp16: return convert_row(x, reinterpret_cast<fp16*>(row), n);
        case Type::int8:
            return quantize_row(x, reinterpret_cast<int8_t*>(row), kv_scale(layer, scales, slot, head), n);
    }
}

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
