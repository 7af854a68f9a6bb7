// The layout of a tile of keys, values or query rows in shared memory.
//
// A tile is stored row by row, and the 16-byte pieces of a row are permuted.  So reading one column of eight rows, or
// one whole row, uses every bank once.  Rows of HEAD bytes (e4m3.h) have the layout of a Tile<HEAD / 2>.
#pragma once
#include <element.h>
#include <ptx.h>

template <int HEAD>
struct Tile {
  static_assert(HEAD % 16 == 0, "a row must consist of whole groups of pieces");
  static constexpr int PIECES = HEAD / 8;                                        // of eight elements
  static constexpr int GROUP = HEAD % 64 == 0 ? 8 : (HEAD % 32 == 0 ? 4 : 2);  // pieces permuted among themselves
  static constexpr int EVERY = 8 / GROUP;                                        // rows with the same permutation
  static constexpr uint32 ROW_BYTES = HEAD * 2;

  // Returns the address of a row's first piece.  A tile must begin at a multiple of 128 bytes.
  static __device__ __forceinline__ uint32 row(uint32 tile, int row) {
    return (tile + row * ROW_BYTES) ^ (uint32(row) / EVERY % GROUP << 4);
  }

  // Returns the address of piece `piece` of a row.  `row` may also be the address of piece p of the row, if p < GROUP
  // and p has no bit in common with `piece`.  Then the result is the address of piece p + `piece`.
  static __device__ __forceinline__ uint32 piece(uint32 row, int piece) {
    return (row ^ (piece % GROUP << 4)) + piece / GROUP * (GROUP * 16);
  }
};

// A lane's rows and elements in the fragments of ldmatrix and mma.  For ldmatrix, lane l gives the address of row l % 8
// of matrix l / 8.  The functions below say which row and piece of the tile this is.
struct Lane {
  int lane, row, pair;  // lane l holds row l / 4, from element 2 (l % 4) on

  __device__ __forceinline__ explicit Lane(int thread)
      : lane(thread % 32), row((thread % 32) / 4), pair((thread % 32) % 4 * 2) {}

  // Left operand: rows 0-7 and 8-15 of one piece, then the same rows of the next piece.
  __device__ __forceinline__ int left_row() const { return lane % 16; }
  __device__ __forceinline__ int left_piece() const { return lane / 16; }
  // Right operand whose columns are rows in memory (keys): two pieces of eight rows, then two pieces of the next eight.
  __device__ __forceinline__ int right_row() const { return lane / 16 * 8 + lane % 8; }
  __device__ __forceinline__ int right_piece() const { return lane / 8 % 2; }
};
