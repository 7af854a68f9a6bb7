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

static_assert(kPanel == kTilePanel);

template <typename Input>
constexpr int kTileInputs = kTileBytes / sizeof(Input);

template <typename Input>
void sums_of_rows(const TileProduct& tiles, int num_rows) {
  if (num_rows > kTileRows)
    tile_sums<Input, true, true>(tiles);
  else
    tile_sums<Input, false, true>(tiles);
}

// Input is the type of the rows' values: Element, or uint8_t for quantised rows.
template <typename Element, typename Input>
void multiply_tiles(const Product& product, int32_t panel, int32_t first, int32_t end,
                    const char* ahead) {
  const pensieve::Linear& linear = *product.linear;
  if (linear.inputs % kTileInputs<Input>) return multiply<Element, Input>(product, panel, first, end, ahead);
  const int64_t row_bytes = product.row_stride * sizeof(Input);
  alignas(64) float sums[2 * kTileRows * kPanel];
  TileProduct tiles{};
  tiles.row_bytes = row_bytes;
  tiles.panel = static_cast<const char*>(linear.panels) + panel * linear.panel_bytes;
  tiles.steps = linear.inputs / kTileInputs<Input>;
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
    sums_of_rows<Input>(tiles, num_rows);
    tiles.ahead = nullptr;
    if (product.out_float)
      finish<Element, float>(product, panel, from, num_rows, sums);
    else
      finish<Element, Element>(product, panel, from, num_rows, sums);
  }
  TILE_RELEASE();
}

// Everything as without tiles but the products.
constexpr pensieve::Dense with_tiles(pensieve::Dense dense, pensieve::Multiply multiply,
                                     pensieve::Multiply multiply_bytes) {
  dense.rows_max = 2 * kTileRows;
  dense.multiply = multiply;
  dense.multiply_bytes = multiply_bytes;
  return dense;
}

constexpr pensieve::Dense tiled_float =
    with_tiles(dense_for<float>, multiply<float>, multiply_tiles<float, uint8_t>);
constexpr pensieve::Dense tiled_bfloat16 =
    with_tiles(dense_for<uint16_t>, multiply_tiles<uint16_t, uint16_t>, multiply_tiles<uint16_t, uint8_t>);

// -- whether all this is right here --

struct Drawn {  // bfloat16 in -1 .. 1
  uint32_t state = 1;
  uint16_t operator()() {
    state = state * 1664525u + 1013904223u;
    return rounded(float(int32_t(state >> 8) - (1 << 23)) / (1 << 23));
  }
};

// Whether products are those without tiles, for each way to cut rows: up to rounding, and of bytes exactly.
template <typename Input>
bool products_agree() {
  constexpr int kInputs = 192, kMost = 49;
  alignas(64) static Input panel[kInputs * kPanel], rows[kMost * kInputs];
  static float with[kMost * kPanel], without[kMost * kPanel], scales[kPanel], row_scales[kMost];
  static int32_t offsets[kPanel];
  Drawn drawn;
  for (Input& each : panel) each = Input(drawn());
  for (Input& each : rows) each = Input(drawn());
  for (float& each : scales) each = widened(drawn());
  for (float& each : row_scales) each = widened(drawn());
  constexpr bool kBytes = sizeof(Input) == 1;
  const pensieve::Linear linear{panel, nullptr, kBytes ? scales : nullptr, offsets, sizeof panel,
                                kInputs, kInputs, kPanel, 0};
  for (int num_rows : {1, 16, 17, 32, 33, kMost}) {
    Product product{&linear, rows, kInputs, num_rows, with, kPanel, 1, row_scales};
    multiply_tiles<uint16_t, Input>(product, 0, 0, num_rows, nullptr);
    product.out = without;
    multiply<uint16_t, Input>(product, 0, 0, num_rows, nullptr);
    for (int i = 0; i < num_rows * kPanel; ++i)
      if (!(std::fabs(with[i] - without[i]) <= (kBytes ? 0.0f : 1e-4f))) return false;
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
  static const bool works = may_use_tiles() && products_agree<uint16_t>() &&
                            products_agree<uint8_t>() && attention_agrees();
  return works;
}

const pensieve::Kernel pensieve::kAmx = {
    "amx", 32,
    attend<float>, attend_in_tiles, write_out<float>, write_out<uint16_t>,
    tiled_float, tiled_bfloat16};
