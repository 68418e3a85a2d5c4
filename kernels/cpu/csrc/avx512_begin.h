// From here to the end of the file: code for AVX-512 F, BW, VL and DQ.
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

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#define PAGEFLEET_ISA avx512
#define PAGEFLEET_LANES 16
