// The kernels for any 64-bit machine, in vectors of four floats.
#define LANES 4
#define BFLOAT16_DOT 0
#include <cmath>

#include "attend.h"
#include "dense.h"

const pensieve::Kernel pensieve::kPlain = {
    "plain", 8,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, dense_for<uint16_t>,
    attend<Half>, write_out<Half>, dense_for<Half>,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
