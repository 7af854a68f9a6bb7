// The instructions of AMX, the matrix unit of some Intel processors.
//
// AMX has eight tiles of up to 16 rows of 64 bytes. An instruction multiplies a tile of rows (16 x 32 bfloat16, or
// 16 x 64 bytes) by a tile of weights and adds the product to a tile of 16 x 16 sums. A tile of weights has 16 rows and
// 16 columns. Each of its elements holds the weights of two bfloat16 inputs, or of four bytes.
//
// With EMULATED_TILES the same operations are plain C++, so that tests can run without AMX. Only the rounding differs.
// An invalid operation (a tile without a shape, or shapes that do not match) ends the process. TILE_TOUCHED and
// TILE_COUNTS_ONLY are for tests that count loads.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if EMULATED_TILES

#ifndef TILE_TOUCHED
#define TILE_TOUCHED(from, num_bytes) ((void)0)
#endif

namespace {

thread_local TileShapes emulated_shapes;
thread_local float emulated_tiles[8][16 * 16];

inline void tile_must(bool holds) {
  if (!holds) abort();
}

inline float emulated_half(uint32_t pair, int which) {
  uint32_t bits = which ? pair & 0xffff0000u : pair << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline void emulated_shape(const TileShapes& shapes) {
  for (int tile = 0; tile < 8; ++tile) {
    tile_must(shapes.rows[tile] <= 16 && shapes.row_bytes[tile] <= 64);
    tile_must(!shapes.rows[tile] == !shapes.row_bytes[tile]);
  }
  emulated_shapes = shapes;
  memset(emulated_tiles, 0, sizeof emulated_tiles);
}

inline void emulated_zero(int tile) {
  tile_must(emulated_shapes.rows[tile] > 0);
  memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
}

inline void emulated_load(int tile, const void* from, int64_t stride) {
  emulated_zero(tile);
  for (int r = 0; r < emulated_shapes.rows[tile]; ++r) {
    const char* row = static_cast<const char*>(from) + r * stride;
    TILE_TOUCHED(row, emulated_shapes.row_bytes[tile]);
    memcpy(emulated_tiles[tile] + 16 * r, row, emulated_shapes.row_bytes[tile]);
  }
}

inline void emulated_store(int tile, void* to, int64_t stride) {
  tile_must(emulated_shapes.rows[tile] > 0);
  for (int r = 0; r < emulated_shapes.rows[tile]; ++r) {
    char* row = static_cast<char*>(to) + r * stride;
    TILE_TOUCHED(row, emulated_shapes.row_bytes[tile]);
    memcpy(row, emulated_tiles[tile] + 16 * r, emulated_shapes.row_bytes[tile]);
  }
}

// `Add` (sum, word of a row, word of weights) adds one step of a product to an element of the sums.
template <typename Add>
inline void emulated_product(int sums, int a, int b, Add add) {
  const TileShapes& shapes = emulated_shapes;
  tile_must(sums != a && sums != b && a != b && shapes.rows[sums] > 0);
  tile_must(shapes.rows[sums] == shapes.rows[a] && shapes.row_bytes[a] == 4 * shapes.rows[b] &&
            shapes.row_bytes[sums] == shapes.row_bytes[b]);
#if !TILE_COUNTS_ONLY
  for (int r = 0; r < shapes.rows[sums]; ++r)
    for (int k = 0; k < shapes.rows[b]; ++k) {
      uint32_t left;
      memcpy(&left, &emulated_tiles[a][16 * r + k], 4);
      for (int c = 0; c < shapes.row_bytes[sums] / 4; ++c) {
        uint32_t right;
        memcpy(&right, &emulated_tiles[b][16 * k + c], 4);
        add(emulated_tiles[sums][16 * r + c], left, right);
      }
    }
#else
  (void)add;
#endif
}

inline void emulated_dot(int sums, int a, int b) {
  emulated_product(sums, a, b, [](float& sum, uint32_t left, uint32_t right) {
    for (int which = 0; which < 2; ++which)
      sum += emulated_half(left, which) * emulated_half(right, which);
  });
}

// Multiplies unsigned bytes of rows by signed bytes of weights. The sums are integers, and wrap.
inline void emulated_dot_bytes(int sums, int a, int b) {
  emulated_product(sums, a, b, [](float& sum, uint32_t left, uint32_t right) {
    uint32_t whole;
    memcpy(&whole, &sum, 4);
    for (int shift = 0; shift < 32; shift += 8)
      whole += uint32_t(int32_t(left >> shift & 255) * int8_t(right >> shift & 255));
    memcpy(&sum, &whole, 4);
  });
}

}  // namespace

#define TILE_SHAPES(shapes) emulated_shape(shapes)
#define TILE_ZERO(tile) emulated_zero(tile)
#define TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define TILE_DOT(sums, a, b) emulated_dot(sums, a, b)
#define TILE_DOT_BYTES(sums, a, b) emulated_dot_bytes(sums, a, b)
#define TILE_RELEASE() (emulated_shapes = TileShapes())

inline bool may_use_tiles() { return true; }

#else

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// These macros replace the compiler's intrinsics. GCC 12's intrinsics do not declare which memory a tile is loaded from.
// So the compiler may move a store to that memory behind the load.
#define TILE_SHAPES(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::)
#define TILE_LOAD(tile, from, stride)                       \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"( \
                       static_cast<const void*>(from)),     \
                   "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, to, stride)                             \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"( \
                       static_cast<void*>(to)),                  \
                   "r"(int64_t(stride)) : "memory")
#define TILE_DOT(sums, a, b) \
  __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums::)
#define TILE_DOT_BYTES(sums, a, b) \
  __asm__ volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums::)
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")

// Whether the processor has tiles, and the operating system lets this process use them.
inline bool may_use_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kNeeded = 1u << 24 | 1u << 22 | 1u << 25;  // tiles, bfloat16, bytes
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM of arch_prctl
  constexpr long kTileData = 18;               // the tiles' number in the state that the kernel saves
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif
