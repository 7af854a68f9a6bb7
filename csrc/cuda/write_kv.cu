// Write the keys and values of an iteration's tokens to their slots.
//
//   slot = slot_mapping[t]
//   key_pages[slot / 32, h, slot % 32] <- key[t, h]       and likewise value_pages <- value
//
// `rotate_and_write_kv` also applies the rotary embedding.  Query and key rows are rotated,
//
//   x[i], x[i + half] <- x[i] cos[i] - x[i + half] sin[i],  x[i + half] cos[i + half] + x[i] sin[i + half]
//
// where `rotated` is the number of leading elements of a row that are rotated, and half = rotated / 2.  The computation
// is in float and rounds once.  The query goes to `rotated_query`, the key to its page.
//
// If keys and values are stored as bytes (STORED=E4m3; e4m3.h), each number is divided by the scale of its head and
// rounded once.
//
// One block does one token.  A thread moves four neighbouring elements at a time, or two if `half` is not a multiple of
// four.
//
// The launch takes most of the time: 16 tokens with 8 KV heads of size 128 are only 128 KB.
#include <e4m3.h>
#include <element.h>
#include <ptx.h>

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif
#ifndef ELEMENT
#define ELEMENT Bf16
#endif
#ifndef STORED
#define STORED ELEMENT
#endif

namespace {

constexpr int PAGE = 32, THREADS = 128, EACH = 4;
using Element = ELEMENT;
using Stored = STORED;
constexpr bool BYTES = sizeof(Stored) == 1;

// COUNT neighbouring elements, moved at once.
template <class Type, int COUNT>
struct alignas(sizeof(Type) * COUNT) Some {
  Type each[COUNT];
};

template <int COUNT>
__device__ __forceinline__ void read(float (&values)[COUNT], const Element* source) {
  const auto some = *reinterpret_cast<const Some<Element, COUNT>*>(source);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = ptx::widen(some.each[i]);
}

// Rounds values.  If the target is bytes, multiplies them by `factor` first.
template <int COUNT>
__device__ __forceinline__ void write(Element* target, const float (&values)[COUNT], float) {
  Some<uint32, COUNT / 2> some;
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) some.each[i / 2] = ptx::pack<Element>(values[i], values[i + 1]);
  *reinterpret_cast<Some<uint32, COUNT / 2>*>(target) = some;
}

template <int COUNT>
__device__ __forceinline__ void write(E4m3* target, const float (&values)[COUNT], float factor) {
  Some<uint8, COUNT> some;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) some.each[i] = e4m3::narrow(values[i], factor);
  *reinterpret_cast<Some<uint8, COUNT>*>(target) = some;
}

// Stores the values unchanged, or rounded to bytes.
template <int COUNT>
__device__ __forceinline__ void move(Element* target, const Element* source, float) {
  using Moved = Some<Element, COUNT>;
  *reinterpret_cast<Moved*>(target) = *reinterpret_cast<const Moved*>(source);
}

template <int COUNT>
__device__ __forceinline__ void move(E4m3* target, const Element* source, float factor) {
  float values[COUNT];
  read(values, source);
  write(target, values, factor);
}

// `first` and `second` are `half` elements apart in `row`.
template <int COUNT, class Type>
__device__ __forceinline__ void rotate(Type* target, const Element* row, const Element* cosine,
                                       const Element* sine, int first, int second, float factor) {
  float x[COUNT], y[COUNT], cosines[2][COUNT], sines[2][COUNT], low[COUNT], high[COUNT];
  read(x, row + first);
  read(y, row + second);
  read(cosines[0], cosine + first);
  read(cosines[1], cosine + second);
  read(sines[0], sine + first);
  read(sines[1], sine + second);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    low[i] = x[i] * cosines[0][i] - y[i] * sines[0][i];
    high[i] = y[i] * cosines[1][i] + x[i] * sines[1][i];
  }
  write(target + first, low, factor);
  write(target + second, high, factor);
}

// Rotates `num_rows` rows of a token, and copies the part of each row that is not rotated.
template <int COUNT, class Source, class Target, class Factor>
__device__ __forceinline__ void rotate_rows(int num_rows, int rotated, const Element* cosine, const Element* sine,
                                            Source source_of, Target target_of, Factor factor_of) {
  const int half = rotated / 2, pieces = half / COUNT, rest = (HEAD_SIZE - rotated) / COUNT;
  for (int i = threadIdx.x; i < num_rows * pieces; i += THREADS) {
    const int row = i / pieces, first = i % pieces * COUNT;
    rotate<COUNT>(target_of(row), source_of(row), cosine, sine, first, first + half, factor_of(row));
  }
  for (int i = threadIdx.x; i < num_rows * rest; i += THREADS) {
    const int row = i / rest, column = rotated + i % rest * COUNT;
    move<COUNT>(target_of(row) + column, source_of(row) + column, factor_of(row));
  }
}

// Returns the factor by which a head's values are multiplied before they become bytes.  Scales are powers of two.
__device__ __forceinline__ float factor_of(const float* kv_scales, int index) {
  return BYTES ? 1.0f / kv_scales[index] : 1.0f;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    write_kv(const Element* key,    // (tokens, kv_heads, head_size), rows key_stride and key_head_stride apart
             const Element* value,  // like key
             const int64* slot_mapping,  // (tokens)
             int kv_heads, int64 key_stride, int64 key_head_stride, int64 value_stride,
             int64 value_head_stride, int64 page_stride,
             const float* kv_scales,  // (2, kv_heads): keys' and values'; read only where Stored is bytes
             Stored* key_pages,       // (pages, kv_heads, 32, head_size), page_stride apart
             Stored* value_pages) {   // like key_pages
  const int64 token = blockIdx.x, slot = slot_mapping[token];
  const int64 page = slot / PAGE * page_stride + slot % PAGE * HEAD_SIZE;
  for (int i = threadIdx.x; i < kv_heads * (HEAD_SIZE / EACH); i += THREADS) {
    const int head = i / (HEAD_SIZE / EACH), column = i % (HEAD_SIZE / EACH) * EACH;
    const int64 target = page + int64(head) * PAGE * HEAD_SIZE + column;
    const int64 from_key = token * key_stride + head * key_head_stride + column;
    const int64 from_value = token * value_stride + head * value_head_stride + column;
    move<EACH>(key_pages + target, key + from_key, factor_of(kv_scales, head));
    move<EACH>(value_pages + target, value + from_value, factor_of(kv_scales, kv_heads + head));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_and_write_kv(const Element* query,   // (tokens, heads, head_size)
                        const Element* key,     // (tokens, kv_heads, head_size)
                        const Element* value,   // (tokens, kv_heads, head_size)
                        const Element* cosine,  // (tokens, rotated)
                        const Element* sine,    // (tokens, rotated)
                        const int64* slot_mapping, int heads, int kv_heads, int rotated, int64 query_stride,
                        int64 key_stride, int64 value_stride, int64 page_stride,
                        const float* kv_scales,  // as above
                        Element* rotated_query,  // (tokens, heads, head_size), contiguous
                        Stored* key_pages, Stored* value_pages) {
  const int64 token = blockIdx.x, slot = slot_mapping[token];
  const int64 page = slot / PAGE * page_stride + slot % PAGE * HEAD_SIZE;
  cosine += token * rotated;
  sine += token * rotated;
  query += token * query_stride;
  key += token * key_stride;
  value += token * value_stride;
  rotated_query += token * heads * HEAD_SIZE;
  key_pages += page;
  value_pages += page;
  const auto query_row = [&](int row) { return query + int64(row) * HEAD_SIZE; };
  const auto rotated_row = [&](int row) { return rotated_query + int64(row) * HEAD_SIZE; };
  const auto as_it_is = [](int) { return 1.0f; };
  const auto key_row = [&](int row) { return key + int64(row) * HEAD_SIZE; };
  const auto slot_row = [&](int row) { return key_pages + int64(row) * PAGE * HEAD_SIZE; };
  const auto of_head = [&](int row) { return factor_of(kv_scales, row); };
  if (rotated % (2 * EACH) == 0) {
    rotate_rows<EACH>(heads, rotated, cosine, sine, query_row, rotated_row, as_it_is);
    rotate_rows<EACH>(kv_heads, rotated, cosine, sine, key_row, slot_row, of_head);
  } else {
    rotate_rows<2>(heads, rotated, cosine, sine, query_row, rotated_row, as_it_is);
    rotate_rows<2>(kv_heads, rotated, cosine, sine, key_row, slot_row, of_head);
  }
  for (int i = threadIdx.x; i < kv_heads * (HEAD_SIZE / EACH); i += THREADS) {
    const int head = i / (HEAD_SIZE / EACH), column = i % (HEAD_SIZE / EACH) * EACH;
    move<EACH>(value_pages + int64(head) * PAGE * HEAD_SIZE + column, value + int64(head) * HEAD_SIZE + column,
               factor_of(kv_scales, kv_heads + head));
  }
}
