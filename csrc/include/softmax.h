// Online softmax, over keys that arrive a few at a time.
//
// Each row keeps the largest score so far and the sum of 2^(score - largest).  When the largest score grows, earlier
// sums are scaled down.
//
// Scores are multiplied by `scale`, which includes log2(e).  Lane l holds elements of rows l / 4 and l / 4 + 8, and
// shares these rows with three neighbouring lanes.  A row that has seen no key has maximum -infinity and sum 0.  A NaN
// among the scores makes only its own row's sum NaN.
#pragma once
#include <ptx.h>

template <int ROW_TILES>
struct Softmax {
  float largest[ROW_TILES][2];
  float sum[ROW_TILES][2];

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) largest[tile][half] = ptx::minus_infinity(), sum[tile][half] = 0.0f;
  }

  // Replaces `scores` by powers of 2.  Returns the factor by which the caller must multiply its earlier sums
  // of weighted values.
  template <int COLUMNS>
  __device__ __forceinline__ float take(float (&scores)[COLUMNS][4], int tile, int half, float scale) {
    float most = largest[tile][half];
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column)
      most = fmaxf(most, fmaxf(scores[column][2 * half], scores[column][2 * half + 1]));
    most = fmaxf(most, ptx::shuffle_xor(most, 1));
    most = fmaxf(most, ptx::shuffle_xor(most, 2));
    const float base = most == ptx::minus_infinity() ? 0.0f : most * scale;
    // The factor is computed from the difference.  So it is exactly 1 if the maximum stays, even with fused
    // multiply-add.
    const float correction = ptx::exp2((largest[tile][half] - (most == ptx::minus_infinity() ? 0.0f : most)) * scale);
    largest[tile][half] = most;
    float added = 0.0f;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float& score = scores[column][2 * half + side];
        score = ptx::exp2(score * scale - base);
        added += score;
      }
    sum[tile][half] = sum[tile][half] * correction + added;
    return correction;
  }

  // Makes the sum of every row NaN.
  __device__ __forceinline__ void set_nan() {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) sum[tile][0] = sum[tile][1] = ptx::float_of(0x7fc00000u);
  }

  // Returns the sum over the four lanes that share a row.
  __device__ __forceinline__ float whole_sum(int tile, int half) const {
    float whole = sum[tile][half];
    whole += ptx::shuffle_xor(whole, 1);
    return whole + ptx::shuffle_xor(whole, 2);
  }
};
