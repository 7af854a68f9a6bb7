// Products and attention for AMX with BF16 and INT8: sums of 32 rows by 32 columns in four tiles.
//
// Panels have the same layout as for other instruction sets. Everything except products and attention uses AVX-512 with
// BF16, which each processor with AMX has.
//
// With few rows, memory bandwidth limits a product. With many rows, the bandwidth of the second-level cache limits it:
// for each 32 rows, the panel and these rows are read once from that cache. One step (tile_sums.h) reads 4 KiB and
// computes for 64 clock cycles. Rows that do not fit into that cache are multiplied in blocks.
//
// Attention, blocks and products of bytes were developed without an AMX processor (tests/kernels/tiles). So AMX is used
// only if its products and its attention agree with the AVX-512 kernels (amx_works).
#define LANES 16
#define BFLOAT16_DOT 1
#include <cmath>

#include "amx_attend.h"
#include "attend.h"
#include "dense.h"
#include "tile_sums.h"

namespace {

using pensieve::kBlockPanels;
using pensieve::kBlockRows;

constexpr int kRowsOfTiles = 2 * kTileRows;
constexpr int64_t kStretchSteps = 16;  // 1,024 bytes of a row: 512 inputs of bfloat16, or 1,024 quantised inputs
static_assert(kPanel == kTilePanel);

template <typename Input>
constexpr int kTileInputs = kTileBytes / sizeof(Input);

// Multiplies up to 32 rows at a time in tiles. The tiles stay configured until this object is destroyed. Their shapes
// change only if the number of rows changes. Input is the type of the rows' values: Element, or uint8_t for quantised
// rows.
template <typename Element, typename Input>
class RowsInTiles {
 public:
  explicit RowsInTiles(const Product& product) : product_(product), row_bytes_(product.row_stride * sizeof(Input)) {}
  ~RowsInTiles() { TILE_RELEASE(); }

  // Multiplies at most 32 rows (from..end) by some steps of a panel. `last`: the sums are complete afterwards.
  void multiply(int32_t panel, int64_t first_step, int64_t num_steps, bool last, int from, int end,
                const char* ahead, float* sums) {
    const pensieve::Linear& linear = *product_.linear;
    const int num_rows = end - from;
    if (num_rows != shaped_) {
      const TileShapes shapes = tile_shapes(num_rows);
      TILE_SHAPES(shapes);
      shaped_ = num_rows;
    }
    TileProduct tiles{};
    tiles.rows = static_cast<const char*>(product_.rows) + from * row_bytes_ + first_step * kTileBytes;
    tiles.row_bytes = row_bytes_;
    tiles.panel = static_cast<const char*>(linear.panels) + panel * linear.panel_bytes + first_step * kStepBytes;
    tiles.steps = num_steps;
    tiles.sums = sums;
    tiles.sums_bytes = kPanelLine;
    tiles.more = first_step > 0;
    tiles.ahead = ahead;
    (num_rows > kTileRows ? tile_sums<Input, true, true> : tile_sums<Input, false, true>)(tiles);
    if (!last) return;
    if (product_.out_float)
      finish<Element, float>(product_, panel, from, num_rows, sums);
    else
      finish<Element, Element>(product_, panel, from, num_rows, sums);
  }

 private:
  const Product& product_;
  const int64_t row_bytes_;
  int shaped_ = 0;
};

inline int rows_until(int from, int end) { return end - from < kRowsOfTiles ? end : from + kRowsOfTiles; }

template <typename Element, typename Input>
void multiply_tiles(const Product& product, int32_t panel, int32_t first, int32_t end,
                    const char* ahead) {
  const int32_t inputs = product.linear->inputs;
  if (inputs % kTileInputs<Input>) return multiply<Element, Input>(product, panel, first, end, ahead);
  alignas(64) float sums[kRowsOfTiles * kPanel];
  RowsInTiles<Element, Input> rows(product);
  for (int from = first; from < end; from += kRowsOfTiles)
    rows.multiply(panel, 0, inputs / kTileInputs<Input>, true, from, rows_until(from, end),
                  from == first ? ahead : nullptr, sums);
}

// A block has up to 256 rows (kBlockRows) and 8 panels (kBlockPanels). It is multiplied stretch by stretch: one stretch
// of inputs by all panels, then the next stretch. A thread needs 576 KiB: the rows' stretch (256 KiB), the stretches of
// two panels (32 KiB each), and the sums (256 KiB). A second-level cache of 2 MiB holds this for two threads. So rows
// are read from memory once per 8 panels, and weights once per 256 rows. A step reads 4 KiB of inputs and weights.
// Storing and loading the sums of a stretch adds 0.5 KiB per step.
template <typename Element, typename Input>
void multiply_block(const Product& product, int32_t panel, int32_t end_panel, int32_t first,
                    int32_t end, const char* ahead) {
  const pensieve::Linear& linear = *product.linear;
  if (linear.inputs % kTileInputs<Input>) {
    for (; panel < end_panel; ++panel) multiply<Element, Input>(product, panel, first, end, nullptr);
    return;
  }
  alignas(64) static thread_local float sums[kBlockPanels][kBlockRows * kPanel];
  const int64_t num_steps = linear.inputs / kTileInputs<Input>;
  const char* panels = static_cast<const char*>(linear.panels);
  RowsInTiles<Element, Input> rows(product);
  for (int64_t step = 0; step < num_steps; step += kStretchSteps) {
    const bool last = step + kStretchSteps >= num_steps;
    for (int32_t at = panel; at < end_panel; ++at) {
      const char* next = ahead;  // the next panel; after the last panel, the next stretch of the first panel
      if (at + 1 < end_panel)
        next = panels + (at + 1) * linear.panel_bytes + step * kStepBytes;
      else if (!last)
        next = panels + panel * linear.panel_bytes + (step + kStretchSteps) * kStepBytes;
      for (int from = first; from < end; from += kRowsOfTiles)
        rows.multiply(at, step, last ? num_steps - step : kStretchSteps, last, from, rows_until(from, end),
                      from == first ? next : nullptr, sums[at - panel] + (from - first) * kPanel);
    }
  }
}

// Among the functions of a Dense, only the products use tiles.
constexpr pensieve::Dense tiled_float = [] {
  pensieve::Dense dense = dense_for<float>;
  dense.multiply_bytes = multiply_tiles<float, uint8_t>;
  dense.multiply_block_bytes = multiply_block<float, uint8_t>;
  return dense;
}();
constexpr pensieve::Dense tiled_half = [] {
  pensieve::Dense dense = dense_for<Half>;
  dense.multiply_bytes = multiply_tiles<Half, uint8_t>;
  dense.multiply_block_bytes = multiply_block<Half, uint8_t>;
  return dense;
}();
constexpr pensieve::Dense tiled_bfloat16 = [] {
  pensieve::Dense dense = dense_for<uint16_t>;
  dense.multiply = multiply_tiles<uint16_t, uint16_t>;
  dense.multiply_bytes = multiply_tiles<uint16_t, uint8_t>;
  dense.multiply_block = multiply_block<uint16_t, uint16_t>;
  dense.multiply_block_bytes = multiply_block<uint16_t, uint8_t>;
  return dense;
}();

// -- check the products and the attention on this machine --

struct Drawn {  // bfloat16 in -1 .. 1
  uint32_t state = 1;
  uint16_t operator()() {
    state = state * 1664525u + 1013904223u;
    return rounded(float(int32_t(state >> 8) - (1 << 23)) / (1 << 23));
  }
};

// Whether products with and without tiles are equal, for several numbers of rows: exactly for bytes, otherwise up to
// rounding. A block of two panels and three stretches (the last stretch is shorter) must give exactly the same sums as
// single panels.
template <typename Input>
bool products_agree() {
  constexpr int kInputs = (2 * kStretchSteps + 3) * kTileInputs<Input>, kMost = 49, kOutputs = 2 * kPanel;
  alignas(64) static Input panels[2][kInputs * kPanel], rows[kMost * kInputs];
  static float with[kMost * kOutputs], without[kMost * kOutputs], scales[kOutputs], row_scales[kMost];
  static int32_t offsets[kOutputs];
  Drawn drawn;
  for (auto& panel : panels)
    for (Input& each : panel) each = Input(drawn());
  for (Input& each : rows) each = Input(drawn());
  for (float& each : scales) each = widened(drawn());
  for (float& each : row_scales) each = widened(drawn());
  constexpr bool kBytes = sizeof(Input) == 1;
  const pensieve::Linear linear{panels, nullptr, kBytes ? scales : nullptr, offsets, sizeof panels[0],
                                kInputs, kInputs, kOutputs, 0};
  for (int num_rows : {1, 16, 17, 32, 33, kMost}) {
    Product product{&linear, rows, kInputs, num_rows, with, kOutputs, 1, row_scales};
    for (int panel : {0, 1}) multiply_tiles<uint16_t, Input>(product, panel, 0, num_rows, nullptr);
    product.out = without;
    for (int panel : {0, 1}) multiply<uint16_t, Input>(product, panel, 0, num_rows, nullptr);
    for (int i = 0; i < num_rows * kOutputs; ++i)
      if (!(std::fabs(with[i] - without[i]) <= (kBytes ? 0.0f : 1e-3f))) return false;
    multiply_block<uint16_t, Input>(product, 0, 2, 0, num_rows, nullptr);
    if (memcmp(with, without, sizeof(float) * num_rows * kOutputs)) return false;
  }
  return true;
}

// Whether attention gives the same results with and without tiles, except for the rounding of the attention weights.
// This is tested for each number of tiles, with six scattered pages. Attention processes the first page alone, then
// four pages together, then the last page, which is partly written. Unwritten slots hold NaN.
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
    part.kind.scaling = 1.0f;
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
    tiled_float, tiled_bfloat16,
    attend<Half>, write_out<Half>, tiled_half,
    codes_for<float>, codes_for<uint16_t>, codes_for<Half>};
