// The instructions of AMX, the matrix unit of some Intel processors.
//
// It has eight tiles of up to 16 rows of 64 bytes.
//
// With EMULATED_TILES the same operations are plain C++, so that their users can be tested on a machine
// without AMX; the arithmetic differs in rounding only.
#pragma once

#include <cstdint>
#include <cstring>

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if EMULATED_TILES

namespace {

thread_local TileShapes emulated_shapes;
thread_local float emulated_tiles[8][16 * 16];

inline float emulated_half(uint32_t pair, int which) {
  uint32_t bits = which ? pair & 0xffff0000u : pair << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline void emulated_load(int tile, const void* from, int64_t stride) {
  memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
  for (int r = 0; r < emulated_shapes.rows[tile]; ++r)
    memcpy(emulated_tiles[tile] + 16 * r, static_cast<const char*>(from) + r * stride,
           emulated_shapes.row_bytes[tile]);
}

inline void emulated_store(int tile, void* to, int64_t stride) {
  for (int r = 0; r < emulated_shapes.rows[tile]; ++r)
    memcpy(static_cast<char*>(to) + r * stride, emulated_tiles[tile] + 16 * r,
           emulated_shapes.row_bytes[tile]);
}

inline void emulated_dot(int sums, int a, int b) {
  for (int r = 0; r < emulated_shapes.rows[sums]; ++r)
    for (int k = 0; k < emulated_shapes.rows[b]; ++k) {
      uint32_t left;
      memcpy(&left, &emulated_tiles[a][16 * r + k], 4);
      for (int c = 0; c < emulated_shapes.row_bytes[sums] / 4; ++c) {
        uint32_t right;
        memcpy(&right, &emulated_tiles[b][16 * k + c], 4);
        for (int which = 0; which < 2; ++which)
          emulated_tiles[sums][16 * r + c] +=
              emulated_half(left, which) * emulated_half(right, which);
      }
    }
}

}  // namespace

#define TILE_SHAPES(shapes) (emulated_shapes = shapes)
#define TILE_ZERO(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define TILE_DOT(sums, a, b) emulated_dot(sums, a, b)
#define TILE_RELEASE() ((void)0)

inline bool may_use_tiles() { return true; }

#else

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_SHAPES(shapes) _tile_loadconfig(&shapes)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT(sums, a, b) _tile_dpbf16ps(sums, a, b)
#define TILE_RELEASE() _tile_release()

// Whether the processor has tiles, and the operating system lets this process use them.
inline bool may_use_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kTile = 1u << 24, kBfloat16 = 1u << 22;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kBfloat16)) != (kTile | kBfloat16))
    return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl; of the saved state
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif
