// The kernels for x86-64 with AVX2, FMA and F16C, in vectors of eight floats. Compiled with -mavx2 -mfma
// -mf16c.
#define LANES 8
#define BFLOAT16_DOT 0
#include <cmath>

#include "attend.h"
#include "dense.h"

const pensieve::Kernel pensieve::kAvx2 = {
    "avx2", 16,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, dense_for<uint16_t>,
    attend<Half>, write_out<Half>, dense_for<Half>,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
