// Attention of an iteration's slices over their turns' whole contexts, in scattered pages: how it is cut into work,
// and its C interface.
//
// An item is the rows of a run of one slice that share a KV head, over the
// pages of their context. An item is cut into parts after every kPagesMax pages; the thread that finishes
// an item's last part merges all of them, in order. Threads take parts from one counter, so few long
// contexts and many short ones both keep all threads busy. The same pages of all items of a slice and KV head
// come one after another: 64 pages are 512 KiB (bfloat16, head size 64), which stay in the second-level cache,
// so a long prompt reads the history before it from memory once, and not for each 64 rows. The cuts depend only
// on positions in the context: a row's result is the same in any batch, in a long slice or alone, and with any
// number of threads.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <vector>

#include "attention.h"
#include "threads.h"

namespace pensieve {

namespace {

struct Item {
  int slice, kv_head, first_token, num_tokens;
  int num_pages;
  int num_parts;
  int64_t kept;  // offset, in floats, of this item's partials, if it has several
};

struct Memory {  // of one thread
  alignas(64) float weighted[kRowsMax * kHeadMax];
  float largest[kRowsMax], sum[kRowsMax];
  alignas(64) char scratch[kScratchBytes];
};

struct Cut {
  int item, part, first_page, end_page;
};

struct Call {
  Type type;
  Stored stored;
  const void* query;
  int64_t query_token_stride, query_head_stride;
  const void *keys, *values;
  int64_t page_stride, kv_head_stride;
  const int32_t* page_table;
  int64_t pages_max;
  const int32_t *slice_offsets, *slice_turns, *slice_starts;
  int32_t num_slices, num_heads, num_kv_heads, head_size;
  float scaling;
  void* out;
  int64_t out_token_stride, out_head_stride;
  int32_t num_threads;
};

int64_t element_bytes(Type type) { return type == Type::kFloat ? 4 : 2; }

const void* at(const void* base, int64_t elements, Type type) {
  return static_cast<const char*>(base) + elements * element_bytes(type);
}

// Strides of pages are in what they store.
const void* in_pages(const Call& call, const void* base, int64_t distance) {
  if (call.stored == Stored::kCodes) return static_cast<const char*>(base) + distance;
  return at(base, distance, call.type);
}

Part part_of(const Call& call, const Item& item, int first_page, int end_page) {
  const int group = call.num_heads / call.num_kv_heads;
  const int start = call.slice_starts[item.slice];
  const int row = call.slice_offsets[item.slice] + item.first_token;
  Part part{};
  part.query = at(call.query,
                  row * call.query_token_stride + item.kv_head * group * call.query_head_stride,
                  call.type);
  part.token_stride = call.query_token_stride;
  part.head_stride = call.query_head_stride;
  part.keys = in_pages(call, call.keys, item.kv_head * call.kv_head_stride);
  part.values = in_pages(call, call.values, item.kv_head * call.kv_head_stride);
  part.page_stride = call.page_stride;
  part.pages = call.page_table + call.slice_turns[item.slice] * call.pages_max;
  part.first_page = first_page;
  part.end_page = end_page;
  part.position = start + item.first_token;
  part.num_tokens = item.num_tokens;
  part.group = group;
  part.head_size = call.head_size;
  part.scaling = call.scaling;
  return part;
}

void write_out(const Call& call, const Kernel& kernel, const Item& item, const Partial& partial) {
  const int group = call.num_heads / call.num_kv_heads;
  const int64_t row = call.slice_offsets[item.slice] + item.first_token;
  const int64_t at = row * call.out_token_stride + item.kv_head * group * call.out_head_stride;
  const WriteOut write = kernel.write(call.type);
  write(partial, item.num_tokens, group, call.head_size,
        static_cast<char*>(call.out) + at * element_bytes(call.type), call.out_token_stride,
        call.out_head_stride);
}

// Floats of one partial of an item, rounded up to whole cache lines.
int64_t partial_floats(int num_rows, int head_size) {
  return (int64_t(num_rows) * (head_size + 2) + 15) / 16 * 16;
}

Partial partial_at(float* memory, int num_rows, int head_size) {
  float* const behind = memory + int64_t(num_rows) * head_size;
  return {behind, behind + num_rows, memory};
}

// Merges an item's partials into the first of them.
Partial merge(const Item& item, float* memory, int num_rows, int head_size) {
  const int64_t stride = partial_floats(num_rows, head_size);
  const Partial all = partial_at(memory, num_rows, head_size);
  for (int row = 0; row < num_rows; ++row) {
    float largest = all.largest[row];
    for (int p = 1; p < item.num_parts; ++p) {
      const float other = partial_at(memory + p * stride, num_rows, head_size).largest[row];
      if (!(other <= largest)) largest = other;
    }
    float* weighted = all.weighted + int64_t(row) * head_size;
    float sum = 0.0f;
    for (int p = 0; p < item.num_parts; ++p) {
      const Partial part = partial_at(memory + p * stride, num_rows, head_size);
      const float before = part.largest[row];
      const float factor = before == -INFINITY ? 0.0f : std::exp2(before - largest);
      sum += part.sum[row] * factor;
      const float* more = part.weighted + int64_t(row) * head_size;
      for (int d = 0; d < head_size; ++d)
        weighted[d] = (p ? weighted[d] : 0.0f) + more[d] * factor;
    }
    all.sum[row] = sum;
  }
  return all;
}

// Whether every page that a slice reads is inside of the arena.
bool within(const Call& call, int64_t num_pages) {
  for (int slice = 0; slice < call.num_slices; ++slice) {
    const int length = call.slice_offsets[slice + 1] - call.slice_offsets[slice];
    const int count = length ? (call.slice_starts[slice] + length + kSlots - 1) / kSlots : 0;
    const int32_t* pages = call.page_table + call.slice_turns[slice] * call.pages_max;
    if (count > call.pages_max) return false;
    for (int i = 0; i < count; ++i)
      if (pages[i] < 0 || pages[i] >= num_pages) return false;
  }
  return true;
}

// Lists the items and their parts; returns how many floats the partials of cut items take.
int64_t cut(const Call& call, std::vector<Item>& items, std::vector<Cut>& cuts) {
  const int group = call.num_heads / call.num_kv_heads;
  const int tokens_max = kRowsMax / group;
  int64_t kept = 0;
  for (int slice = 0; slice < call.num_slices; ++slice) {
    const int length = call.slice_offsets[slice + 1] - call.slice_offsets[slice];
    if (length == 0) continue;
    for (int head = 0; head < call.num_kv_heads; ++head) {
      const int first_item = int(items.size());
      for (int first = 0; first < length; first += tokens_max) {
        const int count = length - first < tokens_max ? length - first : tokens_max;
        const int pages = (call.slice_starts[slice] + first + count + kSlots - 1) / kSlots;
        const int parts = (pages + kPagesMax - 1) / kPagesMax;
        items.push_back({slice, head, first, count, pages, parts, kept});
        if (parts > 1) kept += parts * partial_floats(count * group, call.head_size);
      }
      const int end_item = int(items.size());  // of these the last one has the most parts
      for (int p = 0; p < items.back().num_parts; ++p)
        for (int item = first_item; item < end_item; ++item) {
          const int pages = items[item].num_pages, first = p * kPagesMax;
          if (p >= items[item].num_parts) continue;
          cuts.push_back({item, p, first, pages - first < kPagesMax ? pages : first + kPagesMax});
        }
    }
  }
  return kept;
}

// False if there is no memory for partials.
bool attend_all(const Call& call, const Kernel& kernel) {
  const Attend attend = attend_of(kernel, call.type, call.stored);
  std::vector<Item> items;
  std::vector<Cut> cuts;
  const int64_t num_kept = cut(call, items, cuts);
  std::vector<std::atomic<int>> remaining(items.size());
  for (size_t i = 0; i < items.size(); ++i) remaining[i] = items[i].num_parts;
  float* const kept =
      num_kept ? static_cast<float*>(std::aligned_alloc(64, num_kept * sizeof(float))) : nullptr;
  if (num_kept && !kept) return false;
  const int num_cuts = int(cuts.size());
  each_piece(call.num_threads, num_cuts, [&](int taken, int following) {
    static thread_local Memory own;
    const Cut& each = cuts[taken];
    const Item& item = items[each.item];
    Part part = part_of(call, item, each.first_page, each.end_page);
    if (following < num_cuts) {
      const Cut& after = cuts[following];
      const Part then = part_of(call, items[after.item], after.first_page, after.end_page);
      const int64_t page = int64_t(then.pages[then.first_page]) * then.page_stride;
      part.keys_after = in_pages(call, then.keys, page);
      part.values_after = in_pages(call, then.values, page);
    }
    if (item.num_parts == 1) {
      Partial partial{own.largest, own.sum, own.weighted};
      attend(part, partial, own.scratch);
      write_out(call, kernel, item, partial);
      return;
    }
    const int num_rows = item.num_tokens * part.group;
    float* const first = kept + item.kept;
    Partial partial =
        partial_at(first + each.part * partial_floats(num_rows, call.head_size),
                   num_rows, call.head_size);
    attend(part, partial, own.scratch);
    if (remaining[each.item].fetch_sub(1) == 1)
      write_out(call, kernel, item, merge(item, first, num_rows, call.head_size));
  });
  std::free(kept);
  return true;
}

}  // namespace

}  // namespace pensieve

using namespace pensieve;

#pragma GCC visibility push(default)
extern "C" {

// Strides of pages are in what they store (attention.h): in elements, or in bytes where rows are codes.
// Returns 0; 1: these shapes are not for it; 2: an index is outside of the arena; 3: out of memory.
int32_t pensieve_multi_token_attention(
    const char* only, int32_t type, int32_t stored, const void* query, int64_t query_token_stride,
    int64_t query_head_stride, const void* keys, const void* values, int64_t page_stride,
    int64_t kv_head_stride, int64_t num_pages, const int32_t* page_table, int64_t pages_max,
    const int32_t* slice_offsets, const int32_t* slice_turns, const int32_t* slice_starts,
    int32_t num_slices, int32_t num_heads, int32_t num_kv_heads, int32_t slots, int32_t head_size,
    float scaling, void* out, int64_t out_token_stride, int64_t out_head_stride,
    int32_t num_threads) {
  const Kernel* kernel = kernel_for(head_size, only);
  if (!kernel || slots != kSlots || head_size > kHeadMax || num_heads / num_kv_heads > kRowsMax)
    return 1;
  const Call call{Type(type), Stored(stored), query, query_token_stride, query_head_stride,
                  keys, values, page_stride, kv_head_stride,
                  page_table, pages_max, slice_offsets, slice_turns,
                  slice_starts, num_slices, num_heads, num_kv_heads,
                  head_size, scaling, out, out_token_stride,
                  out_head_stride, num_threads < 1 ? 1 : num_threads};
  if (!within(call, num_pages)) return 2;
  try {
    return attend_all(call, *kernel) ? 0 : 3;
  } catch (const std::bad_alloc&) {
    return 3;
  }
}
}
#pragma GCC visibility pop
