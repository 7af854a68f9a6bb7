// The arguments of multi_token_attention, and the addresses of an item's rows (work.h).
#pragma once
#include <element.h>
#include <ptx.h>
#include <work.h>

template <class Element, class Stored = Element>
struct Arguments {
  const Element* query;
  const Stored* key_pages;
  const Stored* value_pages;
  const float* kv_scales;  // (2, kv_heads): keys', then values'; used only if keys and values are bytes (e4m3.h)
  const int* page_table;
  const int* slice_offsets;
  const int* slice_turns;
  const int* slice_starts;
  const WorkItem* items;
  const int* pack_rows;
  int kv_heads, group, pages_max;
  int64 page_stride, query_stride, out_stride;  // elements
  float scale;                                  // includes the factor log2(e)
  float* part_values;
  float* part_sums;
  Element* out;
};

// The addresses of an item's query rows and results.  Values that are seldom needed are read from memory each time,
// which saves registers for the products.  Only kernels with PACKS get items of packs.
template <class Element, int HEAD, class Stored = Element, bool PACKS = false>
struct Rows {
  const Arguments<Element, Stored>& arguments;
  const WorkItem& item;
  int head;

  // Returns how many positions the row sees.  The rows of a pack come after all positions of the item, so they see all
  // of them.
  __device__ __forceinline__ int limit(int row) const {
    if (row >= item.num_rows) return item.key_end;
    const int position = arguments.slice_starts[item.slice] + (item.row_begin + row) / arguments.group;
    return position + 1 < item.key_end ? position + 1 : item.key_end;
  }

  __device__ __forceinline__ int64 offset(int row, int64 stride) const {
    const int token = (item.row_begin + row) / arguments.group;
    const int member = (item.row_begin + row) % arguments.group;
    return (arguments.slice_offsets[item.slice] + token) * stride + int64(head * arguments.group + member) * HEAD;
  }

  // Returns where the row's query begins: `offset`, unless the item is a pack.
  __device__ __forceinline__ int64 query_offset(int row) const {
    if (!PACKS || item.pack_row < 0) return offset(row, arguments.query_stride);
    const int index = arguments.pack_rows[item.pack_row + row];
    const int token = index / arguments.group, member = index % arguments.group;
    return token * arguments.query_stride + int64(head * arguments.group + member) * HEAD;
  }

  // Returns the index of row `row` in the partial results, for this head.
  __device__ __forceinline__ int64 part(int row) const {
    return int64(item.part_row + row) * arguments.kv_heads + head;
  }

  // Writes two neighbouring elements of a finished row.
  __device__ __forceinline__ void write(int row, int column, float first, float second) const {
    if (item.part_row < 0) {
      uint32* target = reinterpret_cast<uint32*>(arguments.out + offset(row, arguments.out_stride) + column);
      *target = ptx::pack<Element>(first, second);
    } else {
      float* target = arguments.part_values + part(row) * HEAD + column;
      target[0] = first;
      target[1] = second;
    }
  }

  // Writes log2 of the row's sum, for the merge.
  __device__ __forceinline__ void write_sum(int row, float sum) const {
    if (item.part_row >= 0) arguments.part_sums[part(row)] = sum;
  }
};
