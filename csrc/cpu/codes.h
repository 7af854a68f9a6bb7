// Write and read rows of codes: signed bytes, followed by their scale (attention.h). The functions process LANES values
// at a time. Included once per instruction set.
#pragma once

#include "attention.h"
#include "vector.h"

namespace {

using pensieve::kScaleBytes;
using pensieve::kSlots;

template <typename Stored>
constexpr bool kAreCodes = std::is_same_v<Stored, int8_t>;

// The distance between rows of a tile, in stored elements.
template <typename Stored>
constexpr int row_of(int head_size) {
  return kAreCodes<Stored> ? head_size + kScaleBytes : head_size;
}

#if BFLOAT16_DOT
// Converts 2 * LANES codes exactly to pairs of bfloat16, which is the upper half of a float.
inline Words pairs_of(const int8_t* codes) {
  const Floats low = read(codes), high = read(codes + LANES);
#ifdef __aarch64__
  return (Words)vuzp2q_u16((uint16x8_t)low, (uint16x8_t)high);
#else
  return (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#endif
}
#endif

// Returns the scales of a tile's rows times `factor`, and zero for slots that were not written.
inline void read_scales(const int8_t* codes, int num_slots, int head_size, float factor, float* scales) {
  const int8_t* from = codes + head_size;
  for (int slot = 0; slot < kSlots; ++slot, from += row_of<int8_t>(head_size)) {
    float scale = 0.0f;
    if (slot < num_slots) memcpy(&scale, from, sizeof scale);
    scales[slot] = scale * factor;
  }
}

// Rounds a row to codes and their scale (WriteCodes in attention.h).
template <typename Element>
void write_codes(const void* memory, int32_t head_size, void* to) {
  const Element* row = static_cast<const Element*>(memory);
  int8_t* codes = static_cast<int8_t*>(to);
  Ints most{};  // absolute values, compared as bits; NaN has the largest bits
  for (int at = 0; at < head_size; at += LANES) {
    const Ints bits = (Ints)read(row + at) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t largest_bits = 0;
  for (int i = 0; i < LANES; ++i) largest_bits = most[i] > largest_bits ? most[i] : largest_bits;
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  float scale = largest / 127.0f;
  if (largest_bits >= 0x7f800000)
    scale = __builtin_nanf("");
  else if (scale < 0x1p-126f)
    scale = 0.0f;
  memcpy(codes + head_size, &scale, sizeof scale);
  if (!(scale > 0.0f)) {
    memset(codes, 0, head_size);
    return;
  }
  // Adding 1.5 * 2^23 rounds the quotient to the nearest integer, ties to even. The compiler must not combine division
  // and addition. Then codes are the same on every machine, and equal those of pensieve/kernels/kv_format.py.
  for (int at = 0; at < head_size; at += LANES) {
    const Floats shifted = read(row + at) / scale + 12582912.0f;
    store_bytes(codes + at, (Ints)shifted - 0x4b400000);
  }
}

}  // namespace
