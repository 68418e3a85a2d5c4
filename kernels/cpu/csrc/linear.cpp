// What Python calls for linear layers: packing, and products with what was packed.
#include "linear.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"
#include "python.h"

namespace pagefleet {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kRowsOfCall = 256;  // their prepared form stays in the caches

int64_t aligned(int64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

// -- which kernel ----------------------------------------------------------------------------------------------------

const LinearKernels& plain_kernels() { return current_isa() >= Isa::avx512 ? linear_avx512 : linear_avx2; }

bool has_vnni() { return current_isa() >= Isa::avx512_vnni; }
bool has_bf16() { return current_isa() >= Isa::avx512_bf16; }

// Null for a layer that was packed for another instruction set.
LinearKernel kernel_of(const PackedLinear& l) {
    const LinearKernels& plain = plain_kernels();
    if (l.panel != (current_isa() >= Isa::avx512 ? 32 : 16)) return nullptr;
    if (l.multiplies_bf16 && !has_bf16()) return nullptr;
    switch (l.scheme) {
        case Scheme::w16: return l.multiplies_bf16 ? linear_avx512_bf16.w16 : plain.w16;
        case Scheme::w8a8:
            if (l.packing == Packing::int8_quads) return has_vnni() ? linear_avx512_vnni.w8a8 : nullptr;
            return plain.w8a8;
        case Scheme::w8a16: return l.multiplies_bf16 ? linear_avx512_bf16.w8a16 : plain.w8a16;
        case Scheme::w4a16: return l.multiplies_bf16 ? linear_avx512_bf16.w4a16 : plain.w4a16;
    }
    return nullptr;
}

const char* name_of(const PackedLinear& l) {
    const bool wide = l.panel == 32;
    if (l.scheme == Scheme::w8a8) {
        if (l.packing == Packing::int8_quads) return "C++, int8 products (AVX-512 VNNI)";
        return wide ? "C++, int8 products in 16 bits (AVX-512)" : "C++, int8 products in 16 bits (AVX2)";
    }
    if (l.multiplies_bf16) return "C++, bf16 products (AVX-512 BF16)";
    return wide ? "C++, fp32 products (AVX-512)" : "C++, fp32 products (AVX2)";
}

// -- packing ---------------------------------------------------------------------------------------------------------

PackedLinear layout(Scheme scheme, bool bf16_activations, int64_t n, int64_t k, int64_t group, bool bias) {
    PackedLinear l{};
    l.scheme = scheme;
    l.multiplies_bf16 = bf16_activations && has_bf16() && scheme != Scheme::w8a8;
    l.n = n, l.k = k, l.group = group;
    l.panel = current_isa() >= Isa::avx512 ? 32 : 16;
    switch (scheme) {
        case Scheme::w16: l.packing = Packing::bf16_pairs; break;
        case Scheme::w8a8: l.packing = has_vnni() ? Packing::int8_quads : Packing::int8_pairs; break;
        case Scheme::w8a16: l.packing = Packing::int8_pairs; break;
        case Scheme::w4a16: l.packing = Packing::int4_eights; break;
    }
    const int64_t padded_k = group ? l.num_groups() * group : k;
    l.steps = (padded_k + l.k_of_step() - 1) / l.k_of_step();
    l.step_bytes = l.panel * (l.packing == Packing::int8_pairs ? 2 : 4);
    const int64_t channels = l.panels() * l.panel;
    int64_t end = aligned(sizeof(PackedLinear));
    const auto take = [&end](int64_t size) {
        const int64_t start = end;
        end = aligned(end + size);
        return start;
    };
    l.weights = take(l.panels() * l.steps * l.step_bytes);
    if (!group && scheme != Scheme::w16) l.scales = take(channels * 4);
    if (l.packing == Packing::int8_quads) l.starts = take(channels * 4);
    if (bias) l.bias = take(channels * 4);
    if (group) l.groups = take(channels * l.num_groups() * 2 * (scheme == Scheme::w4a16 ? 2 : 1));
    l.bytes = end;
    return l;
}

// The `count` values of a step that one channel has, from values [n][k] of `size` bytes each.
void pack_step(const PackedLinear& l, const uint8_t* values, int64_t size, int64_t count, uint8_t* to) {
    if (l.packing != Packing::int4_eights) {
        std::memcpy(to, values, count * size);
        return;
    }
    uint32_t nibbles = 0;
    for (int64_t i = 0; i < count; ++i) nibbles |= static_cast<uint32_t>(values[i] & 15) << (4 * i);
    std::memcpy(to, &nibbles, 4);
}

void pack(PackedLinear& l, const uint8_t* values, const uint8_t* scales, const fp16* offsets, const float* bias) {
    std::memset(l.at(0) + sizeof(PackedLinear), 0, l.bytes - sizeof(PackedLinear));
    const int64_t size = l.scheme == Scheme::w16 ? 2 : 1, width = l.k_of_step(), groups = l.num_groups();
    const int64_t step = l.step_bytes / l.panel;
    // the threads that pack a panel are those that will read it
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < l.panels(); ++p) {
        const int64_t channels = std::min(l.panel, l.n - p * l.panel);
        for (int64_t c = 0; c < channels; ++c) {
            const int64_t channel = p * l.panel + c;
            const uint8_t* from = values + channel * l.k * size;
            uint8_t* to = l.at(l.weights) + p * l.steps * l.step_bytes + c * step;
            for (int64_t k = 0; k < l.k; k += width, to += l.step_bytes)
                pack_step(l, from + k * size, size, std::min(width, l.k - k), to);
            if (l.starts) {
                int32_t sum = 0;
                for (int64_t k = 0; k < l.k; ++k) sum += static_cast<int8_t>(from[k]);
                reinterpret_cast<int32_t*>(l.at(l.starts))[channel] = -128 * sum;
            }
            if (l.scales) std::memcpy(l.at(l.scales) + 4 * channel, scales + 4 * channel, 4);
            if (l.bias) std::memcpy(l.at(l.bias) + 4 * channel, bias + channel, 4);
            for (int64_t g = 0; l.groups && g < groups; ++g) {
                const int64_t kinds = l.scheme == Scheme::w4a16 ? 2 : 1;
                auto* at = reinterpret_cast<fp16*>(l.at(l.groups)) + (p * groups + g) * l.panel * kinds + c;
                at[0] = reinterpret_cast<const fp16*>(scales)[channel * groups + g];
                if (kinds == 2) at[l.panel] = offsets[channel * groups + g];
            }
        }
    }
}

// -- products --------------------------------------------------------------------------------------------------------

// Kept from call to call: fresh memory would cost more than the work on it.
uint8_t* scratch(int64_t size) {
    thread_local std::vector<uint8_t> buffer;
    if (static_cast<int64_t>(buffer.size()) < size + kAlignment) buffer = std::vector<uint8_t>(size + kAlignment);
    const auto address = reinterpret_cast<uintptr_t>(buffer.data());
    return buffer.data() + (kAlignment - address % kAlignment) % kAlignment;
}

void multiply(const PackedLinear& l, LinearKernel kernel, Type type, const uint8_t* x, int64_t rows, uint8_t* out) {
    const int64_t element = type == Type::fp32 ? 4 : 2, k_of_panel = l.steps * l.k_of_step();
    const int64_t width = k_of_panel * (l.scheme != Scheme::w8a8 && !l.multiplies_bf16 ? 4 : 2);
    const int64_t calls = (rows + kRowsOfCall - 1) / kRowsOfCall;
    const int64_t rows_of_call = calls ? (rows + calls - 1) / calls : 0;
    const bool expands = l.scheme == Scheme::w8a16 || l.scheme == Scheme::w4a16;
    LinearCall call{};
    call.layer = &l;
    call.type = type;
    call.expanded_bytes = expands ? aligned(l.panel * k_of_panel * (l.multiplies_bf16 ? 2 : 4)) : 0;
    const int64_t prepared = aligned(rows_of_call * width), scales = aligned(rows_of_call * 4);
    uint8_t* room = scratch(prepared + scales + call.expanded_bytes * omp_get_max_threads());
    call.prepared = room;
    call.row_scales = reinterpret_cast<float*>(room + prepared);
    call.expanded = room + prepared + scales;
    for (int64_t first = 0; first < rows; first += rows_of_call) {
        call.x = x + first * l.k * element;
        call.out = out + first * l.n * element;
        call.rows = std::min(rows_of_call, rows - first);
        kernel(call);
    }
}

PyObject* linear_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(6)) return nullptr;
    const auto scheme = static_cast<Scheme>(args.integer());
    const bool bf16_activations = args.boolean();
    const int64_t n = args.integer(), k = args.integer(), group = args.integer();
    const bool bias = args.boolean();
    if (!Arguments::good()) return nullptr;
    return PyLong_FromLongLong(layout(scheme, bf16_activations, n, k, group, bias).bytes);
}

PyObject* linear_pack(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(10)) return nullptr;
    const auto scheme = static_cast<Scheme>(args.integer());
    const bool bf16_activations = args.boolean();
    const int64_t n = args.integer(), k = args.integer(), group = args.integer();
    const auto* weight = args.pointer<const uint8_t>();
    const auto* scales = args.pointer<const uint8_t>();
    const auto* offsets = args.pointer<const fp16>();
    const auto* bias = args.pointer<const float>();
    auto* out = args.pointer<PackedLinear>();
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    *out = layout(scheme, bf16_activations, n, k, group, bias != nullptr);
    pack(*out, weight, scales, offsets, bias);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(5)) return nullptr;
    const auto* layer = args.pointer<const PackedLinear>();
    const auto type = static_cast<Type>(args.integer());
    const auto* x = args.pointer<const uint8_t>();
    const int64_t rows = args.integer();
    auto* out = args.pointer<uint8_t>();
    if (!Arguments::good()) return nullptr;
    const LinearKernel kernel = kernel_of(*layer);
    if (kernel == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "this layer was packed for another instruction set; pack it again");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS;
    multiply(*layer, kernel, type, x, rows, out);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* linear_kernel(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(1)) return nullptr;
    const auto* layer = args.pointer<const PackedLinear>();
    if (!Arguments::good()) return nullptr;
    return PyUnicode_FromString(name_of(*layer));
}

}  // namespace

PyMethodDef linear_methods[] = {
    method("linear_bytes", linear_bytes, "linear_bytes(scheme, bf16_activations, n, k, group, bias): of a packed layer"),
    method("linear_pack", linear_pack,
           "linear_pack(scheme, bf16_activations, n, k, group, weight, scales, offsets, bias, out)"),
    method("linear_kernel", linear_kernel, "linear_kernel(layer): what multiplies it, in words"),
    method("linear", linear, "linear(layer, type, x, rows, out): out [rows, n] = x [rows, k] * weight^T + bias"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
