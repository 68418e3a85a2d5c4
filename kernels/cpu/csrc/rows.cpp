// What Python calls for operations on rows.
#include "rows.h"

#include "isa.h"
#include "python.h"

namespace pagefleet {
namespace {

const RowKernels& kernels() { return current_isa() >= Isa::avx512 ? rows_avx512 : rows_avx2; }

PyObject* norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(11)) return nullptr;
    const auto type = static_cast<Type>(args.integer());
    const auto* x = args.pointer<const void>();
    auto* out = args.pointer<void>();
    const int64_t rows = args.integer(), n = args.integer(), x_stride = args.integer(), out_stride = args.integer();
    const auto kind = static_cast<NormKind>(args.integer());
    const auto* weight = args.pointer<const float>();
    const auto* bias = args.pointer<const float>();
    const float eps = args.real();
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().norm(type, x, out, rows, n, x_stride, out_stride, kind, weight, bias, eps);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef rows_methods[] = {
    method("norm", norm, "norm(type, x, out, rows, n, x_stride, out_stride, kind, weight, bias, eps)"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
