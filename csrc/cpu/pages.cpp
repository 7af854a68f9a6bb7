// The C interface for writing rows of keys and values to their slots, and for copying pages between arenas.
#include <cstring>

#include "attention.h"
#include "rows.h"
#include "threads.h"

using namespace pensieve;

#pragma GCC visibility push(default)
extern "C" {

// Strides are in bytes, and row_bytes is the size of a row in a page. A slot number is page * slots + the slot in the page.
// `only` (the instruction set to use) and `type` (of the inputs) matter only if rows are stored as codes (codes.h).
// Returns 0, 1 (unsupported rows) or 2 (outside the arena, nothing written).
int32_t pensieve_write_kv(const char* only, int32_t type, int32_t stored, const char* key,
                          int64_t key_token_stride, int64_t key_head_stride, const char* value,
                          int64_t value_token_stride, int64_t value_head_stride,
                          const int64_t* slot_mapping, int64_t num_tokens, int32_t num_kv_heads,
                          int32_t slots, int64_t row_bytes, char* key_pages, char* value_pages,
                          int64_t page_stride, int64_t kv_head_stride, int64_t num_pages,
                          int32_t num_threads) {
  for (int64_t t = 0; t < num_tokens; ++t)
    if (slot_mapping[t] < 0 || slot_mapping[t] >= num_pages * slots) return 2;
  auto each_head = [&](int64_t t, auto write) {
    const int64_t to = slot_mapping[t] / slots * page_stride + slot_mapping[t] % slots * row_bytes;
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      write(key_pages + to + head * kv_head_stride, key + t * key_token_stride + head * key_head_stride);
      write(value_pages + to + head * kv_head_stride,
            value + t * value_token_stride + head * value_head_stride);
    }
  };
  if (Stored(stored) == Stored::kElements) {
    for (int64_t t = 0; t < num_tokens; ++t)
      each_head(t, [&](char* to, const char* from) { std::memcpy(to, from, row_bytes); });
    return 0;
  }
  const int32_t head_size = int32_t(row_bytes) - kScaleBytes;
  const Kernel* kernel = kernel_for(head_size, only);
  if (!kernel) return 1;
  const WriteCodes write_codes = kernel->codes(Type(type)).write;
  each_row(num_threads < 1 ? 1 : num_threads, int(num_tokens), [&](int t) {
    each_head(t, [&](char* to, const char* from) { write_codes(from, head_size, to); });
  });
  return 0;
}

// A page has `num_tiles` tiles (2 * KV heads) of `slots` rows. Returns 0, or 2 (outside an arena, nothing copied).
int32_t pensieve_copy_pages(const char* source, char* target, const int64_t* source_pages,
                            const int64_t* target_pages, const int64_t* num_slots, int64_t num_copies,
                            int32_t num_tiles, int32_t slots, int64_t row_bytes,
                            int64_t num_source_pages, int64_t num_target_pages, int32_t num_threads) {
  for (int64_t i = 0; i < num_copies; ++i)
    if (source_pages[i] < 0 || source_pages[i] >= num_source_pages || target_pages[i] < 0 ||
        target_pages[i] >= num_target_pages || num_slots[i] < 0 || num_slots[i] > slots)
      return 2;
  const int64_t tile_bytes = slots * row_bytes, page_bytes = num_tiles * tile_bytes;
  each_piece(num_threads < 1 ? 1 : num_threads, int(num_copies), [&](int i, int) {
    const char* from = source + source_pages[i] * page_bytes;
    char* to = target + target_pages[i] * page_bytes;
    if (num_slots[i] == slots) {
      std::memcpy(to, from, page_bytes);
      return;
    }
    for (int32_t tile = 0; tile < num_tiles; ++tile)
      std::memcpy(to + tile * tile_bytes, from + tile * tile_bytes, num_slots[i] * row_bytes);
  });
  return 0;
}
}
#pragma GCC visibility pop
