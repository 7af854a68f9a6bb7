// The kernels for x86-64 with AVX-512 (F, BW, VL, DQ): vectors of sixteen floats. Compiled with
// -mavx512f and the flags of the other features.
#define LANES 16
#define BFLOAT16_DOT 0
#include <cmath>

#include "attend.h"
#include "dense.h"

const pensieve::Kernel pensieve::kAvx512 = {
    "avx512", 32,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, dense_for<uint16_t>,
    attend<Half>, write_out<Half>, dense_for<Half>,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
