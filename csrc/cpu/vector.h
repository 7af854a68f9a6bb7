// Vectors in the vector extensions of GCC and clang, so that one source serves all instruction sets.
//
// A file that includes this header defines LANES (16, 8 or 4), and is compiled for an instruction set with vectors of
// LANES floats. It sets further features to 1 or 0:
//   BFLOAT16_DOT  products of pairs of bfloat16
//   BYTE_DOT      products of four unsigned bytes and four signed bytes (default: BFLOAT16_DOT)
//   SIGNED_DOT    products of four signed bytes and four signed bytes; used only if BYTE_DOT is 0 (default: 0)
// Everything is in an anonymous namespace. Otherwise the linker would merge functions of different instruction sets.
#pragma once

#ifndef BYTE_DOT
#define BYTE_DOT BFLOAT16_DOT
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif LANES > 4
#include <immintrin.h>
#endif

namespace {

#if LANES == 16 || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

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

// Broadcasts a value. The addition to zero is only the notation for a broadcast: the compiler omits the addition. The
// addition is of integers, because the compiler may not omit a float addition: 0.0f + -0.0f is 0.0f and not -0.0f.
inline Floats splat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (Floats)(Words{} + bits);
}
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Selects lanes: a number I below LANES selects lane I of `a`; any other number selects lane I - LANES of `b`.
template <int... I, typename Vector>
inline Vector picked(Vector a, Vector b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Words{I...});
#endif
}

// Swaps the halves of each block of 2 * Distance lanes.
template <int Distance, int... I>
inline Floats swapped(Floats v, std::integer_sequence<int, I...>) {
  return picked<(I ^ Distance)...>(v, v);
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

#if BFLOAT16_DOT
// Returns sum + a0 * b0 + a1 * b1 in each lane, of pairs of bfloat16.
inline Floats dot_add(Floats sum, Words a, Words b) {
#ifdef __aarch64__
  return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
}
#endif

// Adds, in each lane, the four products of a row's bytes and the weights' bytes to `sum`. Weight bytes are signed. Row
// bytes are unsigned, or signed with SIGNED_DOT.
inline Ints dot_add_bytes(Ints sum, Words row, Words weights) {
#if BYTE_DOT && defined(__aarch64__)
  return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)row, (int8x16_t)weights);
#elif BYTE_DOT
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)weights);
#elif SIGNED_DOT
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)row, (int8x16_t)weights);
#else
  for (int byte = 0; byte < 4; ++byte)
    sum += ((Ints)(weights << (24 - 8 * byte)) >> 24) * (Ints)(row >> 8 * byte & 255);
  return sum;
#endif
}

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

inline Halves rounded(Floats value) {
  Words bits = (Words)value;
  Words up = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  Words nan = bits >> 16 | 0x40;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : up, Halves);
}

// An IEEE half (fp16): a sign, 5 bits of exponent, 10 of fraction. A uint16_t is a bfloat16.
struct Half {
  uint16_t bits;
};

inline Floats widen_ieee(Halves halves) {
#if defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)halves);
#elif LANES == 16
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);  // GCC warns about the intrinsic without a mask
#elif LANES == 8
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
  const Words bits = __builtin_convertvector(halves, Words);
  const Words sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  const Words number = (Words)((Floats)rest * 0x1p112f);  // moves the exponent, also that of denormals
  return (Floats)((rest >= 0x7c00u << 13 ? rest | 0x7f800000u : number) | sign);
#endif
}

#if LANES > 4
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif

inline Halves rounded_ieee(Floats value) {  // to the nearest, ties to even; NaN stays NaN
#if defined(__aarch64__)
  return (Halves)vcvt_f16_f32((float32x4_t)value);
#elif LANES == 16
  return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, kNearest);
#elif LANES == 8
  return (Halves)_mm256_cvtps_ph((__m256)value, kNearest);
#else
  const Words bits = (Words)value, sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  const Words normal = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1)) >> 13;
  const Words small = (Words)((Floats)rest + 0.5f) - 0x3f000000u;  // below 2^-14, in steps of 2^-24
  Words half = rest < 0x38800000u ? small : normal;
  half = rest >= 0x47800000u ? Words{} + 0x7c00u : half;  // infinite from 2^16 on
  half = rest > 0x7f800000u ? Words{} + 0x7e00u : half;
  return __builtin_convertvector(half | sign, Halves);
#endif
}

// Elements are floats, bfloat16 or Half.
template <typename Element>
constexpr bool is_half = std::is_same_v<Element, Half>;

template <typename Element>
inline Floats read(const Element* from) {
  if constexpr (sizeof(Element) == 4)
    return load<Floats>(from);
  else if constexpr (is_half<Element>)
    return widen_ieee(load<Halves>(from));
  else
    return widen(load<Halves>(from));
}

// Uses intrinsics, because GCC would convert a vector of bytes one by one.
inline Floats read(const int8_t* from) {
#if defined(__aarch64__)
  const Ints whole = (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(load<uint32_t>(from)))));
#elif LANES == 16
  const Ints whole = (Ints)_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(from));
#elif LANES == 8
  const Ints whole = (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(from)));
#else
  const Ints whole = __builtin_convertvector(load<Bytes>(from), Ints);
#endif
  return __builtin_convertvector(whole, Floats);
}

// Converts integers from -128 to 127 to bytes.
inline void store_bytes(int8_t* to, Ints values) {
#if defined(__aarch64__)
  const int16x4_t halves = vmovn_s32((int32x4_t)values);
  store(to, vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0));
#elif LANES == 16
  store(to, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)values));
#elif LANES == 8
  const __m256i all = (__m256i)values;
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  store(to, _mm_cvtsi128_si64(_mm_packs_epi16(halves, halves)));
#else
  store(to, __builtin_convertvector(values, Bytes));
#endif
}

template <typename Element>
inline float read_one(const Element* from) {
  if constexpr (sizeof(Element) == 4)
    return *from;
  else if constexpr (is_half<Element>)
    return widen_ieee(Halves{} + from->bits)[0];
  else
    return widened(*from);
}

template <typename Element>
inline void write(Element* to, Floats value) {
  if constexpr (sizeof(Element) == 4)
    store(to, value);
  else if constexpr (is_half<Element>)
    store(to, rounded_ieee(value));
  else
    store(to, rounded(value));
}

template <typename Element>
inline void write_one(Element* to, float value) {
  if constexpr (sizeof(Element) == 4)
    *to = value;
  else if constexpr (is_half<Element>)
    to->bits = rounded_ieee(splat(value))[0];
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

// 2 to the power of x, for x <= 0. Below -126 the result is 2^-126, which changes no sum.
inline Floats exp2_nonpositive(Floats x) {
  return exp2_in_range(x < splat(-126.0f) ? splat(-126.0f) : x);  // NaN stays
}

// Transposes by Eklundh's method: each of log2(LANES) stages swaps the off-diagonal blocks of pairs of rows.
template <int Stage, int... I>
inline void swap_blocks(Words& a, Words& b, std::integer_sequence<int, I...>) {
  Words first = picked<((I & Stage) ? LANES + I - Stage : I)...>(a, b);
  b = picked<((I & Stage) ? LANES + I : I + Stage)...>(a, b);
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
