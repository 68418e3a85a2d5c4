// Storing keys and values in the cache; a table of it for each instruction set.
#pragma once

#include "kv_cache.h"

namespace pagefleet {

struct KvKernels {
    // key [tokens, heads, key_size] and value [tokens, heads, value_size] of `type`, strides in elements from token to
    // token, into `slots` [tokens]; a negative slot stores nothing.
    void (*write)(const KvLayer& layer, Type type, const void* key, int64_t key_stride, const void* value,
                  int64_t value_stride, const int64_t* slots, int64_t tokens);
};

extern const KvKernels kv_avx2;
extern const KvKernels kv_avx512;

// Sets IndexError in Python and returns false if a slot lies past the last block.
bool slots_exist(const KvLayer& layer, const int64_t* slots, int64_t tokens);

}  // namespace pagefleet
