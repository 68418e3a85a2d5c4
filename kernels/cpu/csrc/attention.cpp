// What Python calls for attention.
#include "attention.h"

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "isa.h"
#include "python.h"

namespace pagefleet {
namespace {

constexpr const char* kCapsule = "pagefleet.AttentionPlan";

const AttentionKernels& kernels(Type query, Type kv) {
    const Isa isa = current_isa();
    if (isa >= Isa::avx512_bf16 && query == Type::bf16 && (kv == Type::bf16 || kv == Type::int8))
        return attention_avx512_bf16;
    return isa >= Isa::avx512 ? attention_avx512 : attention_avx2;
}

// Memory that grows and is kept: fresh pages at every call would cost more than the arithmetic of a small step.
class Workspace {
public:
    char* take(int64_t bytes) {
        if (bytes > size_) {
            memory_.reset();
            size_ = 0;
            void* fresh = nullptr;
            if (posix_memalign(&fresh, 64, static_cast<size_t>(bytes)) != 0) throw std::bad_alloc();
            memory_.reset(static_cast<char*>(fresh));
            size_ = bytes;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char, Free> memory_;
    int64_t size_ = 0;
};

// Of the thread that calls from Python; it lends parts to the threads that work for it.
thread_local Workspace partial_memory, scratch_memory;

void run(AttentionCall& call) {
    const AttentionPlan& plan = call.plan;
    const AttentionKernels& k = kernels(call.type, call.layer.type);
    const int64_t items = static_cast<int64_t>(plan.items.size());
    const int64_t folds = static_cast<int64_t>(plan.waiting.size()) * plan.kv_heads;
    if (items == 0) return;
    const int threads = static_cast<int>(std::min<int64_t>(omp_get_max_threads(), items));
    const int64_t scratch_bytes = k.scratch_bytes(call);
    call.partial = reinterpret_cast<float*>(
        partial_memory.take(partial_floats(plan, call.layer) * static_cast<int64_t>(sizeof(float))));
    char* scratch = scratch_memory.take(scratch_bytes * threads);
    std::atomic<int64_t> next_item{0}, next_fold{0};
#pragma omp parallel num_threads(threads)
    {
        char* own = scratch + scratch_bytes * omp_get_thread_num();
        for (int64_t i; (i = next_item.fetch_add(1, std::memory_order_relaxed)) < items;)
            k.run_item(call, plan.items[i], own);
        if (folds) {
#pragma omp barrier
            for (int64_t i; (i = next_fold.fetch_add(1, std::memory_order_relaxed)) < folds;)
                k.fold(call, plan.queries[plan.waiting[i / plan.kv_heads]], i % plan.kv_heads, own);
        }
    }
}

PyObject* plan(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(9)) return nullptr;
    AttentionStep step{};
    step.block_tables = args.pointer<const int32_t>();
    step.sequences = args.integer();
    step.table_width = args.integer();
    step.query_starts = args.pointer<const int32_t>();
    step.kv_lengths = args.pointer<const int32_t>();
    step.block_size = args.integer();
    step.window = args.integer();
    step.kv_heads = args.integer();
    step.group = args.integer();
    step.threads = omp_get_max_threads();
    if (!Arguments::good()) return nullptr;
    try {
        auto made = std::make_unique<AttentionPlan>(plan_attention(step));
        PyObject* capsule = PyCapsule_New(made.get(), kCapsule, [](PyObject* self) {
            delete static_cast<AttentionPlan*>(PyCapsule_GetPointer(self, kCapsule));
        });
        if (capsule != nullptr) made.release();
        return capsule;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyObject* describe(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values, count);
    if (!args.count_is(1)) return nullptr;
    const auto* plan = static_cast<const AttentionPlan*>(PyCapsule_GetPointer(values[0], kCapsule));
    if (plan == nullptr) return nullptr;
    int64_t tiles = 0;
    for (const auto& item : plan->items) tiles += item.end_tile - item.first_tile;
    return Py_BuildValue("{s:n,s:n,s:n,s:n}", "items", static_cast<Py_ssize_t>(plan->items.size()), "tiles",
                         static_cast<Py_ssize_t>(tiles), "slots", static_cast<Py_ssize_t>(plan->slots), "most_rows",
                         static_cast<Py_ssize_t>(plan->most_rows));
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments args(values + 1, count - 1);
    if (!args.count_is(8)) return nullptr;
    const auto* plan = static_cast<const AttentionPlan*>(PyCapsule_GetPointer(values[0], kCapsule));
    if (plan == nullptr) return nullptr;
    const auto* layer = args.pointer<const KvLayer>();
    AttentionCall call{*layer, *plan, Type::fp32, nullptr, 0, nullptr, 0.0f, 0.0f, nullptr, nullptr};
    call.type = static_cast<Type>(args.integer());
    call.query = args.pointer<const void>();
    call.query_stride = args.integer();
    call.out = args.pointer<void>();
    call.scale = args.real();
    call.softcap = args.real();
    call.sinks = args.pointer<const float>();
    if (!Arguments::good()) return nullptr;
    bool enough = true;
    Py_BEGIN_ALLOW_THREADS;
    try {
        run(call);
    } catch (const std::bad_alloc&) {
        enough = false;
    }
    Py_END_ALLOW_THREADS;
    if (!enough) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef attention_methods[] = {
    method("attention_plan", plan,
           "attention_plan(block_tables, sequences, table_width, query_starts, kv_lengths, block_size, window, kv_heads, "
           "group) -> plan"),
    method("attention_plan_facts", describe, "attention_plan_facts(plan) -> dict: items, tiles, slots, most_rows"),
    method("attention", attention,
           "attention(plan, layer, type, query, query_stride, out, scale, softcap, sinks)"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pagefleet
