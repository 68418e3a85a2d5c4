// Element types of tensors, as Python names them in calls.
#pragma once

#include <cstdint>

namespace pagefleet {

struct bf16 {
    uint16_t bits;
};

struct fp16 {
    uint16_t bits;
};

enum class Type : int64_t { fp32 = 0, bf16 = 1, fp16 = 2, int8 = 3 };

}  // namespace pagefleet
