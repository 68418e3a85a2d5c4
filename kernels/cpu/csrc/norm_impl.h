// Normalising one row. Include it after norm.h and loops.h.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

// What a row is shifted by and then multiplied with, before weight and bias.
struct Scaling {
    Vec centre, scale;
};

template <typename T>
Scaling scaling_of(const T* x, int64_t n, const Norm& norm) {
    Vec centre = zero();
    if (norm.kind == NormKind::layer) {
        Vec total = zero();
        along(n, [&](int64_t i, auto part) { total = total + load(x + i, part); });
        centre = broadcast(sum(total) / static_cast<float>(n));
    }
    Vec squares = zero();
    along(n, [&](int64_t i, auto part) {
        const Vec d = only(load(x + i, part) - centre, part);
        squares = fma(d, d, squares);
    });
    return {centre, broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + norm.eps))};
}

template <typename Part>
Vec normed(Vec x, int64_t i, Part part, const Scaling& by, const Norm& norm) {
    Vec y = (x - by.centre) * by.scale;
    if (norm.weight) y = y * load(norm.weight + i, part);
    if (norm.bias) y = y + load(norm.bias + i, part);
    return y;
}

// x and out may be one.
template <typename T>
void norm_row(const T* x, T* out, int64_t n, const Norm& norm) {
    const Scaling by = scaling_of(x, n, norm);
    along(n, [&](int64_t i, auto part) { store(out + i, normed(load(x + i, part), i, part, by, norm), part); });
}

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
