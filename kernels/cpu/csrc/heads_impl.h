// See heads.h. Compiled once an instruction set.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

template <typename From, typename To>
void copy_row(const From* x, To* out, int64_t n) {
    along(n, [&](int64_t i, auto part) { store(out + i, load(x + i, part), part); });
}

void norm_heads(float* x, int64_t heads, int64_t size, const Norm& norm, bool all_heads) {
    if (norm.kind == NormKind::none) return;
    if (all_heads) return norm_row(x, x, heads * size, norm);
    for (int64_t h = 0; h < heads; ++h) norm_row(x + h * size, x + h * size, size, norm);
}

void rotate_head(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    along(half, [&](int64_t i, auto part) {
        const Vec a = load(x + i, part), b = load(x + half + i, part);
        const Vec c = load(cos + i, part), s = load(sin + i, part);
        store(x + i, a * c - b * s, part);
        store(x + half + i, b * c + a * s, part);
    });
}

template <typename T>
void store_token(const KvLayer& layer, const T* qkv, const Heads& heads, const Rotary& rotary, int64_t t, int64_t slot,
                 T* query) {
    const int64_t size = heads.key_size, query_width = heads.query_heads * size, key_width = heads.kv_heads * size;
    float* wide = scratch(std::max(query_width, heads.kv_heads * std::max(size, heads.value_size)));
    const auto prepare = [&](const T* x, int64_t count, const Norm& norm) {
        copy_row(x, wide, count * size);
        if (!heads.norm_after_rotary) norm_heads(wide, count, size, norm, heads.norm_all_heads);
        for (int64_t h = 0; rotary.half && h < count; ++h)
            rotate_head(wide + h * size, rotary.cos + t * rotary.half, rotary.sin + t * rotary.half, rotary.half,
                        rotary.interleaved);
        if (heads.norm_after_rotary) norm_heads(wide, count, size, norm, heads.norm_all_heads);
    };
    prepare(qkv, heads.query_heads, heads.query_norm);
    copy_row(wide, query, query_width);
    if (slot < 0) return;
    prepare(qkv + query_width, heads.kv_heads, heads.key_norm);
    for (int64_t h = 0; h < heads.kv_heads; ++h)
        write_kv_row(layer, layer.keys, layer.key_scales, slot, h, wide + h * size, size);
    copy_row(qkv + query_width + key_width, wide, heads.kv_heads * heads.value_size);
    norm_heads(wide, heads.kv_heads, heads.value_size, heads.value_norm, false);
    for (int64_t h = 0; h < heads.kv_heads; ++h)
        write_kv_row(layer, layer.values, layer.value_scales, slot, h, wide + h * heads.value_size, heads.value_size);
}

void query_and_store(const KvLayer& layer, const Merged& qkv, const Heads& heads, const Rotary& rotary,
                     const int64_t* slots, void* query) {
    const int64_t query_width = heads.query_heads * heads.key_size;
    const int64_t width = query_width + heads.kv_heads * (heads.key_size + heads.value_size);
    with_type(qkv.type, [&](auto element) {
        using T = decltype(element);
        over_rows(qkv.tokens, qkv.tokens * width, [&](int64_t t) {
            store_token(layer, static_cast<const T*>(qkv.data) + t * qkv.stride, heads, rotary, t, slots[t],
                        static_cast<T*>(query) + t * query_width);
        });
    });
}

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
