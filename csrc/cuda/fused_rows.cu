// Do the work between two matrix products of a decoder layer in one launch instead of two.
//
//   add_and_norm        sum <- residual + added,  normed <- sum / rms(sum) · weight      (RMSNorm)
//   gate_and_multiply   out <- silu(gate) · up,   for rows of a product that hold gate and up side by side
//
// Sums are in float.  Values that torch would write to memory between two launches are rounded here, too.  So results
// equal torch's, except that a norm adds its terms in another order.  A row's result depends on no other row.
//
// Bound by memory: a thread moves eight neighbouring elements at a time.
#include <element.h>
#include <ptx.h>

#ifndef ELEMENT
#define ELEMENT Bf16
#endif

namespace {

using Element = ELEMENT;
constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int EACH = 8;
constexpr float LOG2_E = 1.4426950408889634f;

struct alignas(16) Eight {
  uint32 words[EACH / 2];

  __device__ __forceinline__ float at(int index) const {
    return ptx::widen(Element{static_cast<uint16>(words[index / 2] >> index % 2 * 16)});
  }
};

__device__ __forceinline__ Eight packed(const float (&values)[EACH]) {
  Eight made;
#pragma unroll
  for (int i = 0; i < EACH / 2; ++i) made.words[i] = ptx::pack<Element>(values[2 * i], values[2 * i + 1]);
  return made;
}

}  // namespace

extern "C" __device__ const int add_and_norm_shared_bytes = WARPS * sizeof(float);

// One block does one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_and_norm(const Eight* residual,  // (rows, width), contiguous
                 const Eight* added,     // like residual
                 const Eight* weight,    // (width)
                 int width, float eps,
                 Eight* sum,       // (rows, width), contiguous
                 Eight* normed) {  // like sum
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  float* const each_warps = reinterpret_cast<float*>(shared_memory);
  const int pieces = width / EACH;
  const int64 begin = int64(blockIdx.x) * pieces;
  float squares = 0.0f;
  for (int piece = threadIdx.x; piece < pieces; piece += THREADS) {
    const Eight first = residual[begin + piece], second = added[begin + piece];
    float values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] = first.at(i) + second.at(i);
    const Eight rounded = packed(values);
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares += rounded.at(i) * rounded.at(i);
    sum[begin + piece] = rounded;
  }
  for (int step = 16; step > 0; step /= 2) squares += ptx::shuffle_xor(squares, step);
  if (threadIdx.x % 32 == 0) each_warps[threadIdx.x / 32] = squares;
  ptx::sync_block();
  squares = 0.0f;
  for (int warp = 0; warp < WARPS; ++warp) squares += each_warps[warp];
  const float share = ptx::reciprocal_root(squares / width + eps);
  for (int piece = threadIdx.x; piece < pieces; piece += THREADS) {  // the pieces that this thread wrote
    const Eight whole = sum[begin + piece], scale = weight[piece];
    float values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] = whole.at(i) * share * scale.at(i);
    normed[begin + piece] = packed(values);
  }
}

// A thread does one piece of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    gate_and_multiply(const Eight* rows,  // (rows, 2 · width), contiguous: gate, then up
                      int num_rows, int width,
                      Eight* out) {  // (rows, width), contiguous
  const int pieces = width / EACH;
  const int64 index = int64(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= int64(num_rows) * pieces) return;
  const int64 row = index / pieces, piece = index % pieces;
  const Eight gate = rows[row * 2 * pieces + piece], up = rows[row * 2 * pieces + pieces + piece];
  float opened[EACH], values[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) opened[i] = gate.at(i) / (1.0f + ptx::exp2(-gate.at(i) * LOG2_E));
  const Eight rounded = packed(opened);
#pragma unroll
  for (int i = 0; i < EACH; ++i) values[i] = rounded.at(i) * up.at(i);
  out[index] = packed(values);
}
