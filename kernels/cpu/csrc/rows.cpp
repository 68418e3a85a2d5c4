// What Python calls for operations on rows.
#include "rows.h"

#include "isa.h"
#include "python.h"

namespace pagefleet {
namespace {

const RowKernels& kernels() { return current_isa() >= Isa::avx512 ? rows_avx512 : rows_avx2; }

ConstRows const_rows(Arguments& args) {
    const auto* data = args.pointer<const void>();
    return {data, args.integer()};
}

Rows rows_of(Arguments& args) {
    auto* data = args.pointer<void>();
    return {data, args.integer()};
}

Norm norm_of(Arguments& args) {
    const auto kind = static_cast<NormKind>(args.integer());
    const auto* weight = args.pointer<const float>();
    const auto* bias = args.pointer<const float>();
    return {kind, weight, bias, args.real()};
}

PyObject* norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(11)) return nullptr;
    const auto type = static_cast<Type>(args.integer());
    const int64_t rows = args.integer(), n = args.integer();
    const ConstRows x = const_rows(args);
    const Rows out = rows_of(args);
    const Norm norm = norm_of(args);
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().norm(type, rows, n, x, out, norm);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* add_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(18)) return nullptr;
    const auto type = static_cast<Type>(args.integer());
    const int64_t rows = args.integer(), n = args.integer();
    const ConstRows x = const_rows(args);
    const Rows residual = rows_of(args), out = rows_of(args);
    const Norm norm = norm_of(args), post = norm_of(args);
    const float scale = args.real();
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().add_norm(type, rows, n, x, residual, out, norm, post, scale);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* run_activation(PyObject* const* values, Py_ssize_t count, decltype(RowKernels::activation) RowKernels::*of) {
    Arguments args(values, count);
    if (!args.count_is(8)) return nullptr;
    const auto type = static_cast<Type>(args.integer());
    const int64_t rows = args.integer(), n = args.integer();
    const ConstRows x = const_rows(args);
    const Rows out = rows_of(args);
    const auto name = static_cast<Activation>(args.integer());
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    (kernels().*of)(type, rows, n, x, out, name);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* activation(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return run_activation(values, count, &RowKernels::activation);
}

PyObject* gated_activation(PyObject*, PyObject* const* values, Py_ssize_t count) {
    return run_activation(values, count, &RowKernels::gated_activation);
}

}  // namespace

PyMethodDef rows_methods[] = {
    method("norm", norm, "norm(type, rows, n, x, x_stride, out, out_stride, kind, weight, bias, eps)"),
    method("add_norm", add_norm,
           "add_norm(type, rows, n, x, x_stride, residual, residual_stride, out, out_stride, kind, weight, bias, eps, "
           "post_kind, post_weight, post_bias, post_eps, scale)"),
    method("activation", activation, "activation(type, rows, n, x, x_stride, out, out_stride, name)"),
    method("gated_activation", gated_activation,
           "gated_activation(type, rows, n, x, x_stride, out, out_stride, name): x has 2 n columns"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
