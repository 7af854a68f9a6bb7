// The functions of csrc/include/ptx.h on emulated threads; see cuda.h.
#pragma once
#include <element.h>

#include "cuda.h"

namespace ptx {

inline uint32 shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - shared_memory;
  if (offset < 0 || offset >= std::ptrdiff_t(SHARED_MAX)) emulated::fail("not in shared memory");
  return static_cast<uint32>(offset);
}

inline unsigned char* at(uint32 address, uint32 bytes) {
  if (address % bytes) emulated::fail("a shared address that is not aligned");
  if (address + bytes > emulated::shared_bytes) emulated::fail("a shared address that is too large");
  return shared_memory + address;
}

inline emulated::Exchange& warp() { return emulated::warps[threadIdx.x / 32]; }

inline uint32 bits_of(float value) {
  uint32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float shuffle_xor(float value, int mask) {
  const uint32 words[1] = {bits_of(value)};
  return float_of(emulated::exchange(warp(), threadIdx.x % 32, words)[threadIdx.x % 32 ^ mask][0]);
}

inline uint64 shuffled(uint64 value, unsigned from) {
  const uint32 words[2] = {uint32(value), uint32(value >> 32)};
  const auto& all = emulated::exchange(warp(), threadIdx.x % 32, words);
  return uint64(all[from][1]) << 32 | all[from][0];
}

inline uint64 shuffle_xor(uint64 value, int mask) { return shuffled(value, threadIdx.x % 32 ^ mask); }

inline uint64 shuffle_up(uint64 value, int delta) {
  const unsigned lane = threadIdx.x % 32;
  return shuffled(value, lane >= unsigned(delta) ? lane - delta : lane);
}

inline uint32 ballot(bool value) {
  const uint32 words[1] = {value};
  const auto& all = emulated::exchange(warp(), threadIdx.x % 32, words);
  uint32 bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= all[lane][0] << lane;
  return bits;
}

inline uint32 count_bits(uint32 bits) { return __builtin_popcount(bits); }

inline uint64 multiply_high(uint64 a, uint64 b) { return uint64((unsigned __int128)(a)*b >> 64); }

inline double exp(double value) { return std::exp(value); }

inline double ceil(double value) { return std::ceil(value); }

inline uint32 add(uint32* place, uint32 value) {
  const uint32 before = *place;
  *place += value;
  return before;
}

// For a block of one warpgroup.
inline bool any_of_block(bool value) {
  if (emulated::fibers.size() > 128) emulated::fail("a larger block");
  const uint32 words[1] = {value};
  const auto& all = emulated::exchange(emulated::warpgroups[0], threadIdx.x, words);
  bool found = false;
  for (std::size_t i = 0; i < emulated::fibers.size(); ++i) found |= all[i][0] != 0;
  return found;
}

inline bool any(bool value) {
  const uint32 words[1] = {value};
  const auto& all = emulated::exchange(warp(), threadIdx.x % 32, words);
  bool found = false;
  for (int lane = 0; lane < 32; ++lane) found |= all[lane][0] != 0;
  return found;
}

inline void sync_warp() { emulated::meet(warp().barrier); }

inline void sync_block() { emulated::meet(emulated::block_barrier); }

inline float minus_infinity() { return float_of(0xff800000u); }

inline float exp2(float value) { return std::exp2f(value); }

inline float log2(float value) { return std::log2f(value); }

inline float reciprocal_root(float value) { return 1.0f / std::sqrt(value); }

template <class Element>
inline float widen(Element value) {
  if constexpr (same<Element, Bf16>) return float_of(uint32(value.bits) << 16);
  _Float16 half;
  std::memcpy(&half, &value, 2);
  return float(half);
}

template <class Element>
inline uint32 narrow(float value) {
  if constexpr (same<Element, Bf16>) {
    const uint32 bits = bits_of(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  const _Float16 half = static_cast<_Float16>(value);
  uint16 bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

template <class Element>
inline uint32 pack(float low, float high) {
  return narrow<Element>(high) << 16 | narrow<Element>(low);
}

template <class Element>
inline uint32 multiply_pairs(uint32 first, uint32 second) {
  const auto product = [&](int shift) {
    return widen(Element{static_cast<uint16>(first >> shift)}) * widen(Element{static_cast<uint16>(second >> shift)});
  };
  return pack<Element>(product(0), product(16));
}

// An asynchronous copy happens only when its group is waited for or, with `early`, at once.
inline void copy_16_async(uint32 target, const void* source, bool there) {
  if (there && reinterpret_cast<std::uintptr_t>(source) % 16) emulated::fail("a source that is not aligned");
  const emulated::AsyncCopy copy{at(target, 16), source, there};
  if (emulated::early)
    copy.make();
  else
    emulated::fibers[threadIdx.x].open_copies.push_back(copy);
}

inline void close_copies() {
  emulated::Fiber& fiber = emulated::fibers[threadIdx.x];
  fiber.copies.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
}

template <int N>
inline void wait_for_all_but() {
  emulated::Fiber& fiber = emulated::fibers[threadIdx.x];
  while (fiber.copies.size() > N) {
    for (const emulated::AsyncCopy& copy : fiber.copies.front()) copy.make();
    fiber.copies.erase(fiber.copies.begin());
  }
}

inline void load_16(uint32 (&words)[4], uint32 source) { std::memcpy(words, at(source, 16), 16); }

inline void store_16(uint32 target, uint32 a, uint32 b, uint32 c, uint32 d) {
  const uint32 words[4] = {a, b, c, d};
  std::memcpy(at(target, 16), words, 16);
}

inline void store_16_zeros(uint32 target) { std::memset(at(target, 16), 0, 16); }

inline void load_any_matrices(uint32 (&fragments)[4], uint32 row, bool transposed) {
  const uint32 words[1] = {row};
  const unsigned lane = threadIdx.x % 32;
  const auto& rows = emulated::exchange(warp(), lane, words);
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16 pair[2];
    for (int i = 0; i < 2; ++i) {
      const unsigned line = transposed ? lane % 4 * 2 + i : lane / 4;
      const unsigned column = transposed ? lane / 4 : lane % 4 * 2 + i;
      std::memcpy(&pair[i], at(rows[matrix * 8 + line][0], 16) + column * 2, 2);
    }
    fragments[matrix] = uint32(pair[1]) << 16 | pair[0];
  }
}

inline void load_matrices(uint32 (&fragments)[4], uint32 row) { load_any_matrices(fragments, row, false); }

inline void load_matrices_transposed(uint32 (&fragments)[4], uint32 row) {
  load_any_matrices(fragments, row, true);
}

template <class Element>
inline float half_of(uint32 word, int index) {
  return widen(Element{static_cast<uint16>(index ? word >> 16 : word)});
}

template <class Element>
inline void multiply(float (&sums)[4], const uint32 (&left)[4], uint32 right_low, uint32 right_high) {
  const uint32 words[6] = {left[0], left[1], left[2], left[3], right_low, right_high};
  const unsigned lane = threadIdx.x % 32;
  const auto& all = emulated::exchange(warp(), lane, words);
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const uint32 from_left = all[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2];
      const uint32 from_right = all[column * 4 + k % 8 / 2][4 + k / 8];
      sums[i] += half_of<Element>(from_left, k % 2) * half_of<Element>(from_right, k % 2);
    }
  }
}

}  // namespace ptx
