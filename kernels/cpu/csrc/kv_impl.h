// See kv.h. Compiled once an instruction set.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

inline constexpr int64_t kParallelBytes = 1 << 17;  // below this, waking threads costs more than they save

template <typename T>
void write_tokens(const KvLayer& layer, const T* key, int64_t key_stride, const T* value, int64_t value_stride,
                  const int64_t* slots, int64_t tokens) {
    const int64_t row = layer.heads * (layer.key_size + layer.value_size) * static_cast<int64_t>(sizeof(T));
#pragma omp parallel for schedule(static) if (tokens * row >= kParallelBytes)
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] < 0) continue;
        for (int64_t h = 0; h < layer.heads; ++h) {
            write_kv_row(layer, layer.keys, layer.key_scales, slots[t], h, key + t * key_stride + h * layer.key_size,
                         layer.key_size);
            write_kv_row(layer, layer.values, layer.value_scales, slots[t], h,
                         value + t * value_stride + h * layer.value_size, layer.value_size);
        }
    }
}

void write_kv(const KvLayer& layer, Type type, const void* key, int64_t key_stride, const void* value,
              int64_t value_stride, const int64_t* slots, int64_t tokens) {
    const auto write = [&](auto x) {
        using T = decltype(x);
        write_tokens(layer, static_cast<const T*>(key), key_stride, static_cast<const T*>(value), value_stride, slots,
                     tokens);
    };
    switch (type) {
        case Type::fp32: return write(float{});
        case Type::bf16: return write(bf16{});
        case Type::fp16: return write(fp16{});
        case Type::int8: return;  // the caller has refused it
    }
}

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
