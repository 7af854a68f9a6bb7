// Compute multi_token_attention over pages of bfloat16, in AMX tiles.
//
// Pages are not transposed. The kernel transposes only small data, or data that is made once for all rows of an item.
//
// In each product, the first matrix is loaded as tiles of its rows. The second matrix is packed in a panel, where the
// two elements of a pair are side by side.
//
//   scores' = keys x queries'     The tiles of keys have slots as rows, loaded directly from the page. The panel is
//                                 packed once from the item's queries: pairs of dimensions, a column for each row.
//   weights                       A vector holds a slot's scores of 16 rows. So the largest score and the sum need no
//                                 shuffles. The weights of two slots, rounded to bfloat16, become a word. Then 16 x 16
//                                 words are transposed to rows of tiles.
//   sums += weights x values      The panel is packed from the page's values: pairs of slots.
//
// With queries as rows of tiles, the kernel would have to transpose the keys of each page, and the softmax would need
// shuffles. Storing values in pairs of slots would save the interleaving. But then a slot would no longer be contiguous
// for the copier and the other instruction sets.
//
// Pages are processed in blocks of four. So sums are loaded and stored once for 128 slots, and all rows of the item
// use a block's values from the cache. The first block is a single page, which was prefetched before the part began.
// The softmax of each block prefetches the data of the next block.
//
// The cost of a page of one KV head, in tiles loaded or stored (TL, 1 KiB each), products (TP, 16 clock cycles each)
// and vectors of 64 bytes (V); h is head size / 32, q is rows / 16, rounded up:
//
//   scores     TL: keys 2h for every two q, queries hq, scores 2q      TP: 2hq
//   softmax    V: scores 32q, about 18 instructions each; shuffles 64q
//   values     V: loads 32h, shuffles 32h, stores 32h, for any q
//   sums       TL: values 2h for every two q, weights hq, sums 4hq / 4 (once per block of four pages)      TP: 2hq
//
// For head size 64: the bytes of the page, the clock cycles of three parts, and the BF16 instructions without tiles.
//
//   rows        bytes        products   softmax   values     without tiles
//      4            8,192             128       360      130         512
//      8            8,192             128       360      130       1,024
//     16            8,192             128       360      130       2,048
//     32            8,192             256       720      130       4,096
//     64            8,192             512     1,440      130       8,192
//
// At 14 GB/s for a core of 2.6 GHz, 8 KiB arrive in 1,500 cycles. So up to 32 rows, memory bandwidth is the limit. From
// 64 rows on, arithmetic is the limit, and the softmax takes longer than the products (head size 128: 1,024 cycles of
// products, 1,440 of softmax). The cycles are counted, not measured: no machine with AMX has run this code yet.
//
// A row's result does not depend on other rows. No tile column or tile row mixes the data of two rows. Slots after the
// row's position have a score of minus infinity and a weight of zero, so blocks that extend beyond the position add
// zeros. Blocks begin at fixed pages of the part. Rows that pad a tile are zero queries, and are never copied out.
// Values of slots that were never written may be NaN and are replaced by zero.
#pragma once

#include <immintrin.h>

#include "attend.h"
#include "tile_sums.h"

namespace {

using pensieve::kBlockPages;
constexpr int kBlockSlots = kBlockPages * kSlots;

struct alignas(64) TileScratch {  // private to a thread
  uint32_t queries[kRowsMax / kTilePanel][kHeadMax / 2][kTilePanel];  // panels of 32 rows, by pairs of dimensions
  // Panels of 32 dimensions, each (pairs of slots, dimensions).
  uint32_t values[kHeadMax / kTilePanel][kBlockSlots / 2][kTilePanel];
  float scores[kBlockSlots][kTilePanel];
  uint16_t weights[kTilePanel][kBlockSlots];
  float weighted[kRowsMax * kHeadMax];  // rows up to a whole number of tiles
  float largest[kRowsMax], sum[kRowsMax], rescale[kTilePanel];
  int32_t last[kRowsMax];  // the last position that a row sees
};
static_assert(sizeof(TileScratch) <= pensieve::kScratchBytes);
static_assert(kSlots * sizeof(uint16_t) == kTileBytes && kPanelLine == kTilePanel * 4);

// The tiles of keys and values of the next block, to be prefetched a few lines at a time.
struct BlockAhead {
  const char* tiles[2 * kBlockPages];
  int num_tiles = 0, lines = 0;  // `lines`: cache lines of a tile
  int tile = 0, line = 0, lines_per_step = 0;

  void add(const void* tile) {
    if (tile) tiles[num_tiles++] = static_cast<const char*>(tile);
  }
  void spread(int num_steps) { lines_per_step = (num_tiles * lines + num_steps - 1) / num_steps; }
  void step() {
    if (tile == num_tiles) return;
    const int end = line + lines_per_step < lines ? line + lines_per_step : lines;
    for (; line < end; ++line) __builtin_prefetch(tiles[tile] + 64 * line, 0, 2);
    if (line == lines) ++tile, line = 0;
  }
};

inline const uint16_t* page_of(const void* arena, const Part& part, int page) {
  return static_cast<const uint16_t*>(arena) + int64_t(part.pages[page]) * part.page_stride;
}

inline void pack_queries(const Part& part, int num_rows, TileScratch& scratch) {
  for (int row = 0; row < num_rows; row += LANES)
    for (int pair = 0; pair < part.head_size / 2; pair += LANES) {
      Words words[LANES] = {};
      for (int r = 0; r < LANES && row + r < num_rows; ++r)
        words[r] = load<Words>(static_cast<const uint16_t*>(part.query) +
                               query_at(part, (row + r) / part.group) +
                               (row + r) % part.group * part.head_stride + 2 * pair);
      transpose(words);
      for (int i = 0; i < LANES; ++i)
        store(&scratch.queries[row / kTilePanel][pair + i][row % kTilePanel], words[i]);
    }
}

// Puts two slots' values side by side. Slots from `num_slots` on were not written and become zero.
inline void pack_values(const uint16_t* values, int num_slots, int head_size, int page_of_block,
                        TileScratch& scratch) {
  // Indices that put dimensions 0 to 15 (kLow) and 16 to 31 (kHigh) of two slots side by side. Indices from 32 on
  // select from the second slot.
  alignas(64) static constexpr uint16_t kLow[32] = {
      0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  alignas(64) static constexpr uint16_t kHigh[32] = {
      16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
      24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_load_si512(kHigh);
  for (int slot = 0; slot < kSlots; slot += 2)
    for (int at = 0; at < head_size; at += kTilePanel) {
      __m512i first{}, second{};
      if (slot < num_slots) first = _mm512_loadu_si512(values + slot * head_size + at);
      if (slot + 1 < num_slots) second = _mm512_loadu_si512(values + (slot + 1) * head_size + at);
      uint32_t* to = scratch.values[at / kTilePanel][(page_of_block * kSlots + slot) / 2];
      _mm512_store_si512(to, _mm512_permutex2var_epi16(first, low, second));
      _mm512_store_si512(to + LANES, _mm512_permutex2var_epi16(first, high, second));
    }
}

// Rounds two slots' weights of 16 rows. A word holds a row's two weights.
inline Words paired(Floats first, Floats second) {
  alignas(64) static constexpr uint16_t kSideBySide[32] = {
      0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Words)_mm512_permutexvar_epi16(_mm512_load_si512(kSideBySide), both);
}

// Computes the weights of 16 rows for a block's slots (from position `first` on), as rows of tiles. Updates the rows'
// largest scores, their sums, and the factors of older sums. `column` is the first row's column in the panel.
inline void soften_columns(TileScratch& scratch, int row, int column, int first, int num_pages,
                           float factor, BlockAhead& ahead) {
  const int num_slots = num_pages * kSlots;
  const Ints last = load<Ints>(scratch.last + row) - first;
  const int seen_by_all = scratch.last[row] - first + 1;  // later rows have the same or a later position
  for (int slot = seen_by_all < 0 ? 0 : seen_by_all; slot < num_slots; ++slot) {
    float* const scores = &scratch.scores[slot][column];
    store(scores, Ints{} + slot <= last ? load<Floats>(scores) : splat(-INFINITY));
  }
  const Floats none = splat(-INFINITY), before = load<Floats>(scratch.largest + row);
  Floats most[4] = {none, none, none, none};  // four, so that no step waits for the previous step
  for (int slot = 0; slot < num_slots; slot += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) most[i] = larger(load<Floats>(&scratch.scores[slot + i][column]), most[i]);
  const Floats largest =
      larger(larger(larger(most[0], most[1]), larger(most[2], most[3])) * factor, before);
  const Floats base = largest == none ? Floats{} : largest;  // none: the row has seen no key yet
  Floats total[2] = {};
  for (int page = 0; page < num_pages; ++page) {
    Words pairs[kSlots / 2];
    for (int pair = 0; pair < kSlots / 2; ++pair) {
      Floats weight[2];
      ahead.step();
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Floats score = load<Floats>(&scratch.scores[page * kSlots + 2 * pair + i][column]);
        const Floats power = (Floats)_mm512_fmsub_ps((__m512)score, (__m512)splat(factor), (__m512)base);
        weight[i] = power < splat(-126.0f) ? Floats{} : exp2_in_range(power);  // NaN stays
        total[i] += weight[i];
      }
      pairs[pair] = paired(weight[0], weight[1]);
    }
    transpose(pairs);
    for (int r = 0; r < LANES; ++r) store(&scratch.weights[column + r][page * kSlots], pairs[r]);
  }
  // The factor of a row's older sums. If the row had seen no key, these sums are zero, so the factor does not matter.
  const Floats rescale = before == largest ? splat(1.0f) : exp2_nonpositive(before - largest);
  store(scratch.largest + row, largest);
  store(scratch.sum + row, load<Floats>(scratch.sum + row) * rescale + (total[0] + total[1]));
  store(scratch.rescale + column, rescale);
}

// Processes up to 32 rows (from `row` on) and the pages of a block.
inline void attend_block(const Part& part, int row, int num_rows, int page, int num_pages,
                         TileScratch& scratch, BlockAhead& ahead) {
  const int head_size = part.head_size;
  TileProduct scores{};
  scores.row_bytes = head_size * 2;
  scores.panel = reinterpret_cast<const char*>(scratch.queries[row / kTilePanel]);
  scores.steps = head_size / 32;
  scores.sums_bytes = kPanelLine;
  const bool wide = num_rows > kTileRows;
  for (int i = 0; i < num_pages; ++i) {
    scores.rows = reinterpret_cast<const char*>(page_of(part.keys, part, page + i));
    scores.sums = scratch.scores[i * kSlots];
    (wide ? tile_sums<uint16_t, true, true> : tile_sums<uint16_t, true, false>)(scores);
  }
  for (int column = 0; column < num_rows; column += LANES)
    soften_columns(scratch, row + column, column, page * kSlots, num_pages,
                   part.kind.scaling * kLog2E, ahead);
  float* const weighted = scratch.weighted + row * head_size;
  for (int r = 0; r < num_rows; ++r) {
    const float rescale = scratch.rescale[r];
    if (rescale == 1.0f) continue;
    for (int at = r * head_size; at < (r + 1) * head_size; at += LANES)
      store(weighted + at, load<Floats>(weighted + at) * rescale);
  }
  TileProduct sums{};
  sums.rows = reinterpret_cast<const char*>(scratch.weights);
  sums.row_bytes = kBlockSlots * 2;
  sums.steps = num_pages;
  sums.sums_bytes = head_size * 4;
  sums.more = true;
  for (int at = 0; at < head_size; at += kTilePanel) {
    sums.panel = reinterpret_cast<const char*>(scratch.values[at / kTilePanel]);
    sums.sums = weighted + at;
    (wide ? tile_sums<uint16_t, true, true> : tile_sums<uint16_t, false, true>)(sums);
  }
}

void attend_in_tiles(const Part& part, Partial& partial, void* memory) {
  // Without a positive scaling, the largest product is not the largest score.
  if (!(part.kind.scaling > 0.0f)) return attend<uint16_t>(part, partial, memory);
  TileScratch& scratch = *static_cast<TileScratch*>(memory);
  const int head_size = part.head_size, num_rows = part.num_tokens * part.group;
  const int padded = (num_rows + LANES - 1) / LANES * LANES;
  pack_queries(part, num_rows, scratch);
  for (int r = 0; r < padded; ++r) {
    const bool more = part.continues && r < num_rows;
    scratch.largest[r] = more ? partial.largest[r] : -INFINITY;
    scratch.sum[r] = more ? partial.sum[r] : 0.0f;
    scratch.last[r] = part.position + r / part.group;
  }
  memset(scratch.weighted, 0, sizeof(float) * padded * head_size);
  if (part.continues)
    memcpy(scratch.weighted, partial.weighted, sizeof(float) * num_rows * head_size);
  const TileShapes shapes = tile_shapes(2 * kTileRows);
  TILE_SHAPES(shapes);

  const int end_position = part.position + part.num_tokens;
  int page = part.first_page;
  while (page < part.end_page) {
    auto block_end = [&](int from) {
      const int end = from == part.first_page && !part.continues ? from + 1 : from + kBlockPages;
      return end < part.end_page ? end : part.end_page;
    };
    const int end = block_end(page);
    BlockAhead ahead;
    ahead.lines = kSlots * head_size * 2 / 64;
    for (int next = end; next < part.end_page && next < block_end(end); ++next) {
      ahead.add(page_of(part.keys, part, next));
      ahead.add(page_of(part.values, part, next));
    }
    if (end == part.end_page) {
      ahead.add(part.keys_after);
      ahead.add(part.values_after);
    }
    ahead.spread((end - page) * kSlots / 2 * (padded / LANES));  // one step for each pair of slots
    for (int i = page; i < end; ++i) {
      const int left = end_position - i * kSlots;
      pack_values(page_of(part.values, part, i), left < kSlots ? left : kSlots, head_size, i - page, scratch);
    }
    for (int row = 0; row < num_rows; row += kTilePanel)
      attend_block(part, row, num_rows - row < kTilePanel ? num_rows - row : kTilePanel, page,
                   end - page, scratch, ahead);
    page = end;
  }
  TILE_RELEASE();
  memcpy(partial.largest, scratch.largest, sizeof(float) * num_rows);
  memcpy(partial.sum, scratch.sum, sizeof(float) * num_rows);
  memcpy(partial.weighted, scratch.weighted, sizeof(float) * num_rows * head_size);
}

}  // namespace
