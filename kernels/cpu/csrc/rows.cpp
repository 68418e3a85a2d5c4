// What Python calls for operations on rows.
#include "rows.h"

#include "isa.h"
#include "python.h"

namespace pagefleet {

bool norm_fits(const Norm& norm, int64_t n) {
    if ((norm.weight == nullptr && norm.bias == nullptr) || norm.size == n) return true;
    PyErr_Format(PyExc_ValueError, "a norm of %lld elements cannot be of rows of %lld", static_cast<long long>(norm.size),
                 static_cast<long long>(n));
    return false;
}

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

PyObject* norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(12)) return nullptr;
    const auto type = static_cast<Type>(args.integer());
    const int64_t rows = args.integer(), n = args.integer();
    const ConstRows x = const_rows(args);
    const Rows out = rows_of(args);
    const Norm norm = norm_of(args);
    if (!Arguments::good() || !norm_fits(norm, n)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().norm(type, rows, n, x, out, norm);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* add_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(20)) return nullptr;
    const auto type = static_cast<Type>(args.integer());
    const int64_t rows = args.integer(), n = args.integer();
    const ConstRows x = const_rows(args);
    const Rows residual = rows_of(args), out = rows_of(args);
    const Norm norm = norm_of(args), post = norm_of(args);
    const float scale = args.real();
    if (!Arguments::good() || !norm_fits(norm, n) || !norm_fits(post, n)) return nullptr;
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
    method("norm", norm, "norm(type, rows, n, x, x_stride, out, out_stride, kind, weight, bias, size, eps)"),
    method("add_norm", add_norm,
           "add_norm(type, rows, n, x, x_stride, residual, residual_stride, out, out_stride, kind, weight, bias, size, "
           "eps, post_kind, post_weight, post_bias, post_size, post_eps, scale)"),
    method("activation", activation, "activation(type, rows, n, x, x_stride, out, out_stride, name)"),
    method("gated_activation", gated_activation,
           "gated_activation(type, rows, n, x, x_stride, out, out_stride, name): x has 2 n columns"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
