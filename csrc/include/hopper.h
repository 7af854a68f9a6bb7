// PTX instructions that only Hopper (sm_90a) has: barriers in shared memory that count bytes, boxes copied by
// the tensor memory accelerator, and products of a whole warpgroup.  The tests have the same functions for a CPU.
#pragma once
#include <ptx.h>

namespace hopper {

// -- barriers: a phase ends after `count` arrivals and all the bytes that they announced --

__device__ __forceinline__ void init_barrier(uint32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers known to the accelerator.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

#ifdef WATCHDOG
__device__ __forceinline__ uint32 long_ticks() {  // in units of 4.3 seconds
  uint32 ticks;
  asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(ticks));
  return ticks;
}

// Returns when the phase of this parity has ended.  After 4 to 9 seconds, ends the kernel with an error, because a
// wait without end would block the whole run.
__device__ __forceinline__ void wait(uint32 barrier, uint32 parity) {
  const uint32 began = long_ticks();
  while (true) {
    uint32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    if (long_ticks() - began > 1) asm volatile("trap;");
  }
}
#else
// Returns when the phase of this parity has ended.
__device__ __forceinline__ void wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#endif

// -- the tensor memory accelerator --

// Copies a box of the tensor that `map` describes, from element (x, y, z), to `target`; `barrier` counts the bytes.
__device__ __forceinline__ void copy_box(uint32 target, const void* map, int x, int y, int z, uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4}], [%5];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Makes a map that the host wrote to global memory visible to the accelerator, which reads maps by another path.
__device__ __forceinline__ void acquire_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Makes this thread's writes to shared memory visible to the accelerator and to warpgroup products.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- the threads of a block --

template <int COUNT>
__device__ __forceinline__ void registers_up_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void registers_down_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Waits until `threads` threads of the block have reached barrier `index` (not 0, which is for the whole block).
__device__ __forceinline__ void meet(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// -- products of a warpgroup --
//
// The right operand is in shared memory, in rows of 128 bytes.  Every eight rows have the 128-byte swizzle.  A
// descriptor has the address of the first byte and two strides.

__device__ __forceinline__ uint64 descriptor(uint32 address, uint32 leading_bytes, uint32 stride_bytes) {
  constexpr uint64 SWIZZLE_128 = 1ull << 62;
  return SWIZZLE_128 | uint64(stride_bytes >> 4) << 32 | uint64(leading_bytes >> 4) << 16 |
         uint64((address & 0x3ffff) >> 4);
}

// Call this before the first product, and after changing registers that products read or add to.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when all but the last N groups of products are done.
template <int N>
__device__ __forceinline__ void wait_for_products_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the computation of `never_negative` before the next wait. ptxas moves waits for products ahead of other
// instructions, but not ahead of a store. The store to `address` never happens.
__device__ __forceinline__ void finish_before_waiting(float never_negative, uint32 address) {
  asm volatile(
      "{\n"
      ".reg .pred impossible;\n"
      "setp.lt.f32 impossible, %0, 0f00000000;\n"
      "@impossible st.shared.b32 [%1], %1;\n"
      "}\n" ::"f"(never_negative),
      "r"(address)
      : "memory");
}

// Keeps the compiler from moving uses of registers across waits and fences.
template <int COLUMNS>
__device__ __forceinline__ void pin(float (&sums)[COLUMNS][4]) {
#pragma unroll
  for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[column][i])::"memory");
}

template <int STEPS>
__device__ __forceinline__ void pin(uint32 (&left)[STEPS][4]) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(left[step][i])::"memory");
}

// sums (64 x 8 COLUMNS) += left (64 x 16) times right (16 x 8 COLUMNS).  Each warp has 16 of the rows.  For each eight
// columns, lanes and registers are as in ptx::multiply.  With KEYS_DOWN, a row in memory is a row of the right operand
// (values), otherwise a column (keys).  If `add` is false, sums are overwritten.
template <class Element, bool KEYS_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[8][4], const uint32 (&left)[4], uint64 right, bool add);

template <class Element, bool KEYS_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[16][4], const uint32 (&left)[4], uint64 right, bool add);

#define FOUR(c) "+f"(sums[c][0]), "+f"(sums[c][1]), "+f"(sums[c][2]), "+f"(sums[c][3])
#define EIGHT_COLUMNS(c) \
  FOUR(c), FOUR(c + 1), FOUR(c + 2), FOUR(c + 3), FOUR(c + 4), FOUR(c + 5), FOUR(c + 6), FOUR(c + 7)
#define PRODUCT_64(TYPE)                                                                                    \
  asm volatile(                                                                                             \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                      \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                           \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, "                                                              \
      "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
      "%29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}\n"                                     \
      : EIGHT_COLUMNS(0)                                                                                    \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int(add)),                  \
        "n"(int(KEYS_DOWN)))
#define PRODUCT_128(TYPE)                                                                                    \
  asm volatile(                                                                                              \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                           \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, "                                                               \
      "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "  \
      "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
      "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, "   \
      "%68, add, 1, 1, %70;\n}\n"                                                                            \
      : EIGHT_COLUMNS(0), EIGHT_COLUMNS(8)                                                                   \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int(add)),                   \
        "n"(int(KEYS_DOWN)))

template <class Element, bool KEYS_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[8][4], const uint32 (&left)[4], uint64 right, bool add) {
  if constexpr (same<Element, Bf16>)
    PRODUCT_64("bf16");
  else
    PRODUCT_64("f16");
}

template <class Element, bool KEYS_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[16][4], const uint32 (&left)[4], uint64 right, bool add) {
  if constexpr (same<Element, Bf16>)
    PRODUCT_128("bf16");
  else
    PRODUCT_128("f16");
}

#undef FOUR
#undef EIGHT_COLUMNS
#undef PRODUCT_64
#undef PRODUCT_128

}  // namespace hopper
