// PTX instructions of sm_80 and newer, one function each.  Instructions that only Hopper has are in hopper.h.
//
// Shared memory is addressed by its own 32-bit addresses.  The tests put another folder first on the include path;
// its ptx.h has the same functions for a CPU.
#pragma once
#include <element.h>

namespace ptx {

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// -- between the lanes of a warp --

__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ uint64 shuffle_xor(uint64 value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Returns the value of the lane whose number is lower by `delta`.  If there is no such lane, returns `value`.
__device__ __forceinline__ uint64 shuffle_up(uint64 value, int delta) {
  return __shfl_up_sync(0xffffffffu, value, delta);
}

// Bit l is the value of lane l.
__device__ __forceinline__ uint32 ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

__device__ __forceinline__ bool any(bool value) { return __any_sync(0xffffffffu, value) != 0; }

// Whether `value` is true in any thread of the block.  Synchronizes the block.
__device__ __forceinline__ bool any_of_block(bool value) { return __syncthreads_or(value) != 0; }

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ void sync_block() { __syncthreads(); }

// -- numbers --

// Returns -infinity, the maximum of an empty set of scores.
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float exp2(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}

__device__ __forceinline__ float log2(float value) {
  float exponent;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(exponent) : "f"(value));
  return exponent;
}

__device__ __forceinline__ uint32 bits_of(float value) { return __float_as_uint(value); }

__device__ __forceinline__ float float_of(uint32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ uint32 count_bits(uint32 bits) { return __popc(bits); }

__device__ __forceinline__ uint64 multiply_high(uint64 a, uint64 b) { return __umul64hi(a, b); }

__device__ __forceinline__ double exp(double value) { return ::exp(value); }

__device__ __forceinline__ double ceil(double value) { return ::ceil(value); }

__device__ __forceinline__ float reciprocal_root(float value) { return 1.0f / sqrtf(value); }

// Rounds two floats to nearest even.  `low` comes first in memory.
template <class Element>
__device__ __forceinline__ uint32 pack(float low, float high) {
  uint32 packed;
  if constexpr (same<Element, Bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <class Element>
__device__ __forceinline__ float widen(Element value) {
  if constexpr (same<Element, Bf16>) return __uint_as_float(uint32(value.bits) << 16);
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

// Multiplies two pairs of elements.  Products with a power of two are exact, also for subnormal numbers.
template <class Element>
__device__ __forceinline__ uint32 multiply_pairs(uint32 first, uint32 second) {
  uint32 product;
  if constexpr (same<Element, Bf16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(first), "r"(second), "r"(0x80008000u));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(first), "r"(second));
  return product;
}

// -- memory --

// Adds atomically and returns the previous value.
__device__ __forceinline__ uint32 add(uint32* place, uint32 value) { return atomicAdd(place, value); }

// Copies 16 bytes from global to shared memory, asynchronously; writes zeros if `there` is false.
__device__ __forceinline__ void copy_16_async(uint32 target, const void* source, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(there ? 16 : 0)
               : "memory");
}

// Ends a group of copies.  `wait_for_all_but<N>` returns when all but the last N groups have arrived.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void load_16(uint32 (&words)[4], uint32 source) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(source)
               : "memory");
}

__device__ __forceinline__ void store_16(uint32 target, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_16_zeros(uint32 target) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
}

// -- matrices --

// Loads four matrices of 8 x 8 elements.  Lanes 8i to 8i + 7 give the row addresses of matrix i.  From each matrix,
// lane l gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
__device__ __forceinline__ void load_matrices(uint32 (&fragments)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(row)
               : "memory");
}

// Like load_matrices, but each matrix is transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32 (&fragments)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(row)
               : "memory");
}

// sums (16 x 8) += left (16 x 16) times right (16 x 8).  In rows l / 4 and l / 4 + 8 of the sums, lane l holds elements
// 2 (l % 4) and 2 (l % 4) + 1.
template <class Element>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32 (&left)[4], uint32 right_low,
                                         uint32 right_high) {
  if constexpr (same<Element, Bf16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

}  // namespace ptx
