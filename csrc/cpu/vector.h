// Vectors in GCC's vector extensions, so that one source serves all instruction sets.
//
// A file that includes this defines LANES (16, 8 or 4) and is compiled for an instruction set that has
// vectors of so many floats. Everything is in an anonymous namespace: each instruction set has its own
// functions of these names, and the linker must not merge them.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <typename Vector, typename Element>
inline Vector load(const Element* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

template <typename Vector, typename Element>
inline void store(Element* to, Vector vector) {
  memcpy(to, &vector, sizeof vector);
}

inline Floats splat(float value) { return Floats{} + value; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The other half of each block of 2 * Distance lanes.
template <int Distance, int... I>
inline Floats swapped(Floats v, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(v, Ints{(I ^ Distance)...});
}

template <int Distance = LANES / 2>
inline float max_of(Floats v) {
  v = larger(v, swapped<Distance>(v, std::make_integer_sequence<int, LANES>{}));
  if constexpr (Distance > 1) return max_of<Distance / 2>(v);
  return v[0];
}

template <int Distance = LANES / 2>
inline float sum_of(Floats v) {
  v += swapped<Distance>(v, std::make_integer_sequence<int, LANES>{});
  if constexpr (Distance > 1) return sum_of<Distance / 2>(v);
  return v[0];
}

// bfloat16 is the upper half of a float.
inline Floats widen(Halves halves) { return (Floats)(__builtin_convertvector(halves, Words) << 16); }
inline Floats even_half(Words pairs) { return (Floats)(pairs << 16); }
inline Floats odd_half(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

inline uint16_t rounded(float value) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float widened(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Elements are floats or bfloat16.
template <typename Element>
inline Floats read(const Element* from) {
  if constexpr (sizeof(Element) == 4)
    return load<Floats>(from);
  else
    return widen(load<Halves>(from));
}

template <typename Element>
inline float read_one(const Element* from) {
  if constexpr (sizeof(Element) == 4)
    return *from;
  else
    return widened(*from);
}

inline Halves rounded(Floats value) {
  Words bits = (Words)value;
  Words up = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  Words nan = bits >> 16 | 0x40;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : up, Halves);
}

template <typename Element>
inline void write(Element* to, Floats value) {
  if constexpr (sizeof(Element) == 4)
    store(to, value);
  else
    store(to, rounded(value));
}

template <typename Element>
inline void write_one(Element* to, float value) {
  if constexpr (sizeof(Element) == 4)
    *to = value;
  else
    *to = rounded(value);
}

// 2 to the power of x, for x in -126 .. 0. Relative error < 2e-7.
inline Floats exp2_in_range(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  Floats shifted = x + magic;
  Floats rest = x - (shifted - magic);  // in -0.5 .. 0.5
  Floats p = splat(1.535336188e-4f);
  p = p * rest + 1.339887440e-3f;
  p = p * rest + 9.618437357e-3f;
  p = p * rest + 5.550332548e-2f;
  p = p * rest + 2.402264791e-1f;
  p = p * rest + 6.931472028e-1f;
  p = p * rest + 1.0f;
  return p * (Floats)(((Ints)shifted << 23) + 0x3f800000);
}

// The same for x <= 0; below -126 it is 2^-126, which changes no sum.
inline Floats exp2_nonpositive(Floats x) {
  return exp2_in_range(x < splat(-126.0f) ? splat(-126.0f) : x);  // NaN stays
}

// Eklundh: in log2(LANES) stages, each swaps the off-diagonal blocks of pairs of rows.
template <int Stage, int... I>
inline void swap_blocks(Words& a, Words& b, std::integer_sequence<int, I...>) {
  const Words upper = {((I & Stage) ? LANES + I - Stage : I)...};
  const Words lower = {((I & Stage) ? LANES + I : I + Stage)...};
  Words first = __builtin_shuffle(a, b, upper);
  b = __builtin_shuffle(a, b, lower);
  a = first;
}

template <int Stage>
inline void transpose_stage(Words (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & Stage))
      swap_blocks<Stage>(rows[i], rows[i + Stage], std::make_integer_sequence<int, LANES>{});
}

inline void transpose(Words (&rows)[LANES]) {
  if constexpr (LANES >= 16) transpose_stage<8>(rows);
  if constexpr (LANES >= 8) transpose_stage<4>(rows);
  transpose_stage<2>(rows);
  transpose_stage<1>(rows);
}

}  // namespace
