// How kernels walk over rows and along one. Include it after parallel.h and vec.h, like that once a translation unit.

namespace pagefleet::PAGEFLEET_ISA {

// Which elements of a register count: all of them, or the first few at the end of a row. The others are zero in what is
// loaded and stay untouched in memory.
struct Whole {};
struct First {
    int count;
};

template <typename T>
inline Vec load(const T* p, Whole) { return load(p); }
template <typename T>
inline Vec load(const T* p, First few) { return load(p, few.count); }
template <typename T>
inline void store(T* p, Vec a, Whole) { store(p, a); }
template <typename T>
inline void store(T* p, Vec a, First few) { store(p, a, few.count); }
inline Vec only(Vec a, Whole) { return a; }
inline Vec only(Vec a, First few) { return keep_first(a, few.count); }

// f(i, Whole or First) for each register of a row of n elements, in order.
template <typename F>
inline void along(int64_t n, F&& f) {
    int64_t i = 0;
    for (; i + Vec::lanes <= n; i += Vec::lanes) f(i, Whole{});
    if (i < n) f(i, First{static_cast<int>(n - i)});
}

// f(r) for each row; over threads where `work`, in elements of a cheap operation, is worth waking them.
template <typename F>
inline void over_rows(int64_t rows, int64_t work, F&& f) {
    if (work < kParallelElements) {
        for (int64_t r = 0; r < rows; ++r) f(r);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r) f(r);
}

// f(an element of that type); int8 is the caller's to refuse.
template <typename F>
inline void with_type(Type type, F&& f) {
    switch (type) {
        case Type::fp32: return f(float{});
        case Type::bf16: return f(bf16{});
        case Type::fp16: return f(fp16{});
        case Type::int8: return;
    }
}

}  // namespace pagefleet::PAGEFLEET_ISA
