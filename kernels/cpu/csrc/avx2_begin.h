// From here to the end of the file: code for AVX2, FMA and F16C.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC target("avx2,fma,f16c")
#define PAGEFLEET_ISA avx2
#define PAGEFLEET_LANES 8
