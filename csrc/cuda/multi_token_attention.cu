// Attention of one iteration.  A slice is the part of a turn that the iteration computes.  It attends to the turn's
// whole context, whose KV is in scattered pages.
//
//   out[t, h] = softmax(scale · query[t, h] · Kᵀ) · V   over positions 0 … position of t
//
// One block of four warps does one item of work (include/work.h) for one KV head.  The rows of an item
// are query tokens times the heads of a group.  Their number decides how the warps share the item:
//   narrow, at most 32 rows   Decodes and short pieces.  All four warps do the same rows.  Each warp does
//                             every fourth run of 16 keys, in its own ring buffer, so no warp waits for
//                             another until their four results are merged.  Memory bandwidth is the limit.
//   wide, up to 128 rows      Prefill.  Each warp does 32 of the rows (16 if the head size is 256), and
//                             all warps share a ring buffer of pages.  The matrix units are the limit,
//                             because a warp uses each page in shared memory for 32 rows.
//
// Keys and values are loaded by cp.async, STAGES runs ahead, as groups K V K V … The threads that share a ring wait and
// synchronise before the scores, and again before the values (UNPACKS: one wait for both).  Each wait leaves
// 2 STAGES - 2 groups pending.  A buffer that was read is overwritten only after the next synchronisation, because then
// all these threads have finished reading.
//
// Scores and values are products on the matrix units (m16n8k16).  The query stays in registers if it fits; otherwise
// it is read again from shared memory.  A run is masked only if the warp's first row does not see all of its keys.
// Slots after the last key are loaded as zeros, because a slot that was never written may hold NaN.
//
// Keys and values may be bytes (STORED=E4m3; e4m3.h).  In narrow items a run then has 32 keys, so that as many bytes
// are in flight as with 16-bit elements, and a warp unpacks its data in registers.  In wide items the block unpacks a
// page once for all warps, into a tile of elements after the query.  A NaN among the bytes makes all rows of the warp
// (narrow) or of the block (wide) NaN.
//
// For a part of a longer context, the kernel writes normalised rows and log2 of their sums, which merge_parts.cu merges.
// For a pack (rows of several slices over their common first pages), it writes the same.  Only the addresses of the
// queries differ.
//
// Measured on an H200 with 32 query heads and 8 KV heads of size 128: decodes reach 99 % of a large copy's bandwidth for
// 64 contexts of 4,096 tokens, and 78 % for one context of 65,536 tokens.
#include <e4m3.h>
#include <element.h>
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
#ifndef STORED
#define STORED ELEMENT
#endif

namespace {

using Element = ELEMENT;
using Stored = STORED;  // type of keys and values in pages
constexpr bool BYTES = sizeof(Stored) == 1;
constexpr int HEAD = HEAD_SIZE;
constexpr int PAGE = 32;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = HEAD / 8;  // groups of eight columns in a product with the values
constexpr int STEPS = HEAD / 16;   // steps of a product with the keys
using Elements = Tile<HEAD>;
using StoredTile = Tile<BYTES ? HEAD / 2 : HEAD>;

// How the four warps share an item.
template <int ROW_TILES, bool WIDE>
struct Plan {
  static constexpr int ROWS = 16 * ROW_TILES * (WIDE ? WARPS : 1);
  static constexpr int KEYS = WIDE || BYTES ? PAGE : 16;  // keys in a run
  static constexpr int TEAM = WIDE ? THREADS : 32; // threads that share a ring
  static constexpr int STAGES = WIDE ? (HEAD == 256 ? 2 : 3) : (HEAD == 256 ? 1 : (HEAD == 64 ? 3 : 2));
  static constexpr bool UNPACKS = BYTES && WIDE;   // the block unpacks bytes once for all warps
  static constexpr bool MIXES = BYTES && !WIDE;    // each warp unpacks its bytes, in the order of e4m3.h
  static constexpr int UNPACKED_BYTES = UNPACKS ? KEYS * Elements::ROW_BYTES : 0;  // for keys, and again for values
  static constexpr int RING_BYTES = 2 * STAGES * KEYS * StoredTile::ROW_BYTES;
  static constexpr int RINGS = WIDE ? 1 : WARPS;
  static constexpr int TILE_BYTES = ROWS * Elements::ROW_BYTES + 2 * UNPACKED_BYTES + RINGS * RING_BYTES;
  static constexpr bool KEEPS_QUERY = ROW_TILES * STEPS <= 8;  // in registers
  static constexpr int MERGED_STRIDE = HEAD + 8;                // floats of a row
  static constexpr int MERGED_BYTES = WIDE ? 0 : WARPS * ROWS * (MERGED_STRIDE + 2) * 4;
  static constexpr int SHARED_BYTES = TILE_BYTES > MERGED_BYTES ? TILE_BYTES : MERGED_BYTES;

  static __device__ __forceinline__ void sync() {
    if constexpr (WIDE)
      ptx::sync_block();
    else
      ptx::sync_warp();
  }
};

constexpr int WIDE_TILES = HEAD == 256 ? 1 : 2;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int BLOCKS = 2;  // per multiprocessor
constexpr int SHARED_BYTES =
    larger(Plan<WIDE_TILES, true>::SHARED_BYTES,
           larger(Plan<1, false>::SHARED_BYTES, HEAD == 256 ? 0 : Plan<2, false>::SHARED_BYTES));
static_assert(SHARED_BYTES <= 99 * 1024, "more shared memory than a block may have on sm_86 and sm_89");

// The pages of one context, and one head's keys or values in them.
struct Pages {
  const int* table;
  const Stored* keys;
  const Stored* values;
  int64 stride;
  int key_end;  // end of the item's keys

  // Starts copying KEYS keys (or values) from position `first` to `target`.
  template <int KEYS, int TEAM>
  __device__ __forceinline__ void fetch(uint32 target, const Stored* base, int page, int first,
                                        int member) const {
    const Stored* source = base + page * stride + first % PAGE * HEAD;
    const int left = key_end - first;
    constexpr int PIECES = StoredTile::PIECES, ALL = KEYS * PIECES;
#pragma unroll 2
    for (int i = 0; i < (ALL + TEAM - 1) / TEAM; ++i) {
      const int row = (member + i * TEAM) / PIECES, piece = (member + i * TEAM) % PIECES;
      if (ALL % TEAM != 0 && row >= KEYS) break;
      ptx::copy_16_async(StoredTile::piece(StoredTile::row(target, row), piece),
                         source + row * HEAD + piece * (16 / sizeof(Stored)), row < left);
    }
  }

  __device__ __forceinline__ int page(int first) const { return first < key_end ? table[first / PAGE] : 0; }
};

// Unpacks a page of keys or values from bytes at `source` to elements at `target`.
__device__ __forceinline__ void unpack_page(uint32 target, uint32 source, e4m3::NanCheck& nan_check) {
  for (int i = threadIdx.x; i < PAGE * StoredTile::PIECES; i += THREADS) {
    const int row = i / StoredTile::PIECES, piece = i % StoredTile::PIECES;
    uint32 words[4], out[8];
    ptx::load_16(words, StoredTile::piece(StoredTile::row(source, row), piece));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      nan_check.take(words[word]);
      e4m3::unpack_in_order<Element>(words[word], out[2 * word], out[2 * word + 1]);
    }
    const uint32 there = Elements::row(target, row);
    ptx::store_16(Elements::piece(there, 2 * piece), out[0], out[1], out[2], out[3]);
    ptx::store_16(Elements::piece(there, 2 * piece + 1), out[4], out[5], out[6], out[7]);
  }
}

template <int ROW_TILES, bool WIDE>
__device__ __forceinline__ void attend(const Arguments<Element, Stored>& arguments, const WorkItem& item, int head,
                                       unsigned char* shared_memory) {
  using P = Plan<ROW_TILES, WIDE>;
  constexpr bool UNPACKS = P::UNPACKS, MIXES = P::MIXES;
  using Operands = Tile<MIXES ? HEAD / 2 : HEAD>;  // layout of keys and values that the products read
  constexpr int KEYS = P::KEYS, STAGES = P::STAGES, KEY_COLUMNS = KEYS / 8;
  const int thread = threadIdx.x, warp = thread / 32;
  const Lane lane(thread);
  const Rows<Element, HEAD, Stored, true> rows{arguments, item, head};
  const int member = WIDE ? thread : lane.lane;
  const int first_row = WIDE ? warp * 16 * ROW_TILES : 0;  // the warp's first row in the item

  // -- load the query --
  const uint32 query = ptx::shared_address(shared_memory);
  constexpr int QUERY_PIECES = Elements::PIECES;
  if constexpr (MIXES) {
    for (int i = thread; i < P::ROWS * QUERY_PIECES / 2; i += THREADS) {
      const int row = i / (QUERY_PIECES / 2), piece = i % (QUERY_PIECES / 2) * 2;
      uint32 words[8] = {}, out[8];
      if (row < item.num_rows) {
        const Element* const source = arguments.query + rows.query_offset(row) + piece * 8;
#pragma unroll
        for (int word = 0; word < 8; ++word) words[word] = reinterpret_cast<const uint32*>(source)[word];
      }
      e4m3::mixed(words, out);
      const uint32 target = Elements::row(query, row);
      ptx::store_16(Elements::piece(target, piece), out[0], out[1], out[2], out[3]);
      ptx::store_16(Elements::piece(target, piece + 1), out[4], out[5], out[6], out[7]);
    }
  } else {
    for (int i = thread; i < P::ROWS * QUERY_PIECES; i += THREADS) {
      const int row = i / QUERY_PIECES, piece = i % QUERY_PIECES;
      const bool there = row < item.num_rows;
      const int64 offset = there ? rows.query_offset(row) : 0;
      ptx::copy_16_async(Elements::piece(Elements::row(query, row), piece), arguments.query + offset + piece * 8,
                         there);
    }
    ptx::close_copies();
    ptx::wait_for_all_but<0>();
  }
  ptx::sync_block();
  const uint32 left_row = Elements::piece(Elements::row(query, first_row + lane.left_row()), lane.left_piece());
  const auto read_query = [&](uint32(&left)[4], int tile, int step) {
    ptx::load_matrices(left, Elements::piece(left_row + tile * 16 * Elements::ROW_BYTES, step * 2));
  };
  uint32 kept[P::KEEPS_QUERY ? ROW_TILES : 1][P::KEEPS_QUERY ? STEPS : 1][4];
  if constexpr (P::KEEPS_QUERY)
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) read_query(kept[tile][step], tile, step);

  // -- the rings --
  constexpr uint32 RUN_BYTES = KEYS * StoredTile::ROW_BYTES;
  const uint32 unpacked = query + P::ROWS * Elements::ROW_BYTES;
  const uint32 ring = unpacked + 2 * P::UNPACKED_BYTES + (WIDE ? 0 : warp * P::RING_BYTES);
  const auto keys_of = [&](int run) { return ring + run % STAGES * (2 * RUN_BYTES); };
  const auto values_of = [&](int run) { return keys_of(run) + RUN_BYTES; };
  const Pages pages{arguments.page_table + int64(arguments.slice_turns[item.slice]) * arguments.pages_max,
                    arguments.key_pages + int64(head) * PAGE * HEAD,
                    arguments.value_pages + int64(head) * PAGE * HEAD, arguments.page_stride, item.key_end};
  const auto first_of = [&](int run) { return item.key_begin + (WIDE ? run : run * WARPS + warp) * KEYS; };
  const int span = item.key_end - first_of(0), every = WIDE ? KEYS : KEYS * WARPS;
  const int num_runs = span > 0 ? (span + every - 1) / every : 0;

  int key_page = 0, value_page = 0;
#pragma unroll
  for (int run = 0; run < STAGES; ++run) {
    value_page = pages.page(first_of(run));
    pages.fetch<KEYS, P::TEAM>(keys_of(run), pages.keys, value_page, first_of(run), member);
    ptx::close_copies();
    if (UNPACKS || run < STAGES - 1) {
      pages.fetch<KEYS, P::TEAM>(values_of(run), pages.values, value_page, first_of(run), member);
      ptx::close_copies();
    }
  }
  key_page = pages.page(first_of(STAGES));

  const int last_row = first_row + 16 * ROW_TILES - 1;
  const int limit_min = rows.limit(first_row);  // number of positions that the warp's first row sees
  const int limit_max =                         // number of positions that its last row sees; 0 without rows
      first_row < item.num_rows ? rows.limit(last_row < item.num_rows ? last_row : item.num_rows - 1) : 0;

  const float scale = BYTES ? arguments.scale * arguments.kv_scales[head] : arguments.scale;
  e4m3::NanCheck nan_check;
  Softmax<ROW_TILES> softmax;
  float values[ROW_TILES][COLUMNS][4] = {};

  for (int run = 0; run < num_runs; ++run) {
    const int first = first_of(run);
    ptx::wait_for_all_but<2 * STAGES - 2>();
    P::sync();  // this run's keys have arrived; the previous run's values have been read
    if constexpr (UNPACKS) {  // the run's values have arrived, too
      unpack_page(unpacked, keys_of(run), nan_check);
      unpack_page(unpacked + P::UNPACKED_BYTES, values_of(run), nan_check);
      P::sync();  // keys and values are unpacked
      pages.fetch<KEYS, P::TEAM>(keys_of(run), pages.keys, key_page, first_of(run + STAGES), member);
      ptx::close_copies();
      pages.fetch<KEYS, P::TEAM>(values_of(run), pages.values, key_page, first_of(run + STAGES), member);
      ptx::close_copies();
      key_page = pages.page(first_of(run + STAGES + 1));
    } else {
      pages.fetch<KEYS, P::TEAM>(values_of(run + STAGES - 1), pages.values, value_page,
                                 first_of(run + STAGES - 1), member);
      ptx::close_copies();
    }

    const bool visible = first < limit_max;  // to any row of this warp
    float scores[ROW_TILES][KEY_COLUMNS][4] = {};
    if (visible) {
      constexpr int COLUMNS_EACH = MIXES ? 4 : 2;  // groups of eight columns that one load brings
      const uint32 keys = UNPACKS ? unpacked : keys_of(run);
      const uint32 right_row = MIXES ? Operands::row(keys, lane.lane)
                                     : Operands::piece(Operands::row(keys, lane.right_row()), lane.right_piece());
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        uint32 left[ROW_TILES][4];
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
          if constexpr (P::KEEPS_QUERY)
            for (int i = 0; i < 4; ++i) left[tile][i] = kept[tile][step][i];
          else
            read_query(left[tile], tile, step);
#pragma unroll
        for (int columns = 0; columns < KEY_COLUMNS; columns += COLUMNS_EACH) {
          uint32 right[4];
          ptx::load_matrices(right, Operands::piece(right_row + columns * 8 * Operands::ROW_BYTES,
                                                    step * (MIXES ? 1 : 2)));
#pragma unroll
          for (int column = 0; column < COLUMNS_EACH; ++column) {
            uint32 low, high;
            if constexpr (MIXES) {
              nan_check.take(right[column]);
              e4m3::unpack<Element>(right[column], low, high);
            } else {
              low = right[2 * column], high = right[2 * column + 1];
            }
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile)
              ptx::multiply<Element>(scores[tile][columns + column], left[tile], low, high);
          }
        }
      }
    }

    if constexpr (!UNPACKS) {
      ptx::wait_for_all_but<2 * STAGES - 2>();
      P::sync();  // this run's values have arrived; its keys have been read
      pages.fetch<KEYS, P::TEAM>(keys_of(run + STAGES), pages.keys, key_page, first_of(run + STAGES), member);
      ptx::close_copies();
      value_page = key_page;
      key_page = pages.page(first_of(run + STAGES + 1));
    }
    if (!visible) continue;

    if (first + KEYS > limit_min) {
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int limit = rows.limit(first_row + tile * 16 + half * 8 + lane.row) - first - lane.pair;
#pragma unroll
          for (int column = 0; column < KEY_COLUMNS; ++column)
#pragma unroll
            for (int side = 0; side < 2; ++side)
              if (column * 8 + side >= limit) scores[tile][column][2 * half + side] = ptx::minus_infinity();
        }
    }
    float corrections[ROW_TILES][2];
    bool changed = false;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        corrections[tile][half] = softmax.take(scores[tile], tile, half, scale);
        changed |= corrections[tile][half] != 1.0f;
      }
    if (ptx::any(changed)) {
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
          for (int i = 0; i < 4; ++i) values[tile][column][i] *= corrections[tile][i / 2];
    }
    const uint32 value_row = Operands::piece(
        Operands::row(UNPACKS ? unpacked + P::UNPACKED_BYTES : values_of(run), lane.left_row()), lane.left_piece());
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      uint32 left[ROW_TILES][4];
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = scores[tile][step * 2 + i / 2];
          left[tile][i] = ptx::pack<Element>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      constexpr int COLUMNS_EACH = MIXES ? 4 : 2;  // groups of eight columns that one load brings
#pragma unroll
      for (int columns = 0; columns < COLUMNS; columns += COLUMNS_EACH) {
        uint32 right[4];
        ptx::load_matrices_transposed(
            right, Operands::piece(value_row + step * 16 * Operands::ROW_BYTES, columns * 2 / COLUMNS_EACH));
#pragma unroll
        for (int i = 0; i < 4; i += 2) {  // eight keys, and the next eight
          uint32 low[2], high[2];         // the operands of two products
          if constexpr (MIXES) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              nan_check.take(right[i + half]);
              e4m3::unpack<Element>(right[i + half], half ? high[0] : low[0], half ? high[1] : low[1]);
            }
          } else {
            low[0] = right[i], high[0] = right[i + 1];
          }
#pragma unroll
          for (int product = 0; product < COLUMNS_EACH / 2; ++product)
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile)
              ptx::multiply<Element>(values[tile][columns + i / 2 * (COLUMNS_EACH / 2) + product], left[tile], low[product],
                                     high[product]);
        }
      }
    }
  }
  ptx::wait_for_all_but<0>();
  if constexpr (BYTES)
    if (WIDE ? ptx::any_of_block(nan_check.has_nan()) : ptx::any(nan_check.has_nan())) softmax.set_nan();
  const float value_scale = BYTES ? arguments.kv_scales[arguments.kv_heads + head] : 1.0f;

  if constexpr (WIDE) {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + tile * 16 + half * 8 + lane.row;
        const float sum = softmax.whole_sum(tile, half);
        if (row >= item.num_rows) continue;
        const float share = sum == 0.0f ? 0.0f : value_scale / sum;
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
          rows.write(row, column * 8 + lane.pair, values[tile][column][2 * half] * share,
                     values[tile][column][2 * half + 1] * share);
        if (lane.pair == 0)
          rows.write_sum(row, sum == 0.0f ? ptx::minus_infinity() : softmax.largest[tile][half] * scale + ptx::log2(sum));
      }
  } else {
    ptx::sync_block();  // the rings are no longer read; from here on they hold the four results
    constexpr int STRIDE = P::MERGED_STRIDE;
    float* const merged = reinterpret_cast<float*>(shared_memory);
    float* const maxima = merged + WARPS * P::ROWS * STRIDE;  // for each warp and row; the sums follow
    float* const sums = maxima + WARPS * P::ROWS;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp * P::ROWS + tile * 16 + half * 8 + lane.row;
        const float sum = softmax.whole_sum(tile, half);
        if (lane.pair == 0) {
          const float largest = softmax.largest[tile][half];
          maxima[row] = largest == ptx::minus_infinity() ? ptx::minus_infinity() : largest * scale;
          sums[row] = sum;
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
          for (int side = 0; side < 2; ++side)
            merged[row * STRIDE + (MIXES ? e4m3::column_of(column, lane.pair, side) : column * 8 + lane.pair + side)] =
                values[tile][column][2 * half + side];
      }
    ptx::sync_block();
    for (int i = thread; i < item.num_rows * (HEAD / 2); i += THREADS) {
      const int row = i / (HEAD / 2), column = i % (HEAD / 2) * 2;
      float largest = ptx::minus_infinity(), sum = 0.0f, first = 0.0f, second = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) largest = fmaxf(largest, maxima[other * P::ROWS + row]);
      const float base = largest == ptx::minus_infinity() ? 0.0f : largest;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) {
        const int place = other * P::ROWS + row;
        const float weight = ptx::exp2(maxima[place] - base);
        sum += weight * sums[place];
        first += weight * merged[place * STRIDE + column];
        second += weight * merged[place * STRIDE + column + 1];
      }
      const float share = sum == 0.0f ? 0.0f : value_scale / sum;
      rows.write(row, column, first * share, second * share);
      if (column == 0) rows.write_sum(row, sum == 0.0f ? ptx::minus_infinity() : base + ptx::log2(sum));
    }
  }
}

}  // namespace

// How much shared memory a block needs; read from the compiled kernel's module.
extern "C" __device__ const int multi_token_attention_shared_bytes = SHARED_BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    multi_token_attention(const Element* query,      // (tokens, heads, head_size), rows query_stride apart
                          const Stored* key_pages,   // (pages, kv_heads, 32, head_size), page_stride apart
                          const Stored* value_pages,
                          const float* kv_scales,    // (2, kv_heads); used only if Stored is a byte type
                          const int* page_table,     // (turns, pages_max)
                          const int* slice_offsets,  // (slices + 1)
                          const int* slice_turns,    // (slices)
                          const int* slice_starts,   // (slices)
                          const WorkItem* items,     // gridDim.x / kv_heads of them
                          const int* pack_rows,      // which row of the batch a pack's row is
                          int kv_heads, int group, int pages_max, int64 page_stride, int64 query_stride,
                          int64 out_stride, float scale,
                          float* part_values,  // (part rows, kv_heads, head_size)
                          float* part_sums,    // (part rows, kv_heads)
                          Element* out) {      // (tokens, heads, head_size)
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const Arguments<Element, Stored> arguments{query, key_pages, value_pages, kv_scales, page_table,
                                             slice_offsets, slice_turns, slice_starts, items, pack_rows, kv_heads,
                                             group, pages_max, page_stride, query_stride, out_stride, scale,
                                             part_values, part_sums, out};
  const WorkItem& item = items[blockIdx.x / kv_heads];
  const int head = blockIdx.x % kv_heads;
  if (item.num_rows <= 0) return;
  if (item.num_rows <= 16)
    attend<1, false>(arguments, item, head, shared_memory);
  else if (HEAD < 256 && item.num_rows <= 32)
    attend<(HEAD < 256 ? 2 : 1), false>(arguments, item, head, shared_memory);
  else
    attend<WIDE_TILES, true>(arguments, item, head, shared_memory);
}
