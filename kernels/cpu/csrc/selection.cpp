// What Python calls to choose tokens.
#include "selection.h"

#include "isa.h"
#include "python.h"

namespace pagefleet {
namespace {

const SelectionKernels& kernels() { return current_isa() >= Isa::avx512 ? selection_avx512 : selection_avx2; }

Logits logits_of(Arguments& args) {
    const auto type = static_cast<Type>(args.integer());
    const auto* data = args.pointer<const void>();
    const int64_t stride = args.integer();
    return {type, data, stride, args.integer()};
}

PyObject* largest(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(7)) return nullptr;
    const Logits logits = logits_of(args);
    const int64_t rows = args.integer();
    auto* ids = args.pointer<int64_t>();
    auto* largest = args.pointer<float>();
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().largest(logits, rows, ids, largest);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* draw(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(8)) return nullptr;
    const Logits logits = logits_of(args);
    const int64_t draws = args.integer();
    const auto* integers = args.pointer<const Draw>();
    const auto* reals = args.pointer<const DrawReals>();
    auto* ids = args.pointer<int64_t>();
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().draw(logits, draws, integers, reals, ids);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* score(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(10)) return nullptr;
    const Logits logits = logits_of(args);
    const int64_t scored = args.integer();
    const auto* rows = args.pointer<const int64_t>();
    const auto* ids = args.pointer<const int64_t>();
    auto* logprobs = args.pointer<double>();
    auto* ranks = args.pointer<int64_t>();
    auto* totals = args.pointer<double>();
    if (!Arguments::good()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().score(logits, scored, rows, ids, logprobs, ranks, totals);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef selection_methods[] = {
    method("largest", largest, "largest(type, logits, stride, vocab, rows, ids, values)"),
    method("draw", draw, "draw(type, logits, stride, vocab, draws, integers, reals, ids)"),
    method("score", score, "score(type, logits, stride, vocab, count, rows, ids, logprobs, ranks, totals)"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
