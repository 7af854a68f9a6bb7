// The kernels for ARM processors with int8 dot products (most since 2018), in vectors of four floats.
//
// Older ARM processors use plain.cpp. It is compiled to NEON there, too, because every 64-bit ARM processor has NEON.
// So only products of int8 weights differ. Compiled with +dotprod.
#define LANES 4
#define BFLOAT16_DOT 0
#define SIGNED_DOT 1
#include <cmath>

#include "attend.h"
#include "dense.h"

const pensieve::Kernel pensieve::kNeon = {
    "neon", 8,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, dense_for<uint16_t>,
    attend<Half>, write_out<Half>, dense_for<Half>,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
