// See rows.h. Compiled once an instruction set.

namespace pagefleet::PAGEFLEET_ISA {
namespace {

template <typename T>
void add_norm_row(const T* x, T* residual, T* out, int64_t n, const Norm& norm, const Norm& post, float scale) {
    const Vec factor = broadcast(scale);
    if (post.kind == NormKind::none) {
        along(n, [&](int64_t i, auto part) {
            store(residual + i, fma(load(x + i, part), factor, load(residual + i, part)), part);
        });
    } else {
        const Scaling by = scaling_of(x, n, post);
        along(n, [&](int64_t i, auto part) {
            const Vec y = normed(load(x + i, part), i, part, by, post);
            store(residual + i, fma(y, factor, load(residual + i, part)), part);
        });
    }
    if (norm.kind != NormKind::none) norm_row(residual, out, n, norm);
}

void norm(Type type, int64_t rows, int64_t n, ConstRows x, Rows out, const Norm& norm) {
    with_type(type, [&](auto element) {
        using T = decltype(element);
        over_rows(rows, rows * n, [&](int64_t r) { norm_row(row<T>(x, r), row<T>(out, r), n, norm); });
    });
}

void add_norm(Type type, int64_t rows, int64_t n, ConstRows x, Rows residual, Rows out, const Norm& norm,
              const Norm& post, float scale) {
    with_type(type, [&](auto element) {
        using T = decltype(element);
        over_rows(rows, rows * n, [&](int64_t r) {
            add_norm_row(row<T>(x, r), row<T>(residual, r), row<T>(out, r), n, norm, post, scale);
        });
    });
}

template <typename F>
void with_activation(Activation name, F&& f) {
    switch (name) {
        case Activation::silu: return f(Silu{});
        case Activation::gelu: return f(Gelu{});
        case Activation::gelu_tanh: return f(GeluTanh{});
        case Activation::relu: return f(Relu{});
        case Activation::relu2: return f(Relu2{});
        case Activation::identity: return f(Identity{});
    }
}

void activation(Type type, int64_t rows, int64_t n, ConstRows x, Rows out, Activation name) {
    with_type(type, [&](auto element) {
        using T = decltype(element);
        with_activation(name, [&](auto function) {
            over_rows(rows, rows * n, [&](int64_t r) {
                const T* from = row<T>(x, r);
                T* to = row<T>(out, r);
                along(n, [&](int64_t i, auto part) { store(to + i, function.of(load(from + i, part)), part); });
            });
        });
    });
}

void gated_activation(Type type, int64_t rows, int64_t n, ConstRows x, Rows out, Activation name) {
    with_type(type, [&](auto element) {
        using T = decltype(element);
        with_activation(name, [&](auto function) {
            over_rows(rows, rows * n, [&](int64_t r) {
                const T *gate = row<T>(x, r), *up = gate + n;
                T* to = row<T>(out, r);
                along(n, [&](int64_t i, auto part) {
                    store(to + i, function.of(load(gate + i, part)) * load(up + i, part), part);
                });
            });
        });
    });
}

constexpr RowKernels table = {norm, add_norm, activation, gated_activation};

}  // namespace
}  // namespace pagefleet::PAGEFLEET_ISA
