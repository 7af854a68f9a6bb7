// Compute multi_token_attention for wide items on Hopper (sm_90a), with warpgroup products.
//
// A block of three warpgroups stays on its multiprocessor.  Items are sorted longest first and divided into runs of
// gridDim items.  A block does one item of each run.  The block with the longest item of a run gets the shortest item of
// the next run (`item_of`), so the blocks end at about the same time.  One warpgroup fetches.  Two warpgroups compute,
// each for 64 of the item's 128 rows:
//
//   producer    One thread copies boxes of 64 elements x 32 keys with the tensor memory accelerator, which permutes
//               eight rows of 128 bytes as the products read them.  The producer runs ahead by as many stages as
//               fit into shared memory, also into the next item.
//   consumers   S = Q Kᵀ for 128 keys, softmax, O += P V.  The product with the values of one stage overlaps the
//               softmax of the next stage:
//
//                   issue S(n) ── issue O += P V(n-1) ── wait S ── powers of S ── wait O ── scale O, round P
//
//               Q and P are left operands in registers.  Keys and values are right operands in shared memory.
//
// A stage is 128 keys, stored as halves of 64 elements: [half][key][64].  Keys and values have separate barriers:
// `full` counts the bytes of a stage that have arrived, and `empty` the warps that no longer need the stage.  Stages are
// counted from the start of the kernel.  Stage n is in slot n % STAGES, in phase n / STAGES.
//
// The last stage of an item may hold fewer than 128 keys.  Scores after the last key are masked.  The consumers set
// the rows of values after the last key to zero, because a slot that was never written may hold NaN.
//
// This kernel never gets items of packs (work.h).  The kernel for narrow items does all packs, because a pack may have
// few rows, and because a CUDA graph has no list of wide items.
//
// Measured on an H200 with 32 query heads and 8 KV heads of size 128: 59 % of the rate of a large matrix product for
// 4,096 queries from position 0 on, 76 % for 512 queries over a context of 16,384 tokens.
#include <element.h>
#include <hopper.h>
#include <ptx.h>
#include <rows.h>
#include <softmax.h>
#include <tile.h>
#include <work.h>

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif
#ifndef ELEMENT
#define ELEMENT Bf16
#endif

// On other architectures, and for other head sizes, this file is empty and multi_token_attention.cu is used.
#if (HEAD_SIZE == 64 || HEAD_SIZE == 128) && (defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(EMULATED))

namespace {

using Element = ELEMENT;
constexpr int HEAD = HEAD_SIZE;
constexpr int PAGE = 32;
constexpr int CONSUMERS = 2;  // warpgroups
constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int KEYS = 128;      // keys in a stage
constexpr int STAGES = HEAD == 64 ? 4 : 3;
constexpr int HALVES = HEAD / 64;
constexpr int ROW_BYTES = 128;
constexpr int BOX_BYTES = PAGE * ROW_BYTES;
constexpr int HALF_BYTES = KEYS * ROW_BYTES;
constexpr int STAGE_BYTES = HALVES * HALF_BYTES;  // for keys, or for values
constexpr int SHARED_BYTES = 2 * STAGES * STAGE_BYTES + 1024;
constexpr int STEPS = HEAD / 16;         // steps of a product with the keys
constexpr int KEY_COLUMNS = KEYS / 8;    // runs of eight columns in the scores
constexpr int COLUMNS = HEAD / 8;        // runs of eight columns in the values
constexpr int CONSUMERS_MEET = 1;        // number of a named barrier
constexpr int EIGHT_ROWS = 8 * ROW_BYTES;
constexpr int UNUSED = 1000;             // an offset after the barriers

// The addresses of all data in shared memory.
struct Stages {
  uint32 base;

  __device__ __forceinline__ uint32 barrier(int kind, int slot) const { return base + (kind * STAGES + slot) * 8; }
  __device__ __forceinline__ uint32 full_keys(int slot) const { return barrier(0, slot); }
  __device__ __forceinline__ uint32 full_values(int slot) const { return barrier(1, slot); }
  __device__ __forceinline__ uint32 empty_keys(int slot) const { return barrier(2, slot); }
  __device__ __forceinline__ uint32 empty_values(int slot) const { return barrier(3, slot); }
  __device__ __forceinline__ uint32 keys(int slot) const { return base + 1024 + slot * STAGE_BYTES; }
  __device__ __forceinline__ uint32 values(int slot) const { return keys(slot) + STAGES * STAGE_BYTES; }
};

// The number of a stage, counted since the kernel began.
struct StageCount {
  int count = 0;
  __device__ __forceinline__ int slot() const { return count % STAGES; }
  __device__ __forceinline__ uint32 phase() const { return count / STAGES & 1; }
};

__device__ __forceinline__ int stages_of(const WorkItem& item) {
  return (item.key_end - item.key_begin + KEYS - 1) / KEYS;
}

// Returns the index of the pair of item and KV head that this block computes in its run `nth`.
__device__ __forceinline__ int item_of(int nth) {
  const bool back = nth % 2 != 0;
  return nth * int(gridDim.x) + int(back ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// -- the producer --

// Announces the number of bytes of one stage of keys (or values), then starts copying the stage.
__device__ __forceinline__ void fetch(uint32 target, uint32 barrier, const void* map, const int* pages,
                                      int num_pages, int head) {
  hopper::arrive_expecting(barrier, num_pages * HALVES * BOX_BYTES);
  for (int index = 0; index < num_pages; ++index) {
    const int page = pages[index];
    for (int half = 0; half < HALVES; ++half)
      hopper::copy_box(target + half * HALF_BYTES + index * BOX_BYTES, map, half * 64, head * PAGE, page, barrier);
  }
}

__device__ __forceinline__ void produce(const Arguments<Element>& arguments, int num_items, const void* key_map,
                                        const void* value_map, const Stages& stages) {
  StageCount current;
  for (int index, nth = 0; (index = item_of(nth)) < num_items; ++nth) {
    const WorkItem item = arguments.items[index / arguments.kv_heads];
    const int head = index % arguments.kv_heads;
    if (item.num_rows <= 0) continue;
    const int* const table =
        arguments.page_table + int64(arguments.slice_turns[item.slice]) * arguments.pages_max;
    for (int stage = 0; stage < stages_of(item); ++stage, ++current.count) {
      const int first = item.key_begin + stage * KEYS, left = item.key_end - first;
      const int num_pages = ((left < KEYS ? left : KEYS) + PAGE - 1) / PAGE;
      const int slot = current.slot();
      hopper::wait(stages.empty_keys(slot), current.phase() ^ 1);
      fetch(stages.keys(slot), stages.full_keys(slot), key_map, table + first / PAGE, num_pages, head);
      hopper::wait(stages.empty_values(slot), current.phase() ^ 1);
      fetch(stages.values(slot), stages.full_values(slot), value_map, table + first / PAGE, num_pages, head);
    }
  }
}

// -- the consumers --

struct Consumer {
  const Stages& stages;
  const int thread;  // number in its warpgroup
  const Lane lane;
  StageCount current;  // the current stage of keys

  __device__ __forceinline__ explicit Consumer(const Stages& stages)
      : stages(stages), thread(threadIdx.x % 128), lane(threadIdx.x) {}

  __device__ __forceinline__ void scores_of(float (&scores)[KEY_COLUMNS][4], const uint32 (&query)[STEPS][4]) const {
    const int slot = current.slot();
    hopper::wait(stages.full_keys(slot), current.phase());
    hopper::begin_products();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint32 keys = stages.keys(slot) + step / 4 * HALF_BYTES + step % 4 * 32;
      hopper::multiply<Element, false>(scores, query[step], hopper::descriptor(keys, 16, EIGHT_ROWS), step > 0);
    }
    hopper::close_products();
  }

  __device__ __forceinline__ void add_values(float (&sums)[COLUMNS][4], const uint32 (&powers)[KEYS / 16][4],
                                             int slot) const {
    hopper::begin_products();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      const uint32 values = stages.values(slot) + step * 16 * ROW_BYTES;
      hopper::multiply<Element, true>(sums, powers[step], hopper::descriptor(values, HALF_BYTES, EIGHT_ROWS), true);
    }
    hopper::close_products();
  }

  // Waits for a stage of values; sets values after the item's last key to zero.
  __device__ __forceinline__ void await_values(int slot, uint32 phase, int left) const {
    hopper::wait(stages.full_values(slot), phase);
    if (left >= KEYS) return;
    const int first = 128 * (threadIdx.x / 128 - 1) + thread;  // each consumer clears a half
    for (int i = left * 8 * HALVES + first; i < KEYS * 8 * HALVES; i += 128 * CONSUMERS) {
      const int row = i / (8 * HALVES), piece = i % (8 * HALVES);
      ptx::store_16_zeros(stages.values(slot) + piece / 8 * HALF_BYTES + row * ROW_BYTES + piece % 8 * 16);
    }
    hopper::publish_shared();
    hopper::meet(CONSUMERS_MEET, 128 * CONSUMERS);
  }

  __device__ __forceinline__ void release(uint32 barrier) const {
    if (lane.lane == 0) hopper::arrive(barrier);
  }

  // Masks scores that a row does not see, and replaces scores by powers of 2.
  __device__ __forceinline__ void weigh(float (&scores)[KEY_COLUMNS][4], Softmax<1>& softmax, float (&corrections)[2],
                                        const Rows<Element, HEAD>& rows, int first_row, int limit_min,
                                        int first) const {
    if (first + KEYS > limit_min) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int limit = rows.limit(first_row + half * 8 + lane.row) - first - lane.pair;
#pragma unroll
        for (int column = 0; column < KEY_COLUMNS; ++column)
#pragma unroll
          for (int side = 0; side < 2; ++side)
            if (column * 8 + side >= limit) scores[column][2 * half + side] = ptx::minus_infinity();
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      corrections[half] = softmax.take(scores, 0, half, rows.arguments.scale);
  }

  __device__ __forceinline__ void round(uint32 (&powers)[KEYS / 16][4], const float (&scores)[KEY_COLUMNS][4]) const {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = scores[step * 2 + i / 2];
        powers[step][i] = ptx::pack<Element>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
  }

  __device__ __forceinline__ void consume(const Arguments<Element>& arguments, const WorkItem& item, int head) {
    const Rows<Element, HEAD> rows{arguments, item, head};
    const int first_row = (threadIdx.x / 128 - 1) * 64 + thread / 32 * 16;  // the warp's first row in the item
    uint32 query[STEPS][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane.row;
      const bool there = row < item.num_rows;
      const Element* const source = arguments.query + (there ? rows.offset(row, arguments.query_stride) : 0);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int side = 0; side < 2; ++side)
          query[step][half + 2 * side] =
              there ? *reinterpret_cast<const uint32*>(source + step * 16 + side * 8 + lane.pair) : 0;
    }

    Softmax<1> softmax;
    float scores[KEY_COLUMNS][4], values[COLUMNS][4] = {}, corrections[2];
    uint32 powers[KEYS / 16][4];
    const int num_stages = stages_of(item), key_begin = item.key_begin;
    const int limit_min = rows.limit(first_row);  // how many positions the warp's first row sees

    scores_of(scores, query);
    hopper::wait_for_products_but<0>();
    hopper::pin(scores);
    release(stages.empty_keys(current.slot()));
    weigh(scores, softmax, corrections, rows, first_row, limit_min, key_begin);
    round(powers, scores);
    for (int stage = 1; stage < num_stages; ++stage) {
      const int slot = current.slot();
      const uint32 phase = current.phase();
      ++current.count;
      hopper::pin(values);
      hopper::pin(powers);
      scores_of(scores, query);
      await_values(slot, phase, KEYS);
      add_values(values, powers, slot);
      hopper::wait_for_products_but<1>();
      hopper::pin(scores);
      release(stages.empty_keys(current.slot()));
      weigh(scores, softmax, corrections, rows, first_row, limit_min, key_begin + stage * KEYS);
      hopper::finish_before_waiting(softmax.sum[0][0] + softmax.sum[0][1], stages.base + UNUSED);
      hopper::wait_for_products_but<0>();
      hopper::pin(values);
      hopper::pin(powers);
      release(stages.empty_values(slot));
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i) values[column][i] *= corrections[i / 2];
      round(powers, scores);
    }
    hopper::pin(values);
    hopper::pin(powers);
    await_values(current.slot(), current.phase(), item.key_end - item.key_begin - (num_stages - 1) * KEYS);
    add_values(values, powers, current.slot());
    hopper::wait_for_products_but<0>();
    hopper::pin(values);
    release(stages.empty_values(current.slot()));
    ++current.count;

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane.row;
      const float sum = softmax.whole_sum(0, half);
      if (row >= item.num_rows) continue;
      const float share = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
        rows.write(row, column * 8 + lane.pair, values[column][2 * half] * share,
                   values[column][2 * half + 1] * share);
      if (lane.pair == 0)
        rows.write_sum(row, sum == 0.0f ? ptx::minus_infinity() : softmax.largest[0][half] * arguments.scale + ptx::log2(sum));
    }
  }
};

}  // namespace

extern "C" __device__ const int multi_token_attention_shared_bytes = SHARED_BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    multi_token_attention(const Element* query,   // (tokens, heads, head_size), rows query_stride apart
                          const void* key_map,    // tensor map of (pages, kv_heads * 32, head_size), in boxes of 32 x 64
                          const void* value_map,  // like key_map
                          const int* page_table,     // (turns, pages_max)
                          const int* slice_offsets,  // (slices + 1)
                          const int* slice_turns,    // (slices)
                          const int* slice_starts,   // (slices)
                          const WorkItem* items,     // only wide items
                          int num_items,             // number of items times kv_heads
                          int kv_heads, int group, int pages_max, int64 query_stride, int64 out_stride,
                          float scale,
                          float* part_values,  // (part rows, kv_heads, head_size)
                          float* part_sums,    // (part rows, kv_heads)
                          Element* out) {      // (tokens, heads, head_size)
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const Arguments<Element> arguments{query, nullptr, nullptr, nullptr, page_table, slice_offsets, slice_turns,
                                     slice_starts, items, nullptr, kv_heads, group, pages_max, 0,
                                     query_stride, out_stride, scale, part_values, part_sums, out};
  const Stages stages{ptx::shared_address(shared_memory)};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; ++slot) {
      hopper::init_barrier(stages.full_keys(slot), 1);
      hopper::init_barrier(stages.full_values(slot), 1);
      hopper::init_barrier(stages.empty_keys(slot), 4 * CONSUMERS);  // warps
      hopper::init_barrier(stages.empty_values(slot), 4 * CONSUMERS);
    }
    hopper::publish_barriers();
  }
  ptx::sync_block();
  if (threadIdx.x < 128) {
    hopper::registers_down_to<24>();
    if (threadIdx.x == 0) {
      hopper::acquire_map(key_map);
      hopper::acquire_map(value_map);
      produce(arguments, num_items, key_map, value_map, stages);
    }
  } else {
    hopper::registers_up_to<240>();
    Consumer consumer(stages);
    for (int index, nth = 0; (index = item_of(nth)) < num_items; ++nth) {
      const WorkItem& item = items[index / kv_heads];
      if (item.num_rows > 0) consumer.consume(arguments, item, index % kv_heads);
    }
  }
}

#endif
