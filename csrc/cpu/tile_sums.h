// Compute sums of up to 32 rows by 32 columns in four tiles, for the products of layers and for attention.
//
// A step multiplies two tiles of rows by two tiles of a panel. It loads four tiles (4 KiB) for four products of 16 clock
// cycles, which is the best ratio with eight tiles. If `more` is set, the sums start with the stored sums, otherwise
// with zero. A tile holds the same floats as memory, so storing and loading a sum does not change the result.
//
//   tiles 0, 1    sums of rows 0 to 15, columns 0 to 15 and 16 to 31
//   tiles 2, 3    sums of rows 16 to 31, the same columns
//   tiles 4, 5    rows 0 to 15, rows 16 to 31
//   tiles 6, 7    the panel's columns 0 to 15, columns 16 to 31
#pragma once

#include <type_traits>

#include "tiles.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;                  // bytes in a row of a tile
constexpr int kTilePanel = 32;                  // columns
// bytes in a line of a panel: for each of its 32 columns, the weights of four input bytes
constexpr int kPanelLine = 4 * kTilePanel;
constexpr int kStepBytes = 16 * kPanelLine;     // bytes of a panel in a step

struct TileProduct {
  const char* rows;  // bfloat16, or unsigned bytes
  int64_t row_bytes;
  const char* panel;
  int64_t steps;  // each is kTileBytes of a row
  float* sums;    // integers if rows are bytes
  int64_t sums_bytes;  // bytes between rows of sums
  bool more;
  const char* ahead = nullptr;  // where to prefetch as many bytes as are read from the panel; null: nowhere
};

// Without Down there are at most 16 rows. Without Across there are at most 16 columns.
template <typename Input, bool Down, bool Across>
void tile_sums(const TileProduct& p) {
  const char *sums = reinterpret_cast<const char*>(p.sums), *below = sums + kTileRows * p.sums_bytes;
  if (p.more) {
    TILE_LOAD(0, sums, p.sums_bytes);
    if (Across) TILE_LOAD(1, sums + kTileBytes, p.sums_bytes);
    if (Down) TILE_LOAD(2, below, p.sums_bytes);
    if (Down && Across) TILE_LOAD(3, below + kTileBytes, p.sums_bytes);
  } else {
    TILE_ZERO(0);
    if (Across) TILE_ZERO(1);
    if (Down) TILE_ZERO(2);
    if (Down && Across) TILE_ZERO(3);
  }
  for (int64_t step = 0; step < p.steps; ++step) {
    const char *rows = p.rows + step * kTileBytes, *panel = p.panel + step * kStepBytes;
    TILE_LOAD(6, panel, kPanelLine);
    if (Across) TILE_LOAD(7, panel + kTileBytes, kPanelLine);
    if (p.ahead)
      for (int64_t at = step * kStepBytes; at < (step + 1) * kStepBytes; at += 64)
        __builtin_prefetch(p.ahead + at, 0, 3);
    TILE_LOAD(4, rows, p.row_bytes);
    if (Down) TILE_LOAD(5, rows + kTileRows * p.row_bytes, p.row_bytes);
    if constexpr (std::is_same_v<Input, uint8_t>) {
      TILE_DOT_BYTES(0, 4, 6);
      if (Across) TILE_DOT_BYTES(1, 4, 7);
      if (Down) TILE_DOT_BYTES(2, 5, 6);
      if (Down && Across) TILE_DOT_BYTES(3, 5, 7);
    } else {
      TILE_DOT(0, 4, 6);
      if (Across) TILE_DOT(1, 4, 7);
      if (Down) TILE_DOT(2, 5, 6);
      if (Down && Across) TILE_DOT(3, 5, 7);
    }
  }
  char *out = reinterpret_cast<char*>(p.sums), *under = out + kTileRows * p.sums_bytes;
  TILE_STORE(0, out, p.sums_bytes);
  if (Across) TILE_STORE(1, out + kTileBytes, p.sums_bytes);
  if (Down) TILE_STORE(2, under, p.sums_bytes);
  if (Down && Across) TILE_STORE(3, under + kTileBytes, p.sums_bytes);
}

// Sets the shapes of tiles for `num_rows` rows and all 32 columns.
inline TileShapes tile_shapes(int num_rows) {
  const int top = num_rows < kTileRows ? num_rows : kTileRows, bottom = num_rows - top;
  const int rows[8] = {top, top, bottom, bottom, top, bottom, 16, 16};
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = uint8_t(rows[tile]);
    shapes.row_bytes[tile] = rows[tile] ? kTileBytes : 0;
  }
  return shapes;
}

}  // namespace
