// What Python calls to store keys and values.
#include "kv.h"

#include "isa.h"
#include "python.h"

namespace pagefleet {

bool slots_exist(const KvLayer& layer, const int64_t* slots, int64_t tokens) {
    const int64_t end = layer.num_blocks * layer.block_size;
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] >= end) {
            PyErr_Format(PyExc_IndexError, "slot %lld lies past the last block: the pool has %lld blocks of %lld tokens",
                         static_cast<long long>(slots[t]), static_cast<long long>(layer.num_blocks),
                         static_cast<long long>(layer.block_size));
            return false;
        }
    }
    return true;
}

namespace {

const KvKernels& kernels() { return current_isa() >= Isa::avx512 ? kv_avx512 : kv_avx2; }

PyObject* write_kv(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(8)) return nullptr;
    const auto* layer = args.pointer<const KvLayer>();
    const auto type = static_cast<Type>(args.integer());
    const auto* key = args.pointer<const void>();
    const int64_t key_stride = args.integer();
    const auto* value = args.pointer<const void>();
    const int64_t value_stride = args.integer();
    const auto* slots = args.pointer<const int64_t>();
    const int64_t tokens = args.integer();
    if (!Arguments::good() || !slots_exist(*layer, slots, tokens)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().write(*layer, type, key, key_stride, value, value_stride, slots, tokens);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef kv_methods[] = {
    method("write_kv", write_kv, "write_kv(layer, type, key, key_stride, value, value_stride, slots, tokens)"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
