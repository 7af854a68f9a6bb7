// Products and attention for AMX with BF16 and INT8, 32 rows by 32 columns in four tiles of sums.
//
// Panels are those of the other instruction sets, and everything else is AVX-512 with BF16, which each
// processor with AMX has.
//
// With few rows a product is bound by the speed at which weights arrive, as everywhere; with many rows by the
// second-level cache, from which a panel and the rows are read once for each 32 rows (4 KiB for 64 clock
// cycles of arithmetic). It was developed without such a machine, on the emulation of tiles.h, so it is
// used only if its products and its attention agree with those of the AVX-512 kernels (amx_works).
#define LANES 16
#define BFLOAT16_DOT 1
#include <cmath>

#include "amx_attend.h"
#include "attend.h"
#include "dense.h"
#include "tile_sums.h"

namespace {

constexpr int kTileInputs = 32;  // of bfloat16
static_assert(kPanel == kTilePanel);

void multiply_tiles(const Product& product, int32_t panel, int32_t first, int32_t end,
                    const char* ahead) {
  const pensieve::Linear& linear = *product.linear;
  if (linear.inputs % kTileInputs) return multiply<uint16_t>(product, panel, first, end, ahead);
  const int64_t row_bytes = product.row_stride * 2;
  alignas(64) float sums[2 * kTileRows * kPanel];
  TileProduct tiles{};
  tiles.row_bytes = row_bytes;
  tiles.panel = static_cast<const char*>(linear.panels) + panel * linear.panel_bytes;
  tiles.steps = linear.inputs / kTileInputs;
  tiles.sums = sums;
  tiles.sums_bytes = kPanelLine;
  tiles.ahead = ahead;
  int shaped = 0;
  for (int from = first; from < end; from += 2 * kTileRows) {
    const int num_rows = end - from < 2 * kTileRows ? end - from : 2 * kTileRows;
    if (num_rows != shaped) {
      const TileShapes shapes = tile_shapes(num_rows);
      TILE_SHAPES(shapes);
      shaped = num_rows;
    }
    tiles.rows = static_cast<const char*>(product.rows) + from * row_bytes;
    (num_rows > kTileRows ? tile_sums<uint16_t, true, true> : tile_sums<uint16_t, false, true>)(tiles);
    tiles.ahead = nullptr;
    if (product.out_float)
      finish<uint16_t, float>(product, panel, from, num_rows, sums);
    else
      finish<uint16_t, uint16_t>(product, panel, from, num_rows, sums);
  }
  TILE_RELEASE();
}

constexpr pensieve::Dense tiled = {
    LANES, 2 * kTileRows, multiply_tiles, multiply<uint16_t, uint8_t>, quantise<uint16_t>,
    join<uint16_t>, turn<uint16_t>, largest};

// -- whether all this is right here --

struct Drawn {  // bfloat16 in -1 .. 1
  uint32_t state = 1;
  uint16_t operator()() {
    state = state * 1664525u + 1013904223u;
    return rounded(float(int32_t(state >> 8) - (1 << 23)) / (1 << 23));
  }
};

// Whether products are those without tiles, up to rounding, for each way to cut rows.
bool products_agree() {
  constexpr int kInputs = 96, kMost = 49;
  alignas(64) static uint16_t panel[kInputs * kPanel], rows[kMost * kInputs];
  static float with[kMost * kPanel], without[kMost * kPanel];
  Drawn drawn;
  for (uint16_t& each : panel) each = drawn();
  for (uint16_t& each : rows) each = drawn();
  const pensieve::Linear linear{panel, nullptr, nullptr, nullptr, sizeof panel, kInputs, kInputs, kPanel, 0};
  for (int num_rows : {1, 16, 17, 32, 33, kMost}) {
    multiply_tiles({&linear, rows, kInputs, num_rows, with, kPanel, 1}, 0, 0, num_rows, nullptr);
    multiply<uint16_t>({&linear, rows, kInputs, num_rows, without, kPanel, 1}, 0, 0, num_rows, nullptr);
    for (int i = 0; i < num_rows * kPanel; ++i)
      if (!(std::fabs(with[i] - without[i]) <= 1e-4f)) return false;
  }
  return true;
}

// Whether attention is that without tiles, up to the rounding of weights, for each number of tiles: over six pages
// in any order (a block of one, one of four, and one that is partly written), with NaN where nothing was written.
bool attention_agrees() {
  constexpr int kPages = 6, kMost = 64, kHead = 96, kWritten = 5 * kSlots + 7, kTile = kSlots * kHead;
  static uint16_t arena[kPages][2][kTile], query[kMost * kHead];
  alignas(64) static char scratch[pensieve::kScratchBytes];
  alignas(64) static float weighted[2][kMost * kHead];
  static float largest[2][kMost], sum[2][kMost];
  const int32_t pages[kPages] = {4, 0, 5, 2, 1, 3};
  Drawn drawn;
  for (uint16_t& each : query) each = drawn();
  for (int at = 0; at < kPages; ++at)
    for (auto& tile : arena[pages[at]])
      for (int i = 0; i < kTile; ++i) tile[i] = at * kSlots + i / kHead < kWritten ? drawn() : 0x7fc0;
  for (int num_rows : {1, 16, 17, 33, kMost}) {
    Part part{};
    part.query = query;
    part.group = num_rows % 4 ? 1 : 4;
    part.num_tokens = num_rows / part.group;
    part.head_size = kHead;
    part.token_stride = part.group * kHead;
    part.head_stride = kHead;
    part.keys = arena[0][0];
    part.values = arena[0][1];
    part.page_stride = 2 * kTile;
    part.pages = pages;
    part.end_page = kPages;
    part.position = kWritten - part.num_tokens;
    part.scaling = 1.0f;
    Partial with{largest[0], sum[0], weighted[0]}, without{largest[1], sum[1], weighted[1]};
    attend_in_tiles(part, with, scratch);
    attend<uint16_t>(part, without, scratch);
    for (int i = 0; i < num_rows * kHead; ++i) {
      const int row = i / kHead;
      if (!(std::fabs(largest[0][row] - largest[1][row]) <= 1e-3f)) return false;
      if (!(std::fabs(weighted[0][i] / sum[0][row] - weighted[1][i] / sum[1][row]) <= 1e-2f)) return false;
    }
  }
  return true;
}

}  // namespace

bool pensieve::amx_works() {
  static const bool works = may_use_tiles() && products_agree() && attention_agrees();
  return works;
}

const pensieve::Kernel pensieve::kAmx = {
    "amx", 32,
    attend<float>, attend_in_tiles, write_out<float>, write_out<uint16_t>,
    dense_for<float>, tiled};
