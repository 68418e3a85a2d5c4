#include "scratch.h"

#include <cstddef>
#include <vector>

namespace pagefleet {

float* scratch(int64_t count) {
    static thread_local std::vector<float> buffer;
    if (buffer.size() < static_cast<size_t>(count)) buffer.resize(static_cast<size_t>(count));
    return buffer.data();
}

}  // namespace pagefleet
