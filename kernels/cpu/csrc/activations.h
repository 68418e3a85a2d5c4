// Activation functions of a register of floats. Include it after vec.h.

namespace pagefleet::PAGEFLEET_ISA {

struct Silu {
    static Vec of(Vec x) { return x / (broadcast(1.0f) + exp(zero() - x)); }
};

// x * P(N(0, 1) <= x). The tail P(N < -u) is t * exp(-u^2 / 2 + q(t)) with t = 1 / (1 + 0.3 u): q, of degree 9, was
// fitted at Chebyshev nodes over u in [0, 14], where it is within 4e-8 of the exact logarithm.
struct Gelu {
    static Vec of(Vec x) {
        const Vec one = broadcast(1.0f), u = max(x, zero() - x);
        const Vec t = one / fma(u, broadcast(0.3f), one);
        Vec q = broadcast(0.14799495f);
        for (const float c : {-0.94223934f, 2.4043322f, -3.0614359f, 2.0459220f, -0.96214443f, 0.43283999f, 0.35958990f,
                              1.0051291f, -2.1231358f})
            q = fma(q, t, broadcast(c));
        const Vec tail = t * exp(fma(u * broadcast(-0.5f), u, q));
        return x * select_below(x, zero(), tail, one - tail);
    }
};

// x / 2 * (1 + tanh(y)) is x / (1 + exp(-2 y)); y = sqrt(2 / pi) * (x + 0.044715 x^3).
struct GeluTanh {
    static Vec of(Vec x) {
        const Vec twice = x * fma(x * x, broadcast(0.0713548162726f), broadcast(1.5957691216057f));
        return x / (broadcast(1.0f) + exp(zero() - twice));
    }
};

struct Relu {
    static Vec of(Vec x) { return max(zero(), x); }  // in this order, NaN stays
};

struct Relu2 {
    static Vec of(Vec x) { return Relu::of(x) * Relu::of(x); }
};

struct Identity {
    static Vec of(Vec x) { return x; }
};

}  // namespace pagefleet::PAGEFLEET_ISA
