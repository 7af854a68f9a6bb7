// The interface that an instruction set implements for attention. A call computes one part of one item.
//
// An item is some query tokens of one slice, with the query heads of one KV head. A row is one token and one head. A
// part is an item with a range of its context's pages. multi_token_attention.cpp cuts the work and merges the results.
#pragma once

#include <cstdint>

namespace pensieve {

constexpr int kSlots = 32;     // slots in a page
constexpr int kRowsMax = 64;   // maximum number of rows in an item
constexpr int kPagesMax = 64;  // maximum number of pages in a part
constexpr int kHeadMax = 256;  // maximum head size
constexpr int kBlockPages = 4;  // maximum number of pages in a block; a part's first page is a block by itself

enum class Type : int32_t { kFloat = 0,
                            kBfloat16 = 1,
                            kFloat16 = 2 };

// How pages store one token's keys or values of one KV head: as elements of the query's type, or as *codes*. Codes are
// signed bytes from -127 to 127, followed by their scale, a float. A number is its code times the scale.
enum class Stored : int32_t { kElements = 0,
                              kCodes = 1 };
constexpr int kScaleBytes = 4;

// How a layer's queries weigh keys; kernels/attention/input.py has the fields, kernels/attention/cpu.py mirrors them.
struct AttentionKind {
  float scaling;  // factor of the scores
};

struct Part {
  const void* query;        // query of the item's first row; with `rows`, of the batch's first row
  const int32_t* rows;      // rows of the item's tokens in the batch; null: consecutive rows
  int64_t token_stride;     // elements between query tokens
  int64_t head_stride;      // elements between query heads
  const void* keys;         // arena of the layer, at this KV head
  const void* values;
  int64_t page_stride;      // between pages, in elements, or in bytes if rows are codes
  const int32_t* pages;     // the turn's page table
  int32_t first_page, end_page;
  bool continues;           // the partial result includes earlier pages; their number is 1 + a multiple of kBlockPages
  const void *keys_after, *values_after;  // tiles that this thread reads next, to prefetch; null: none
  int32_t position;         // position of the item's first token
  int32_t num_tokens;       // number of the item's tokens
  int32_t group;            // query heads of this KV head
  int32_t head_size;
  AttentionKind kind;
};

// A part's result for each row: the largest score (base 2), the sum of the weights 2^(score - largest), and the sum of
// the values times these weights.
struct Partial {
  float *largest, *sum;  // (rows)
  float* weighted;       // (rows, head size)
};

constexpr int kScratchBytes = 256 << 10;  // per thread, aligned to 64 bytes

using Attend = void (*)(const Part&, Partial&, void* scratch);

// Writes weighted / sum as elements. Each token has `group` heads.
using WriteOut = void (*)(const Partial&, int32_t num_tokens, int32_t group, int32_t head_size,
                          void* out, int64_t token_stride, int64_t head_stride);

// Rounds a row of head_size elements to codes and their scale. The largest absolute value determines the scale. The
// scale is NaN if a value is not finite. If the scale would be denormal, the scale and all codes are zero.
using WriteCodes = void (*)(const void* row, int32_t head_size, void* to);

// The functions for pages of codes. Their queries are elements.
struct Codes {
  Attend attend;
  WriteCodes write;
};

struct Dense;  // in layer.h

struct Kernel {
  const char* name;
  int head_multiple;  // head sizes must be a multiple of this
  Attend attend_float, attend_bfloat16;
  WriteOut write_float, write_bfloat16;
  const Dense &dense_float, &dense_bfloat16;
  Attend attend_float16;
  WriteOut write_float16;
  const Dense& dense_float16;
  Codes codes_float, codes_bfloat16, codes_float16;

  Attend attend(Type type, Stored stored) const {
    if (stored == Stored::kCodes) return codes(type).attend;
    if (type == Type::kFloat16) return attend_float16;
    return type == Type::kFloat ? attend_float : attend_bfloat16;
  }
  const Codes& codes(Type type) const {
    if (type == Type::kFloat16) return codes_float16;
    return type == Type::kFloat ? codes_float : codes_bfloat16;
  }
  WriteOut write(Type type) const {
    if (type == Type::kFloat16) return write_float16;
    return type == Type::kFloat ? write_float : write_bfloat16;
  }
  const Dense& dense(Type type) const {
    if (type == Type::kFloat16) return dense_float16;
    return type == Type::kFloat ? dense_float : dense_bfloat16;
  }
};

// Whether this process can use AMX. The first call requests AMX from the system, and compares its results with AVX-512's.
bool amx_works();
extern const Kernel kAmx, kAvx512Bf16, kAvx512Vnni, kAvx512, kAvx2, kNeonBf16, kNeon, kPlain;

// Returns the best kernel that runs here and takes this head size, or null. `only` names the kernel to use, for tests.
const Kernel* kernel_for(int head_size, const char* only);
Attend attend_of(const Kernel& kernel, Type type, Stored stored);

}  // namespace pensieve

#pragma GCC visibility push(default)
extern "C" {
// The functions of multi_token_attention.cpp and pages.cpp that layer.cpp calls.
int32_t pensieve_multi_token_attention(
    const char* only, int32_t type, int32_t stored, const void* query, int64_t query_token_stride,
    int64_t query_head_stride, const void* keys, const void* values, int64_t page_stride,
    int64_t kv_head_stride, int64_t num_pages, const int32_t* page_table, int64_t pages_max,
    const int32_t* slice_offsets, const int32_t* slice_turns, const int32_t* slice_starts,
    const int32_t* slice_groups, const int32_t* group_pages, int32_t num_groups, int32_t num_slices, int32_t num_heads, int32_t num_kv_heads, int32_t slots, int32_t head_size,
    const pensieve::AttentionKind* kind, void* out, int64_t out_token_stride, int64_t out_head_stride,
    int32_t num_threads);
int32_t pensieve_write_kv(const char* only, int32_t type, int32_t stored, const char* key,
                          int64_t key_token_stride, int64_t key_head_stride, const char* value,
                          int64_t value_token_stride, int64_t value_head_stride,
                          const int64_t* slot_mapping, int64_t num_tokens, int32_t num_kv_heads,
                          int32_t slots, int64_t row_bytes, char* key_pages, char* value_pages,
                          int64_t page_stride, int64_t kv_head_stride, int64_t num_pages,
                          int32_t num_threads);
}
#pragma GCC visibility pop
