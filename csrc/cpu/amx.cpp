// Products for AMX with BF16, 32 rows by 32 columns in four tiles of sums.
//
// Panels are those of the other instruction sets, and everything else is AVX-512 with BF16, which each
// processor with AMX has.
//
// With few rows it is bound by the speed at which weights arrive, as everywhere; with many rows by the
// second-level cache, from which a panel and the rows are read once for each 32 rows (4 KiB for 64 clock
// cycles of arithmetic). It was developed without such a machine, on the emulation of tiles.h, so it is
// used only if its products agree with those of the AVX-512 kernel (amx_works).
#define LANES 16
#define BFLOAT16_DOT 1
#include <cmath>

#include "attend.h"
#include "dense.h"
#include "tiles.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileInputs = 32;  // of bfloat16
constexpr int kTileBytes = 64;   // of a row of a tile

// Sums are in tiles 0 and 1, with Two also in 2 and 3 (rows from 16 on); rows in 4 and 5, weights in 6 and 7.
template <bool Two>
void tile_sums(const char* panel, const char* rows, int64_t row_bytes, int64_t blocks,
               const char* ahead, float* sums) {
  constexpr int64_t kLine = kPanel * 4, kBlock = kTileInputs / 2 * kLine;
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (Two) {
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int64_t block = 0; block < blocks; ++block) {
    TILE_LOAD(6, panel + block * kBlock, kLine);
    TILE_LOAD(7, panel + block * kBlock + kTileBytes, kLine);
    if (ahead)
      for (int64_t at = block * kBlock; at < (block + 1) * kBlock; at += 64)
        __builtin_prefetch(ahead + at, 0, 3);
    TILE_LOAD(4, rows + block * kTileBytes, row_bytes);
    TILE_DOT(0, 4, 6);
    TILE_DOT(1, 4, 7);
    if (Two) {
      TILE_LOAD(5, rows + kTileRows * row_bytes + block * kTileBytes, row_bytes);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, kLine);
  TILE_STORE(1, sums + LANES, kLine);
  if (Two) {
    TILE_STORE(2, sums + kTileRows * kPanel, kLine);
    TILE_STORE(3, sums + kTileRows * kPanel + LANES, kLine);
  }
}

TileShapes shapes_for(int num_rows) {
  const int top = num_rows < kTileRows ? num_rows : kTileRows, bottom = num_rows - top;
  const int rows[8] = {top, top, bottom, bottom, top, bottom, kTileInputs / 2, kTileInputs / 2};
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = uint8_t(rows[tile]);
    shapes.row_bytes[tile] = rows[tile] ? kTileBytes : 0;
  }
  return shapes;
}

void multiply_tiles(const Product& product, int32_t panel, int32_t first, int32_t end,
                    const char* ahead) {
  const pensieve::Linear& linear = *product.linear;
  if (linear.inputs % kTileInputs) return multiply<uint16_t>(product, panel, first, end, ahead);
  const char* weights = static_cast<const char*>(linear.panels) + panel * linear.panel_bytes;
  const int64_t row_bytes = product.row_stride * 2;
  alignas(64) float sums[2 * kTileRows * kPanel];
  int shaped = 0;
  for (int from = first; from < end; from += 2 * kTileRows) {
    const int num_rows = end - from < 2 * kTileRows ? end - from : 2 * kTileRows;
    const char* rows = static_cast<const char*>(product.rows) + from * row_bytes;
    if (num_rows != shaped) {
      const TileShapes shapes = shapes_for(num_rows);
      TILE_SHAPES(shapes);
      shaped = num_rows;
    }
    const auto sums_of_tiles = num_rows > kTileRows ? tile_sums<true> : tile_sums<false>;
    sums_of_tiles(weights, rows, row_bytes, linear.inputs / kTileInputs, from == first ? ahead : nullptr, sums);
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

// Whether products are those without tiles, up to rounding, for each way to cut rows.
bool agrees() {
  constexpr int kInputs = 96, kMost = 49;
  alignas(64) static uint16_t panel[kInputs * kPanel], rows[kMost * kInputs];
  static float with[kMost * kPanel], without[kMost * kPanel];
  uint32_t state = 1;
  auto drawn = [&state] {
    state = state * 1664525u + 1013904223u;
    return rounded(float(int32_t(state >> 8) - (1 << 23)) / (1 << 23));
  };
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

}  // namespace

bool pensieve::amx_works() {
  static const bool works = may_use_tiles() && agrees();
  return works;
}

const pensieve::Kernel pensieve::kAmx = {
    "amx", 32,
    attend<float>, attend<uint16_t>, write_out<float>, write_out<uint16_t>,
    dense_for<float>, tiled,
    attend<Half>, write_out<Half>, dense_for<Half>};
