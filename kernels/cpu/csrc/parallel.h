// When threads are worth waking.
#pragma once

#include <cstdint>

namespace pagefleet {

// Elements of a cheap operation: below this, waking threads costs more than they save.
inline constexpr int64_t kParallelElements = 1 << 15;

}  // namespace pagefleet
