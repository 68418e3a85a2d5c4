// What Python calls between a layer's merged projection and its attention.
#include "heads.h"

#include "isa.h"
#include "kv.h"
#include "python.h"

namespace pagefleet {
namespace {

const HeadKernels& kernels() { return current_isa() >= Isa::avx512 ? heads_avx512 : heads_avx2; }

bool fits(const KvLayer& layer, const Heads& heads, const Rotary& rotary, int64_t tokens, int64_t width,
          int64_t num_slots) {
    const int64_t expected = heads.query_heads * heads.key_size + heads.kv_heads * (heads.key_size + heads.value_size);
    if (layer.heads != heads.kv_heads || layer.key_size != heads.key_size || layer.value_size != heads.value_size)
        PyErr_Format(PyExc_ValueError, "the layer caches %lld heads of %lld and %lld, not %lld of %lld and %lld",
                     static_cast<long long>(layer.heads), static_cast<long long>(layer.key_size),
                     static_cast<long long>(layer.value_size), static_cast<long long>(heads.kv_heads),
                     static_cast<long long>(heads.key_size), static_cast<long long>(heads.value_size));
    else if (width != expected)
        PyErr_Format(PyExc_ValueError, "qkv has %lld columns; its heads make %lld", static_cast<long long>(width),
                     static_cast<long long>(expected));
    else if (2 * rotary.half > heads.key_size)
        PyErr_Format(PyExc_ValueError, "%lld dimensions to rotate, of heads of %lld",
                     static_cast<long long>(2 * rotary.half), static_cast<long long>(heads.key_size));
    else if (num_slots != tokens || (rotary.half && rotary.rows != tokens))
        PyErr_Format(PyExc_ValueError, "%lld tokens, but %lld slots and %lld angles", static_cast<long long>(tokens),
                     static_cast<long long>(num_slots), static_cast<long long>(rotary.rows));
    const int64_t queries = heads.norm_all_heads ? heads.query_heads : 1, keys = heads.norm_all_heads ? heads.kv_heads : 1;
    return Arguments::good() && norm_fits(heads.query_norm, queries * heads.key_size) &&
           norm_fits(heads.key_norm, keys * heads.key_size) && norm_fits(heads.value_norm, heads.value_size);
}

PyObject* query_and_store(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(35)) return nullptr;
    const auto* layer = args.pointer<const KvLayer>();
    const auto type = static_cast<Type>(args.integer());
    const auto* data = args.pointer<const void>();
    const int64_t stride = args.integer(), tokens = args.integer(), width = args.integer();
    const auto* slots = args.pointer<const int64_t>();
    const int64_t num_slots = args.integer();
    auto* query = args.pointer<void>();
    const int64_t rotary_rows = args.integer();
    const auto* cos = args.pointer<const float>();
    const auto* sin = args.pointer<const float>();
    const int64_t half = args.integer();
    const Rotary rotary = {rotary_rows, cos, sin, half, args.boolean()};
    Heads heads;
    heads.query_heads = args.integer();
    heads.kv_heads = args.integer();
    heads.key_size = args.integer();
    heads.value_size = args.integer();
    heads.query_norm = norm_of(args);
    heads.key_norm = norm_of(args);
    heads.value_norm = norm_of(args);
    heads.norm_all_heads = args.boolean();
    heads.norm_after_rotary = args.boolean();
    if (!Arguments::good() || !fits(*layer, heads, rotary, tokens, width, num_slots) || !slots_exist(*layer, slots, tokens)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    kernels().query_and_store(*layer, {type, data, stride, tokens}, heads, rotary, slots, query);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef heads_methods[] = {
    method("query_and_store", query_and_store,
           "query_and_store(layer, type, qkv, stride, tokens, width, slots, num_slots, query, rows, cos, sin, half, interleaved, "
           "query_heads, kv_heads, key_size, value_size, three norms of (kind, weight, bias, size, eps), norm_all_heads, "
           "norm_after_rotary)"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
