// From here to the end of the file: code for AVX-512 F, BW, VL, DQ, VNNI and BF16.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,prefer-vector-width=512")
#define PAGEFLEET_ISA avx512_bf16
#define PAGEFLEET_LANES 16
#define PAGEFLEET_BF16
