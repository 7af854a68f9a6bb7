// Plan and run the attention of an iteration's slices over their turns' whole contexts, in scattered pages.
//
// An item is one KV head's attention for consecutive tokens of one slice, over all pages of their context. An item is
// cut into parts after every kPagesMax pages. The thread that finishes an item's last part merges all parts, in order.
// Threads take parts from one counter, so few long contexts and many short contexts both keep all threads busy.
//
// Parts that read the same pages (of one slice and KV head) are neighbours in the order of work. 64 pages are 512 KiB
// (bfloat16, head size 64), which stay in the second-level cache. So a long prompt reads its history from memory once,
// and not once per 64 rows. The cuts depend only on positions in the context. So a row's result does not depend on the
// batch, on the length of its slice, or on the number of threads.
//
// A *slice group* is several slices whose contexts begin with the same pages, and which start after these pages. A
// *pack* is the rows of such slices that process the shared pages together, so these pages are read once. If the shared
// pages end within a part, each slice's own item continues there from the pack's partial results. So a row's steps,
// and its result, are the same as without sharing. Threads claim the work of packs before any work that waits for it.
// The work of packs waits for nothing, so no thread waits forever.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "attention.h"
#include "threads.h"

namespace pensieve {

namespace {

struct Item {
  int slice, kv_head, first_token, num_tokens;
  int num_pages;
  int num_parts;
  int pack = -1;  // the pack that the item is a member of; -1: none
  int64_t kept = -1;  // offset, in floats, of the item's partial results, if it has several or is in a pack
};

// Rows of several slices that process `num_pages` shared pages together.
struct Pack {
  int first_member, end_member;
  int first_row, num_tokens;
  int num_pages;
};

struct Member {
  int first_item;  // the member's item for KV head 0; the items of the other heads follow
  int first_token, num_tokens;  // the member's tokens in the pack
};

constexpr int kSeesAll = 1 << 30;  // position of a pack's rows: they come after all pages of the pack

struct Memory {  // private to a thread
  alignas(64) float weighted[kRowsMax * kHeadMax];
  float largest[kRowsMax], sum[kRowsMax];
  alignas(64) char scratch[kScratchBytes];
};

// A part of an item or of a pack: one piece of the threads' work.
struct WorkPart {
  int item;  // -1: the part belongs to a pack
  int part, first_page, end_page;
  int pack = -1, kv_head = 0;  // the pack of this part, or the pack that the item continues from
};

struct Plan {
  std::vector<Item> items;
  std::vector<WorkPart> work_parts;
  std::vector<Pack> packs;
  std::vector<Member> members;
  std::vector<int32_t> rows;  // the batch row of each token of the packs
  int64_t num_kept = 0;       // floats
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
  const int32_t *slice_groups, *group_pages;  // each slice's slice group or -1; the number of pages that a group shares
  int32_t num_groups;
  int32_t num_slices, num_heads, num_kv_heads, head_size;
  AttentionKind kind;
  void* out;
  int64_t out_token_stride, out_head_stride;
  int32_t num_threads;
};

int64_t element_bytes(Type type) { return type == Type::kFloat ? 4 : 2; }

const void* at(const void* base, int64_t elements, Type type) {
  return static_cast<const char*>(base) + elements * element_bytes(type);
}

// Returns an address in the pages. Page strides count stored elements, or bytes if rows are quantised (kCodes).
const void* in_pages(const Call& call, const void* base, int64_t distance) {
  if (call.stored == Stored::kCodes) return static_cast<const char*>(base) + distance;
  return at(base, distance, call.type);
}

Part part_of(const Call& call, const Item& item, int first_page, int end_page) {
  const int group = call.num_heads / call.num_kv_heads;
  const int start = call.slice_starts[item.slice];
  const int row = call.slice_offsets[item.slice] + item.first_token;
  Part part{};
  part.rows = nullptr;
  part.continues = false;
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
  part.kind = call.kind;
  return part;
}

Part part_of(const Call& call, const Plan& plan, const WorkPart& work) {
  if (work.item >= 0) {
    Part part = part_of(call, plan.items[work.item], work.first_page, work.end_page);
    part.continues = work.pack >= 0;
    return part;
  }
  const Pack& pack = plan.packs[work.pack];
  const Item& first = plan.items[plan.members[pack.first_member].first_item + work.kv_head];
  Part part = part_of(call, first, work.first_page, work.end_page);
  const int group = call.num_heads / call.num_kv_heads;
  part.query = at(call.query, work.kv_head * group * call.query_head_stride, call.type);
  part.rows = plan.rows.data() + pack.first_row;
  part.num_tokens = pack.num_tokens;
  part.position = kSeesAll;
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

// Returns the size of one partial result of an item, in floats, rounded up to whole cache lines.
int64_t partial_floats(int num_rows, int head_size) {
  return (int64_t(num_rows) * (head_size + 2) + 15) / 16 * 16;
}

Partial partial_at(float* memory, int num_rows, int head_size) {
  float* const behind = memory + int64_t(num_rows) * head_size;
  return {behind, behind + num_rows, memory};
}

// Merges an item's partial results into the first result.
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

// Whether every page that a slice reads is inside the arena.
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

// Returns how many of a slice group's pages a pack processes: whole parts, and the first pages of the next part.
//
// AMX processes the first page of a part alone, and then blocks of kBlockPages pages (amx_attend.h). So a pack takes
// one page plus a multiple of kBlockPages of the next part: the slice's own item then continues at the beginning of a
// block. If this is only one page, the pack takes nothing of the next part.
int pages_of_pack(int num_pages) {
  const int whole = num_pages / kPagesMax * kPagesMax, rest = num_pages - whole;
  return whole + (rest <= kBlockPages ? 0 : 1 + (rest - 1) / kBlockPages * kBlockPages);
}

// Puts the slices of each slice group into packs of as many rows as an item may have.
void pack(const Call& call, Plan& plan, std::vector<int>& pack_of) {
  const int tokens_max = kRowsMax / (call.num_heads / call.num_kv_heads);
  std::vector<std::vector<int>> slices_of(call.num_groups);
  for (int slice = 0; slice < call.num_slices; ++slice) {
    const int length = call.slice_offsets[slice + 1] - call.slice_offsets[slice];
    if (call.slice_groups[slice] >= 0 && length && 2 * length <= tokens_max)
      slices_of[call.slice_groups[slice]].push_back(slice);
  }
  for (int group = 0; group < call.num_groups; ++group) {
    const int num_pages = pages_of_pack(call.group_pages[group]);
    const std::vector<int>& slices = slices_of[group];
    if (!num_pages) continue;
    for (size_t first = 0, end; first < slices.size(); first = end) {
      int num_tokens = 0;
      for (end = first; end < slices.size(); ++end) {
        const int length = call.slice_offsets[slices[end] + 1] - call.slice_offsets[slices[end]];
        if (num_tokens + length > tokens_max) break;
        num_tokens += length;
      }
      if (end - first < 2) continue;
      Pack made{int(plan.members.size()), 0, int(plan.rows.size()), num_tokens, num_pages};
      int token = 0;
      for (size_t i = first; i < end; ++i) {
        const int offset = call.slice_offsets[slices[i]];
        const int length = call.slice_offsets[slices[i] + 1] - offset;
        plan.members.push_back({-1, token, length});
        pack_of[slices[i]] = int(plan.packs.size());
        for (int t = 0; t < length; ++t) plan.rows.push_back(offset + t);
        token += length;
      }
      made.end_member = int(plan.members.size());
      plan.packs.push_back(made);
    }
  }
}

Plan planned(const Call& call) {
  Plan plan;
  const int group = call.num_heads / call.num_kv_heads;
  const int tokens_max = kRowsMax / group;
  std::vector<int> pack_of(call.num_slices, -1), num_known;
  if (call.num_groups) pack(call, plan, pack_of);
  num_known.resize(plan.packs.size());
  for (size_t i = 0; i < plan.packs.size(); ++i)
    for (int head = 0; head < call.num_kv_heads; ++head)
      for (int first = 0; first < plan.packs[i].num_pages; first += kPagesMax) {
        const int end = std::min(plan.packs[i].num_pages, first + kPagesMax);
        plan.work_parts.push_back({-1, first / kPagesMax, first, end, int(i), head});
      }
  for (int slice = 0; slice < call.num_slices; ++slice) {
    const int length = call.slice_offsets[slice + 1] - call.slice_offsets[slice];
    if (length == 0) continue;
    const int in_pack = pack_of[slice];
    const int shared = in_pack < 0 ? 0 : plan.packs[in_pack].num_pages;
    if (in_pack >= 0) {
      Member& member = plan.members[plan.packs[in_pack].first_member + num_known[in_pack]++];
      member.first_item = int(plan.items.size());
    }
    for (int head = 0; head < call.num_kv_heads; ++head) {
      const int first_item = int(plan.items.size());
      for (int first = 0; first < length; first += tokens_max) {
        const int count = std::min(length - first, tokens_max);
        const int pages = (call.slice_starts[slice] + first + count + kSlots - 1) / kSlots;
        const int parts = (pages + kPagesMax - 1) / kPagesMax;
        Item item{slice, head, first, count, pages, parts, in_pack};
        if (parts > 1 || in_pack >= 0) {
          item.kept = plan.num_kept;
          plan.num_kept += parts * partial_floats(count * group, call.head_size);
        }
        plan.items.push_back(item);
      }
      const int end_item = int(plan.items.size());  // the last of these items has the most parts
      for (int p = 0; p < plan.items.back().num_parts; ++p)
        for (int i = first_item; i < end_item; ++i) {
          const int end = std::min(plan.items[i].num_pages, (p + 1) * kPagesMax);
          const int first = std::max(p * kPagesMax, std::min(shared, end));
          if (p >= plan.items[i].num_parts || first == end) continue;
          plan.work_parts.push_back({i, p, first, end, first > p * kPagesMax ? in_pack : -1, head});
        }
    }
  }
  return plan;
}

// The work of one call: the plan, and data that the threads share.
class Work {
 public:
  Work(const Call& call, const Kernel& kernel)
      : call_(call), kernel_(kernel), attend_(attend_of(kernel, call.type, call.stored)), plan_(planned(call)), remaining_(plan_.items.size()), done_(plan_.packs.size() * call.num_kv_heads) {
    for (size_t i = 0; i < plan_.items.size(); ++i) remaining_[i] = plan_.items[i].num_parts;
    if (plan_.num_kept)
      kept_ = static_cast<float*>(std::aligned_alloc(64, plan_.num_kept * sizeof(float)));
  }
  ~Work() { std::free(kept_); }
  Work(const Work&) = delete;

  bool has_memory() const { return kept_ || !plan_.num_kept; }

  void run() {
    const int num_work_parts = int(plan_.work_parts.size());
    each_piece(call_.num_threads, num_work_parts, [&](int taken, int following) {
      const WorkPart& work = plan_.work_parts[taken];
      Part part = part_of(call_, plan_, work);
      if (following < num_work_parts) {
        const Part then = part_of(call_, plan_, plan_.work_parts[following]);
        const int64_t page = int64_t(then.pages[then.first_page]) * then.page_stride;
        part.keys_after = in_pages(call_, then.keys, page);
        part.values_after = in_pages(call_, then.values, page);
      }
      if (work.item < 0)
        attend_pack(work, part);
      else
        attend_item(work, part);
    });
  }

 private:
  static Memory& own() {
    static thread_local Memory memory;
    return memory;
  }

  float* kept_of(const Item& item) const { return kept_ + item.kept; }

  int num_rows(const Item& item) const {
    return item.num_tokens * (call_.num_heads / call_.num_kv_heads);
  }

  Partial kept_partial(const Item& item, int part) const {
    float* const at = kept_of(item) + part * partial_floats(num_rows(item), call_.head_size);
    return partial_at(at, num_rows(item), call_.head_size);
  }

  void attend_item(const WorkPart& work, const Part& part) {
    const Item& item = plan_.items[work.item];
    if (item.kept < 0) {
      Partial partial{own().largest, own().sum, own().weighted};
      attend_(part, partial, own().scratch);
      write_out(call_, kernel_, item, partial);
      return;
    }
    if (part.continues) wait_for(done_[work.pack * call_.num_kv_heads + work.kv_head]);
    Partial partial = kept_partial(item, work.part);
    attend_(part, partial, own().scratch);
    finish_part(work.item);
  }

  void attend_pack(const WorkPart& work, const Part& part) {
    Partial partial{own().largest, own().sum, own().weighted};
    attend_(part, partial, own().scratch);
    const Pack& pack = plan_.packs[work.pack];
    const bool whole = work.end_page - work.first_page == kPagesMax;
    for (int i = pack.first_member; i < pack.end_member; ++i) {
      const Member& member = plan_.members[i];
      const int index = member.first_item + work.kv_head;
      const Item& item = plan_.items[index];
      const int rows = num_rows(item), first = member.first_token * part.group;
      const Partial to = kept_partial(item, work.part);
      std::copy_n(partial.largest + first, rows, to.largest);
      std::copy_n(partial.sum + first, rows, to.sum);
      std::copy_n(partial.weighted + int64_t(first) * call_.head_size, int64_t(rows) * call_.head_size, to.weighted);
      if (whole) finish_part(index);
    }
    if (!whole) done_[work.pack * call_.num_kv_heads + work.kv_head].store(1, std::memory_order_release);
  }

  void finish_part(int index) {
    const Item& item = plan_.items[index];
    if (remaining_[index].fetch_sub(1) > 1) return;
    write_out(call_, kernel_, item, merge(item, kept_of(item), num_rows(item), call_.head_size));
  }

  static void wait_for(const std::atomic<int>& done) {
    while (!done.load(std::memory_order_acquire)) std::this_thread::yield();
  }

  const Call& call_;
  const Kernel& kernel_;
  const Attend attend_;
  const Plan plan_;
  std::vector<std::atomic<int>> remaining_, done_;
  float* kept_ = nullptr;
};

// Returns false if there is no memory for partial results.
bool attend_all(const Call& call, const Kernel& kernel) {
  Work work(call, kernel);
  if (!work.has_memory()) return false;
  work.run();
  return true;
}

}  // namespace

}  // namespace pensieve

using namespace pensieve;

#pragma GCC visibility push(default)
extern "C" {

// `only` names the kernel to use, for tests; null: the best kernel of this machine.
// Page strides count elements, or bytes if rows are quantised (kCodes in attention.h).
// Returns 0; 1: unsupported shapes; 2: an index is outside the arena; 3: out of memory.
int32_t pensieve_multi_token_attention(
    const char* only, int32_t type, int32_t stored, const void* query, int64_t query_token_stride,
    int64_t query_head_stride, const void* keys, const void* values, int64_t page_stride,
    int64_t kv_head_stride, int64_t num_pages, const int32_t* page_table, int64_t pages_max,
    const int32_t* slice_offsets, const int32_t* slice_turns, const int32_t* slice_starts,
    const int32_t* slice_groups, const int32_t* group_pages, int32_t num_groups, int32_t num_slices, int32_t num_heads, int32_t num_kv_heads, int32_t slots, int32_t head_size,
    const AttentionKind* kind, void* out, int64_t out_token_stride, int64_t out_head_stride,
    int32_t num_threads) {
  const Kernel* kernel = kernel_for(head_size, only);
  if (!kernel || slots != kSlots || head_size > kHeadMax || num_heads / num_kv_heads > kRowsMax)
    return 1;
  const Call call{Type(type), Stored(stored), query, query_token_stride, query_head_stride,
                  keys, values, page_stride, kv_head_stride,
                  page_table, pages_max, slice_offsets, slice_turns,
                  slice_starts, slice_groups, group_pages, num_groups, num_slices, num_heads, num_kv_heads,
                  head_size, *kind, out, out_token_stride,
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
