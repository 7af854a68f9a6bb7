// The kernels for x86-64 with AVX-512 and VNNI: one instruction adds four products of bytes to each lane. Products of
// bfloat16 are made one by one as floats. Used on processors without BF16, and on processors whose BF16 products
// are no faster than floats.
#define LANES 16
#define BFLOAT16_DOT 0
#define BYTE_DOT 1
#include <cmath>

#include "attend.h"
#include "dense.h"

const pensieve::Kernel pensieve::kAvx512Vnni = {
    "avx512_vnni", 32,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, dense_for<uint16_t>,
    attend<Half>, write_out<Half>, dense_for<Half>,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
