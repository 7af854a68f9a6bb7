// Keys and values that are stored as one byte per number, in the e4m3 format: a sign bit, four bits of exponent and
// three bits of mantissa.  0x7f and 0xff are NaN.  There is no infinity.  The largest number is 448, the smallest 2^-9.
//
// The stored numbers are multiplied by a scale.  Each head of each layer has two scales: one for keys, one for values.
// Scales are powers of two, so scaling does not round.  A kernel multiplies scores by the keys' scale and a result by
// the values' scale.  In between it uses the unscaled numbers, which bfloat16 and float16 hold exactly.
//
// A word holds four neighbours of a row.  Unpacking gives bytes 0 and 2 as one pair, and bytes 1 and 3 as another pair,
// because this needs no permutation of bytes.  So products get the elements in another order than in memory:
//
//   keys     A product sums over the row, so the order does not matter if the query has the same order.  `mixed`
//            puts sixteen elements of a query row into the order in which lanes find a key's elements.
//   values   After a transposition by pairs of bytes, a word holds two neighbouring columns of two neighbouring tokens.
//            Unpacking separates the two columns.  So of two products with eight columns each, one has the even columns
//            and the other has the odd columns.
#pragma once
#include <element.h>
#include <ptx.h>

namespace e4m3 {

constexpr float LARGEST = 448.0f;
constexpr float SMALLEST_NORMAL = 0.015625f;  // 2^-6; below it are multiples of 2^-9

// Unpacks four bytes to two pairs of elements: bytes 0 and 2, and bytes 1 and 3.  A NaN becomes 480: see `NanCheck`.
template <class Element>
__device__ __forceinline__ void unpack(uint32 word, uint32& even, uint32& odd) {
  // Read as an element, the bits mean the number times 2^-120 (bfloat16) or 2^-8 (float16), also if it is subnormal.
  constexpr bool BF16 = same<Element, Bf16>;
  constexpr int SHIFT = BF16 ? 4 : 1;
  constexpr uint32 SIGNS = 0x80008000u, SIZES = BF16 ? 0x07f007f0u : 0x3f803f80u;
  constexpr uint32 FACTORS = BF16 ? 0x7b807b80u : 0x5c005c00u;
  even = ptx::multiply_pairs<Element>((word << (8 - SHIFT) & SIZES) | (word << 8 & SIGNS), FACTORS);
  odd = ptx::multiply_pairs<Element>((word >> SHIFT & SIZES) | (word & SIGNS), FACTORS);
}

// Unpacks four bytes to two words of neighbours.
template <class Element>
__device__ __forceinline__ void unpack_in_order(uint32 word, uint32& first, uint32& second) {
  uint32 even, odd;
  unpack<Element>(word, even, odd);
  first = (even & 0xffffu) | odd << 16;
  second = even >> 16 | (odd & 0xffff0000u);
}

// Records whether a thread has unpacked a NaN.
struct NanCheck {
  uint32 seen = 0;  // the highest bit of each byte is set if there was a NaN

  __device__ __forceinline__ void take(uint32 word) { seen |= (word & 0x7f7f7f7fu) + 0x01010101u; }
  __device__ __forceinline__ bool has_nan() const { return (seen & 0x80808080u) != 0; }
};

// Puts sixteen elements of a row into the order of `unpack`.  A lane reads two neighbouring positions, 2 i and 2 i + 1
// (i is the lane's number modulo 4), and the two positions eight further.  `mixed` puts elements 4 i and 4 i + 2 into
// the first two positions, and elements 4 i + 1 and 4 i + 3 into the other two.
__device__ __forceinline__ void mixed(const uint32 (&row)[8], uint32 (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = (row[2 * i] & 0xffffu) | row[2 * i + 1] << 16;
    out[i + 4] = row[2 * i] >> 16 | (row[2 * i + 1] & 0xffff0000u);
  }
}

// A lane has the results at positions `pair` and `pair` + 1 of the `index`-th product with values.  Returns the head's
// column to which the first (`side` 0) or the second (`side` 1) of them belongs.
__device__ __forceinline__ int column_of(int index, int pair, int side) {
  return index / 2 * 16 + 2 * (pair + side) + index % 2;
}

// Returns the byte nearest to `value` times `factor`, which is positive (ties to even).  A product that is too large,
// even for a float, becomes the largest number.  A value that is not finite becomes NaN.
__device__ __forceinline__ uint32 narrow(float value, float factor) {
  const uint32 sign = ptx::bits_of(value) >> 24 & 0x80u, magnitude = ptx::bits_of(value) & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return sign | 0x7fu;
  const float size = ptx::float_of(magnitude) * factor;
  if (size >= LARGEST) return sign | 0x7eu;
  // The last bit of 16384.0f is 2^-9, so the sum is rounded to a multiple of 2^-9.
  if (size < SMALLEST_NORMAL) return sign | (ptx::bits_of(size + 16384.0f) & 0xfu);
  const uint32 bits = ptx::bits_of(size);
  return sign | (((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (127 - 7) * 8);
}

}  // namespace e4m3
