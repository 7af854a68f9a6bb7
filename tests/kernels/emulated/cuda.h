// A grid of CUDA threads on a CPU, to run the kernels of csrc/cuda without a GPU.
//
// The kernel's own source is compiled as C++. Only ptx.h is replaced, by the file in this folder. Every thread of a
// block is a fiber with its own stack. A fiber runs until it waits for others (at a barrier, or in an instruction of
// the whole warp). Then the next fiber runs. Blocks run one after another.
//
// The emulation finds wrong indices and fragments, barriers that not all threads reach, and reads outside a tensor
// where tests put guards. It finds missing waits for asynchronous copies, because a copy happens only when a thread
// waits for the copy. With `early`, copies happen at once, which finds memory that is overwritten too early. Shared memory is filled with
// NaN before each block, which finds uses before a write, or beyond the size that the launch asks for. The order of
// the fibers can be reversed, which finds results that depend on the order.
//
// The emulation cannot find missing fences, errors of a GPU compiler, races within one run of a fiber, or slow code.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __align__(n)
#define __grid_constant__
#define EMULATED 1

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

constexpr std::size_t SHARED_MAX = 228 * 1024;
alignas(1024) inline unsigned char shared_memory[SHARED_MAX];

extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, .-emulated_switch
)");

namespace emulated {

constexpr std::size_t STACK_BYTES = 128 * 1024;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::abort();
}

struct AsyncCopy {
  unsigned char* target;
  const void* source;
  bool there;

  void make() const {
    if (there)
      std::memcpy(target, source, 16);
    else
      std::memset(target, 0, 16);
  }
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK_BYTES]};
  bool done = false;
  std::vector<std::vector<AsyncCopy>> copies;  // closed groups, oldest first
  std::vector<AsyncCopy> open_copies;
};

// A meeting point of several threads. Generation n + 1 begins when all threads have arrived.
struct Barrier {
  unsigned expected = 0, arrived = 0;
  unsigned long generation = 0;
};

// Words that the lanes of a warp (or threads of a warpgroup) exchange. Two buffers are used in turn.
struct Exchange {
  uint32_t words[2][128][8];
  Barrier barrier;
};

inline std::vector<Fiber> fibers;
inline std::vector<Exchange> warps, warpgroups;
inline Barrier block_barrier;
inline void* scheduler_stack = nullptr;
inline unsigned long progress = 0;  // number of events after which a waiting thread may continue
inline bool early = false;          // whether asynchronous copies happen at once
inline std::size_t shared_bytes = SHARED_MAX;  // the size that the launch asks for
inline std::function<void()> body;

inline void pause() {
  Fiber& fiber = fibers[threadIdx.x];
  const unsigned self = threadIdx.x;
  emulated_switch(&fiber.stack_pointer, scheduler_stack);
  threadIdx.x = self;
}

inline void meet(Barrier& barrier) {
  const unsigned long generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++progress;
    return;
  }
  while (barrier.generation == generation) pause();
}

// Stores this thread's words and waits for those of the other threads.
template <std::size_t N>
inline const uint32_t (&exchange(Exchange& place, unsigned index, const uint32_t (&words)[N]))[128][8] {
  const unsigned side = place.barrier.generation % 2;
  std::memcpy(place.words[side][index], words, sizeof words);
  meet(place.barrier);
  return place.words[side];
}

inline void start() {
  body();
  fibers[threadIdx.x].done = true;
  ++progress;
  pause();
  std::abort();
}

inline void run_block(unsigned threads, bool backwards) {
  fibers.resize(threads);
  warps.assign(threads / 32, {});
  warpgroups.assign((threads + 127) / 128, {});
  for (Exchange& warp : warps) warp.barrier.expected = 32;
  for (Exchange& group : warpgroups) group.barrier.expected = 128;
  block_barrier = {threads, 0, 0};
  std::memset(shared_memory, 0xff, sizeof shared_memory);
  for (Fiber& fiber : fibers) {
    fiber.done = false;
    fiber.copies.clear();
    fiber.open_copies.clear();
    auto* top = reinterpret_cast<void**>(
        reinterpret_cast<std::uintptr_t>(fiber.stack.get() + STACK_BYTES - 64) & ~std::uintptr_t(63));
    *--top = nullptr;                             // so that the stack is aligned when `start` runs
    *--top = reinterpret_cast<void*>(&start);     // the return address of the first switch
    top -= 6;
    std::memset(top, 0, 6 * sizeof(void*));
    fiber.stack_pointer = top;
  }
  for (unsigned left = threads; left > 0;) {
    const unsigned long before = progress;
    for (unsigned i = 0; i < threads; ++i) {
      threadIdx.x = backwards ? threads - 1 - i : i;
      Fiber& fiber = fibers[threadIdx.x];
      if (fiber.done) continue;
      emulated_switch(&scheduler_stack, fiber.stack_pointer);
      if (fiber.done) --left;
    }
    if (left > 0 && progress == before) fail("every thread waits");
  }
}

template <class... Arguments, std::size_t... I>
inline void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<Arguments>*>(arguments[I])...);
}

template <class... Arguments>
inline void launch(void (*kernel)(Arguments...), unsigned blocks, unsigned threads, void** arguments,
                   bool backwards) {
  gridDim.x = blocks;
  blockDim.x = threads;
  body = [=] { call(kernel, arguments, std::index_sequence_for<Arguments...>{}); };
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx.x = backwards ? blocks - 1 - block : block;
    run_block(threads, backwards);
  }
}

}  // namespace emulated
