// A normalisation, as kernels are given it.
#pragma once

#include <cstdint>

namespace pagefleet {

enum class NormKind : int64_t { rms = 0, layer = 1, none = 2 };

// weight and bias are fp32 [size], or null.
struct Norm {
    NormKind kind;
    const float* weight;
    const float* bias;
    int64_t size;
    float eps;
};

// The next five of `Arguments` (python.h), in the order of `Norm.arguments` in backends/ops.py.
template <typename Args>
Norm norm_of(Args& args) {
    const auto kind = static_cast<NormKind>(args.integer());
    const auto* weight = args.template pointer<const float>();
    const auto* bias = args.template pointer<const float>();
    const int64_t size = args.integer();
    return {kind, weight, bias, size, args.real()};
}

// False, with a ValueError in Python, for a norm that is not of n elements.
bool norm_fits(const Norm& norm, int64_t n);

}  // namespace pagefleet
