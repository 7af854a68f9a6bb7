// Compute multi_token_attention over pages, in vectors of LANES floats. Included once per instruction set.
//
// For each page of the part:
//
// * Transpose the keys' tile, so that a vector holds one dimension (or, with BFLOAT16_DOT, a pair of dimensions) of
//   consecutive slots.
// * Compute the scores of up to eight rows at once, in registers, and an online softmax in base 2.
// * Add the values, eight rows by two vectors at once.
//
// The tile and the values are read from memory once for all rows of the item. Memory bandwidth is the limit for a
// decode, and for eight queries with one head each. Arithmetic is the limit for 32 rows (eight queries, four query
// heads per KV head). Measured (Zen 5, two threads, contexts of 512 and more, bfloat16 and float): 50 to 80 % of the
// read bandwidth with one query head per KV head, 20 to 40 % with four.
//
// Codes (attention.h) are whole numbers of at most 7 bits, which bfloat16 and float represent exactly. So products
// multiply codes. Then a slot's key scale multiplies the slot's scores, and its value scale multiplies the weights.
//
// Slots after a row's own position get a score of minus infinity. The values of slots after the part's last
// position are never multiplied: they were never written, and may hold NaN.
#pragma once

#include "attention.h"
#include "codes.h"
#include "vector.h"

namespace {

using pensieve::kHeadMax;
using pensieve::kRowsMax;
using pensieve::kSlots;
using pensieve::Part;
using pensieve::Partial;

constexpr int kVectors = kSlots / LANES;  // vectors in one row of scores
constexpr bool kWide = LANES == 16;       // 32 long registers: blocks may have any number of rows up to eight
constexpr float kLog2E = 1.44269504088896f;

// Prefetches the next page's tile, a few lines at each step of the current page's arithmetic. Prefetching the whole
// tile at once would fill the queue of outstanding loads and stall the arithmetic.
struct Ahead {
  const char* next;
  const char* end;
  void step() {
    if (next < end) __builtin_prefetch(next, 0, 2), next += 64;
  }
};

inline Ahead ahead_of(const void* tile, int num_bytes) {
  const char* first = static_cast<const char*>(tile);
  return {first, first ? first + num_bytes : nullptr};
}

struct alignas(64) Scratch {  // private to a thread
  float query[kRowsMax * kHeadMax];  // rows of floats, or of pairs of bfloat16
  uint32_t keys[kHeadMax * kSlots];  // transposed
  float values[kSlots * kHeadMax];   // widened to float, or in pairs of slots
  float scores[kRowsMax * kSlots];
  float factors[kSlots];        // the factors of a page's scores
  float value_scales[kSlots];   // for a page of codes
  float rescale[kRowsMax];
  Ahead keys_ahead, values_ahead;
};
static_assert(sizeof(Scratch) <= pensieve::kScratchBytes);

template <typename Element>
constexpr bool kDot = BFLOAT16_DOT && std::is_same_v<Element, uint16_t>;

inline Floats multiply_add(Floats sum, Floats a, Floats b) { return sum + a * b; }

template <typename Element>
void transpose_keys(const Element* keys, int head_size, uint32_t* transposed, Ahead& ahead) {
  for (int slot = 0; slot < kSlots; slot += LANES)
    for (int at = 0; at < head_size; at += LANES) {
      Words rows[LANES];
      for (int i = 0; i < LANES; ++i) rows[i] = (Words)read(keys + (slot + i) * head_size + at);
      transpose(rows);
      for (int i = 0; i < LANES; ++i) {
        if (i & 1) ahead.step();
        store(transposed + (at + i) * kSlots + slot, rows[i]);
      }
    }
}

inline void transpose_keys(const uint16_t* keys, int head_size, uint32_t* transposed, Ahead& ahead) {
  const int num_pairs = head_size / 2;
  for (int slot = 0; slot < kSlots; slot += LANES)
    for (int at = 0; at < num_pairs; at += LANES) {
      Words rows[LANES];
      for (int i = 0; i < LANES; ++i) rows[i] = load<Words>(keys + (slot + i) * head_size + 2 * at);
      transpose(rows);
      for (int i = 0; i < LANES; ++i) {
        if (i & 1) ahead.step();
        if (kDot<uint16_t>) {
          store(transposed + (at + i) * kSlots + slot, rows[i]);
        } else {
          store(transposed + 2 * (at + i) * kSlots + slot, (Words)even_half(rows[i]));
          store(transposed + (2 * (at + i) + 1) * kSlots + slot, (Words)odd_half(rows[i]));
        }
      }
    }
}

// Transposes the keys of a page of codes. The result has the layout of transpose_keys.
template <typename Element>
void transpose_codes(const int8_t* codes, int head_size, uint32_t* transposed, Ahead& ahead) {
  const int row = row_of<int8_t>(head_size), depth = kDot<Element> ? head_size / 2 : head_size;
  for (int slot = 0; slot < kSlots; slot += LANES)
    for (int at = 0; at < depth; at += LANES) {
      Words rows[LANES];
      for (int i = 0; i < LANES; ++i) {
        const int8_t* from = codes + (slot + i) * row;
#if BFLOAT16_DOT
        if constexpr (kDot<Element>)
          rows[i] = pairs_of(from + 2 * at);
        else
#endif
          rows[i] = (Words)read(from + at);
      }
      transpose(rows);
      for (int i = 0; i < LANES; ++i) {
        if (i & 1) ahead.step();
        store(transposed + (at + i) * kSlots + slot, rows[i]);
      }
    }
}

// Returns the values in the layout that add_values reads. Only the first `num_slots` slots were written.
inline const float* ready_values(const float* values, int, int, float*, Ahead&) {
  return values;
}

template <typename Element>
const float* ready_values(const Element* values, int num_slots, int head_size, float* ready,
                          Ahead& ahead) {
  for (int slot = 0; slot < num_slots; ++slot)
    for (int at = 0; at < head_size; at += LANES) {
      if (at % 64 == 0) ahead.step();
      store(ready + slot * head_size + at, read(values + slot * head_size + at));
    }
  return ready;
}

#if BFLOAT16_DOT
inline const float* ready_values(const uint16_t* values, int num_slots, int head_size, float* ready,
                                 Ahead& ahead) {
  uint32_t* pairs = reinterpret_cast<uint32_t*>(ready);
  for (int slot = 0; slot < num_slots; slot += 2)
    for (int at = 0; at < head_size; at += LANES) {
      Words first = __builtin_convertvector(load<Halves>(values + slot * head_size + at), Words);
      Words second{};
      if (slot + 1 < num_slots)
        second = __builtin_convertvector(load<Halves>(values + (slot + 1) * head_size + at), Words);
      if (at & LANES) ahead.step();
      store(pairs + (slot / 2) * head_size + at, first | second << 16);
    }
  return ready;
}
#endif

template <typename Element>
const float* ready_codes(const int8_t* codes, int num_slots, int head_size, float* ready, Ahead& ahead) {
  const int row = row_of<int8_t>(head_size);
  if constexpr (kDot<Element>) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(ready);
    for (int slot = 0; slot < num_slots; slot += 2)
      for (int at = 0; at < head_size; at += LANES) {
        const Words first = (Words)read(codes + slot * row + at);
        Words second{};
        if (slot + 1 < num_slots) second = (Words)read(codes + (slot + 1) * row + at);
        if (at & LANES) ahead.step();
        store(pairs + (slot / 2) * head_size + at, first >> 16 | (second & 0xffff0000u));
      }
  } else {
    for (int slot = 0; slot < num_slots; ++slot)
      for (int at = 0; at < head_size; at += LANES) {
        if (at % 64 == 0) ahead.step();
        store(ready + slot * head_size + at, read(codes + slot * row + at));
      }
  }
  return ready;
}

template <typename Element>
inline Floats product_add(Floats sum, uint32_t word, Words vector) {
#if BFLOAT16_DOT
  if constexpr (kDot<Element>) return dot_add(sum, Words{} + word, vector);
#endif
  float value;
  memcpy(&value, &word, sizeof value);
  return multiply_add(sum, splat(value), (Floats)vector);
}

template <typename Element, int Rows>
void score(Scratch& scratch, int row, int head_size) {
  constexpr int kAcross = LANES == 4 && kRegisters == 32 ? 2 : kVectors;  // more would need too many registers
  const int depth = kDot<Element> ? head_size / 2 : head_size;
  float* scores = scratch.scores + row * kSlots;
  for (int slot = 0; slot < kSlots; slot += kAcross * LANES) {
    Floats sums[Rows][kAcross];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kAcross; ++v) sums[r][v] = Floats{};
    const uint32_t* query = reinterpret_cast<const uint32_t*>(scratch.query) + row * depth;
    const uint32_t* transposed = scratch.keys + slot;
    for (int at = 0; at < depth; ++at, query += Rows, transposed += kSlots) {
      scratch.keys_ahead.step();
      Words keys[kAcross];
#pragma GCC unroll 8
      for (int v = 0; v < kAcross; ++v) keys[v] = load<Words>(transposed + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kAcross; ++v)
          sums[r][v] = product_add<Element>(sums[r][v], query[r], keys[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kAcross; ++v)
        store(scores + r * kSlots + slot + v * LANES,
              sums[r][v] * load<Floats>(scratch.factors + slot + v * LANES));
  }
}

// Replaces scores by weights. Updates the row's largest score, its sum, and the factor of older sums. With codes, the
// weights include the slots' value scales, but the sum does not.
template <bool OfCodes>
inline void soften(float* scores, const float* value_scales, int num_visible, float& largest, float& sum,
                   float& rescale) {
  Floats row[kVectors];
  Floats most = splat(-INFINITY);
  for (int v = 0; v < kVectors; ++v) {
    row[v] = load<Floats>(scores + v * LANES);
    if (num_visible < (v + 1) * LANES) {
      Ints index;
      for (int i = 0; i < LANES; ++i) index[i] = v * LANES + i;
      row[v] = index < num_visible ? row[v] : splat(-INFINITY);
    }
    most = larger(row[v], most);
  }
  const float before = largest, now = max_of(most);
  if (!(now <= before)) largest = now;  // also if `now` is NaN
  rescale = 1.0f;
  if (largest != before) {
    Floats shrink = exp2_nonpositive(splat(before - largest));
    rescale = before == -INFINITY ? 0.0f : shrink[0];
  }
  Floats total{};
  for (int v = 0; v < kVectors; ++v) {
    Floats weight = exp2_nonpositive(row[v] - largest);
    weight = row[v] == splat(-INFINITY) ? Floats{} : weight;
    total += weight;
    if (OfCodes) weight *= load<Floats>(value_scales + v * LANES);
    store(scores + v * LANES, weight);
  }
  sum = sum * rescale + sum_of(total);
}

// Adds kAcross vectors of the weighted values, from `at` on.
template <typename Element, int Rows, int kAcross>
inline void add_some_values(Scratch& scratch, const float* values, int num_slots, int row, int head_size, int at,
                            float* weighted) {
  constexpr int kStride = kDot<Element> ? kSlots / 2 : kSlots;
  const int depth = kDot<Element> ? (num_slots + 1) / 2 : num_slots;
  const uint32_t* weights = reinterpret_cast<const uint32_t*>(scratch.scores) + row * kStride;
  const float* rescale = scratch.rescale + row;
  weighted += row * head_size + at;
  Floats sums[Rows][kAcross];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kAcross; ++v)
      sums[r][v] = load<Floats>(weighted + r * head_size + v * LANES) * rescale[r];
  const float* value_row = values + at;
  for (int slot = 0; slot < depth; ++slot, value_row += head_size) {
    for (int step = 0; step < kAcross / 2; ++step) {
      scratch.values_ahead.step();
      if (sizeof(Element) == 4) scratch.values_ahead.step();  // ready_values has prefetched nothing for floats
    }
    Words value[kAcross];
#pragma GCC unroll 4
    for (int v = 0; v < kAcross; ++v) value[v] = load<Words>(value_row + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kAcross; ++v)
        sums[r][v] = product_add<Element>(sums[r][v], weights[r * kStride + slot], value[v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kAcross; ++v) store(weighted + r * head_size + v * LANES, sums[r][v]);
}

template <typename Element, int Rows>
void add_values(Scratch& scratch, const float* values, int num_slots, int row, int head_size,
                float* weighted) {
  // With few rows, use more vectors at once: otherwise each product would wait for the product before it.
  constexpr int kAcross = kWide && Rows <= 4 ? 4 : 2;
  int at = 0;
  for (; at + kAcross * LANES <= head_size; at += kAcross * LANES)
    add_some_values<Element, Rows, kAcross>(scratch, values, num_slots, row, head_size, at, weighted);
  for (; at < head_size; at += 2 * LANES)
    add_some_values<Element, Rows, 2>(scratch, values, num_slots, row, head_size, at, weighted);
}

#if BFLOAT16_DOT
// Converts weights to pairs of bfloat16, in place. Row r moves to half its offset, so rows are converted front to back.
#ifdef __aarch64__
inline void pair_weights(float* scores, int num_rows) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(scores);
  for (int i = 0; i < num_rows * kSlots; i += LANES)
    store(halves + i, rounded(load<Floats>(scores + i)));
}
#else
inline void pair_weights(float* scores, int num_rows) {
  uint32_t* pairs = reinterpret_cast<uint32_t*>(scores);
  for (int r = 0; r < num_rows; ++r) {
    __m512 low = _mm512_load_ps(scores + r * kSlots);
    __m512 high = _mm512_load_ps(scores + r * kSlots + 16);
    _mm512_store_si512(pairs + r * kSlots / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}
#endif
#endif

// Runs an operation on all rows, in blocks of up to eight.
template <template <typename, int> class Operation, typename Element, typename... Arguments>
inline void in_blocks(int num_rows, Arguments&&... arguments) {
  int row = 0;
  for (; row + 8 <= num_rows; row += 8) Operation<Element, 8>::run(row, arguments...);
  if constexpr (kWide) {
    const int left = num_rows - row;
    if (left == 7) return Operation<Element, 7>::run(row, arguments...);
    if (left == 6) return Operation<Element, 6>::run(row, arguments...);
    if (left == 5) return Operation<Element, 5>::run(row, arguments...);
    if (left == 3) return Operation<Element, 3>::run(row, arguments...);
  }
  if (row + 4 <= num_rows) Operation<Element, 4>::run(row, arguments...), row += 4;
  if (row + 2 <= num_rows) Operation<Element, 2>::run(row, arguments...), row += 2;
  if (row < num_rows) Operation<Element, 1>::run(row, arguments...);
}

template <typename Element, int Rows>
struct Score {
  static void run(int row, Scratch& scratch, int head_size) {
    score<Element, Rows>(scratch, row, head_size);
  }
};

template <typename Element, int Rows>
struct AddValues {
  static void run(int row, Scratch& scratch, const float* values, int num_slots, int head_size,
                  float* weighted) {
    add_values<Element, Rows>(scratch, values, num_slots, row, head_size, weighted);
  }
};

// Returns the offset of a token of the part, in elements from `query` on.
inline int64_t query_at(const Part& part, int token) {
  return (part.rows ? part.rows[token] : token) * part.token_stride;
}

// The rows of a block are interleaved, so that one pointer reaches the same dimension of all rows.
template <typename Element, int Rows>
struct TakeQuery {
  static void run(int row, Scratch& scratch, const Part& part) {
    const int depth = kDot<Element> ? part.head_size / 2 : part.head_size;
    for (int r = 0; r < Rows; ++r) {
      const Element* from = static_cast<const Element*>(part.query) +
                            query_at(part, (row + r) / part.group) +
                            (row + r) % part.group * part.head_stride;
      float* to = scratch.query + row * depth + r;
      for (int at = 0; at < depth; ++at)
        if constexpr (kDot<Element>)
          memcpy(to + at * Rows, from + 2 * at, 4);
        else
          to[at * Rows] = read_one(from + at);
    }
  }
};

// Stored is the type in the pages: Element, or int8_t for codes.
template <typename Element, typename Stored = Element>
void attend(const Part& part, Partial& partial, void* memory) {
  Scratch& scratch = *static_cast<Scratch*>(memory);
  const int head_size = part.head_size, num_rows = part.num_tokens * part.group;
  in_blocks<TakeQuery, Element>(num_rows, scratch, part);
  if (!part.continues) {
    for (int r = 0; r < num_rows; ++r) partial.largest[r] = -INFINITY, partial.sum[r] = 0.0f;
    memset(partial.weighted, 0, sizeof(float) * num_rows * head_size);
  }

  const float factor = part.kind.scaling * kLog2E;
  for (float& each : scratch.factors) each = factor;
  const int tile_bytes = kSlots * row_of<Stored>(head_size) * int(sizeof(Stored));
  const int end_position = part.position + part.num_tokens;
  for (int p = part.first_page; p < part.end_page; ++p) {
    const int64_t offset = int64_t(part.pages[p]) * part.page_stride;
    const Stored* keys = static_cast<const Stored*>(part.keys) + offset;
    const Stored* values = static_cast<const Stored*>(part.values) + offset;
    const int first = p * kSlots;
    const int num_slots = end_position - first < kSlots ? end_position - first : kSlots;
    const void *next_keys = part.keys_after, *next_values = part.values_after;
    if (p + 1 < part.end_page) {
      const int64_t next = int64_t(part.pages[p + 1]) * part.page_stride;
      next_keys = static_cast<const Stored*>(part.keys) + next;
      next_values = static_cast<const Stored*>(part.values) + next;
    }
    scratch.keys_ahead = ahead_of(next_keys, tile_bytes);
    scratch.values_ahead = ahead_of(next_values, tile_bytes);
    if constexpr (kAreCodes<Stored>) {
      transpose_codes<Element>(keys, head_size, scratch.keys, scratch.keys_ahead);
      read_scales(keys, num_slots, head_size, factor, scratch.factors);
      read_scales(values, num_slots, head_size, 1.0f, scratch.value_scales);
    } else {
      transpose_keys(keys, head_size, scratch.keys, scratch.keys_ahead);
    }
    in_blocks<Score, Element>(num_rows, scratch, head_size);
    for (int r = 0; r < num_rows; ++r) {
      const int visible = part.position + r / part.group + 1 - first;
      soften<kAreCodes<Stored>>(scratch.scores + r * kSlots, scratch.value_scales, visible,
                                partial.largest[r], partial.sum[r], scratch.rescale[r]);
    }
    const float* ready;
    if constexpr (kAreCodes<Stored>)
      ready = ready_codes<Element>(values, num_slots, head_size, scratch.values, scratch.values_ahead);
    else
      ready = ready_values(values, num_slots, head_size, scratch.values, scratch.values_ahead);
#if BFLOAT16_DOT
    if (kDot<Element>) pair_weights(scratch.scores, num_rows);
#endif
    in_blocks<AddValues, Element>(num_rows, scratch, ready, num_slots, head_size, partial.weighted);
  }
}

template <typename Element>
constexpr pensieve::Codes codes_for = {attend<Element, int8_t>, write_codes<Element>};

template <typename Element>
void write_out(const Partial& partial, int32_t num_tokens, int32_t group, int32_t head_size,
               void* out, int64_t token_stride, int64_t head_stride) {
  for (int row = 0; row < num_tokens * group; ++row) {
    const float* from = partial.weighted + row * head_size;
    const float factor = 1.0f / partial.sum[row];
    Element* to = static_cast<Element*>(out) + row / group * token_stride + row % group * head_stride;
    for (int at = 0; at < head_size; at += LANES)
      write(to + at, load<Floats>(from + at) * factor);
  }
}

}  // namespace
