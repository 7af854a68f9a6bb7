// The kernels for x86-64 with AVX-512, BF16 and VNNI: one instruction adds two products of bfloat16, or four of bytes,
// to each lane.
#define LANES 16
#define BFLOAT16_DOT 1
#include <cmath>

#include "attend.h"
#include "dense.h"

const pensieve::Kernel pensieve::kAvx512Bf16 = {
    "avx512_bf16", 32,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, dense_for<uint16_t>,
    attend<Half>, write_out<Half>, dense_for<Half>,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
