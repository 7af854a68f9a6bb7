// The work of an iteration's multi_token_attention, cut into items for blocks of threads.
//
// pensieve/kernels/attention/plan.py makes it once per iteration; the kernels of every layer read it.
//
// The rows of a slice are its query tokens times the query heads of one group: row r is token
// r / group, head r % group of the group, so that one pass over a page serves the whole group.  A tile
// is a run of rows of one slice; a tile whose context is long is cut into parts at page boundaries.
// Every item is done once for each KV head.
//
// Items are sorted longest first.  Items without rows fill the list up to a fixed length (CUDA graphs).
#pragma once

struct WorkItem {
  int slice;
  int row_begin;  // first of the slice's rows
  int num_rows;   // 0: nothing to do
  int key_begin;  // a multiple of the page size
  int key_end;    // positions [key_begin, key_end), as far as the last row sees
  int part_row;   // where its rows lie among the partial results; -1: straight to `out`
};

// The parts of one tile: `num_parts` runs of `num_rows` rows, one behind another.
struct MergeItem {
  int slice;
  int row_begin;
  int num_rows;
  int first_part_row;
  int num_parts;
};
