// The work of an iteration's multi_token_attention, cut into items for blocks of threads.
//
// pensieve/kernels/attention/plan.py makes the work once per iteration; the kernels of every layer read it.
//
// The query heads of one KV head are a *group*.  The rows of a slice are its query tokens times the heads of a group.
// Row r is token r / group and head r % group.  So one pass over a page serves the whole group.  A tile is a run of rows
// of one slice.  A tile with a long context is cut into parts at page boundaries.  Every item is done once for each KV
// head.
//
// The contexts of several slices may begin with the same pages.  Then some items belong to a *pack*: rows of several
// slices that come after the shared pages and see all of them.  A table gives each row's place in the batch, as token ·
// group + head.  Each slice has its own items for the pages after the shared pages.  A slice's merge also reads the
// slice's rows in the results of the pack.
//
// Items are sorted longest first.  Items without rows pad the list to a fixed length (CUDA graphs).
#pragma once

struct WorkItem {
  int slice;      // in a pack: one of its slices, whose page table names the pages
  int row_begin;  // the item's first row in the slice
  int num_rows;   // 0: nothing to do
  int key_begin;  // a multiple of the page size
  int key_end;    // positions [key_begin, key_end), up to the last position that a row sees
  int part_row;   // the item's first row in the partial results; -1: rows go to `out` (never for a pack)
  int pack_row;   // in a pack: the item's first row in the table; -1: not a pack
};

// The parts of one tile: `num_parts` runs of `num_rows` rows, one after another, and `num_pack_parts` runs of the
// pack's results, `pack_stride` rows apart.
struct MergeItem {
  int slice;
  int row_begin;
  int num_rows;
  int first_part_row;
  int num_parts;
  int first_pack_row;
  int pack_stride;
  int num_pack_parts;  // 0: the tile is in no pack
};
