// See rows.h. Compiled once an instruction set.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

template <typename T>
void norm_row(const T* x, T* out, int64_t n, NormKind kind, const float* weight, const float* bias, float eps) {
    constexpr int lanes = Vec::lanes;
    const int64_t whole = n - n % lanes;
    const int rest = static_cast<int>(n - whole);

    float mean = 0.0f;
    if (kind == NormKind::layer) {
        Vec total = zero();
        for (int64_t i = 0; i < whole; i += lanes) total = total + load(x + i);
        if (rest) total = total + load(x + whole, rest);
        mean = sum(total) / static_cast<float>(n);
    }
    const Vec centre = broadcast(mean);
    Vec squares = zero();
    for (int64_t i = 0; i < whole; i += lanes) {
        const Vec d = load(x + i) - centre;
        squares = fma(d, d, squares);
    }
    float square_sum = sum(squares);
    for (int64_t i = whole; i < n; ++i) {
        const float d = sum(load(x + i, 1)) - mean;
        square_sum += d * d;
    }
    const Vec scale = broadcast(1.0f / std::sqrt(square_sum / static_cast<float>(n) + eps));

    for (int64_t i = 0; i < n; i += lanes) {
        const int count = static_cast<int>(std::min<int64_t>(lanes, n - i));
        const bool full = count == lanes;
        Vec y = ((full ? load(x + i) : load(x + i, count)) - centre) * scale;
        if (weight) y = y * (full ? load(weight + i) : load(weight + i, count));
        if (bias) y = y + (full ? load(bias + i) : load(bias + i, count));
        full ? store(out + i, y) : store(out + i, y, count);
    }
}

template <typename T>
void norm_rows(const void* x, void* out, int64_t rows, int64_t n, int64_t x_stride, int64_t out_stride, NormKind kind,
               const float* weight, const float* bias, float eps) {
    const auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(out);
#pragma omp parallel for schedule(static) if (rows * n >= kParallelElements)
    for (int64_t r = 0; r < rows; ++r)
        norm_row(from + r * x_stride, to + r * out_stride, n, kind, weight, bias, eps);
}

void norm(Type type, const void* x, void* out, int64_t rows, int64_t n, int64_t x_stride, int64_t out_stride,
          NormKind kind, const float* weight, const float* bias, float eps) {
    switch (type) {
        case Type::fp32: return norm_rows<float>(x, out, rows, n, x_stride, out_stride, kind, weight, bias, eps);
        case Type::bf16: return norm_rows<bf16>(x, out, rows, n, x_stride, out_stride, kind, weight, bias, eps);
        case Type::fp16: return norm_rows<fp16>(x, out, rows, n, x_stride, out_stride, kind, weight, bias, eps);
        case Type::int8: return;  // the caller has refused it
    }
}

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
