// The kernels for ARM with BF16 and I8MM (Neoverse V1 and N2, Apple M2 and later). One instruction adds two products of
// bfloat16, or four products of bytes, to each of the four elements of a vector. Compiled with +bf16+i8mm.
#define LANES 4
#define BFLOAT16_DOT 1
#include <cmath>

#include "attend.h"
#include "dense.h"

const pensieve::Kernel pensieve::kNeonBf16 = {
    "neon_bf16", 8,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, dense_for<uint16_t>,
    attend<Half>, write_out<Half>, dense_for<Half>,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
