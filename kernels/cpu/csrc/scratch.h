// Memory of a thread that kernels may use until they return.
#pragma once

#include <cstdint>

namespace pagefleet {

// `count` floats with any contents; the next call on this thread takes them back.
float* scratch(int64_t count);

}  // namespace pagefleet
