// Choosing tokens from rows of logits; a table of it for each instruction set. A row is computed by one thread in a fixed
// order: its token does not depend on its neighbours. kernels/reference/selection.py says what each means.
#pragma once

#include <cstdint>

#include "types.h"

namespace pagefleet {

struct Logits {
    Type type;
    const void* data;
    int64_t stride;  // elements from row to row
    int64_t vocab;
};

// One draw, as Python fills it in: integers and reals lie in arrays of their own.
struct Draw {
    int64_t row;
    int64_t key;    // 64 bits
    int64_t top_k;  // 0: all
};
struct DrawReals {
    double largest;  // the row's largest logit, finite
    double temperature;
    double top_p;
    double log_min_p;  // minus infinity: all
};

struct SelectionKernels {
    // ids[r], values[r]: the first largest logit of row r; the first NaN where there is one.
    void (*largest)(const Logits& logits, int64_t rows, int64_t* ids, float* values);
    // ids[i]: the token of draw i.
    void (*draw)(const Logits& logits, int64_t count, const Draw* draws, const DrawReals* reals, int64_t* ids);
    // Of token ids[i] in row rows[i]: its log-probability, 1 + the number of larger logits; the row's log-sum-exp.
    void (*score)(const Logits& logits, int64_t count, const int64_t* rows, const int64_t* ids, double* logprobs,
                  int64_t* ranks, double* totals);
};

extern const SelectionKernels selection_avx2;
extern const SelectionKernels selection_avx512;

}  // namespace pagefleet
