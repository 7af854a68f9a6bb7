// Writes the keys and values of an iteration's tokens to their slots; no other slot changes.
//
//   key_pages[slot / 32, h, slot % 32] <- key[t, h],  values alike,  slot = slot_mapping[t]
//
// `rotate_and_write_kv` applies rotary embedding on the way: query and key rows are rotated,
//
//   x[i], x[i + half] <- x[i] cos[i] - x[i + half] sin[i],  x[i + half] cos[i + half] + x[i] sin[i + half]
//
// with half = rotated / 2, in float and rounded once.  The query goes to `rotated_query`, the key to its page.
//
// One block does one token; a thread moves two neighbouring elements at a time.
//
// Bound by the launch: 16 tokens of 8 KV heads of 128 are 128 KB, a tenth of a microsecond's bandwidth.
#include <element.h>
#include <ptx.h>

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif
#ifndef ELEMENT
#define ELEMENT Bf16
#endif

namespace {

constexpr int PAGE = 32, THREADS = 128;
using Element = ELEMENT;

__device__ __forceinline__ void copy_pair(Element* target, const Element* source) {
  *reinterpret_cast<uint32*>(target) = *reinterpret_cast<const uint32*>(source);
}

// `first` and `second` lie half a rotation apart in `row`.
__device__ __forceinline__ void rotate(Element* target, const Element* row, const Element* cosine,
                                       const Element* sine, int first, int second) {
  float low[2], high[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x = ptx::widen(row[first + i]), y = ptx::widen(row[second + i]);
    low[i] = x * ptx::widen(cosine[first + i]) - y * ptx::widen(sine[first + i]);
    high[i] = y * ptx::widen(cosine[second + i]) + x * ptx::widen(sine[second + i]);
  }
  *reinterpret_cast<uint32*>(target + first) = ptx::pack<Element>(low[0], low[1]);
  *reinterpret_cast<uint32*>(target + second) = ptx::pack<Element>(high[0], high[1]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    write_kv(const Element* key,    // (tokens, kv_heads, head_size), rows key_stride and key_head_stride apart
             const Element* value,  // alike
             const int64* slot_mapping,  // (tokens)
             int kv_heads, int64 key_stride, int64 key_head_stride, int64 value_stride,
             int64 value_head_stride, int64 page_stride,
             Element* key_pages,      // (pages, kv_heads, 32, head_size), page_stride apart
             Element* value_pages) {  // alike
  const int64 token = blockIdx.x, slot = slot_mapping[token];
  const int64 page = slot / PAGE * page_stride + slot % PAGE * HEAD_SIZE;
  for (int i = threadIdx.x; i < kv_heads * (HEAD_SIZE / 2); i += THREADS) {
    const int head = i / (HEAD_SIZE / 2), column = i % (HEAD_SIZE / 2) * 2;
    const int64 target = page + int64(head) * PAGE * HEAD_SIZE + column;
    const int64 from_key = token * key_stride + head * key_head_stride + column;
    const int64 from_value = token * value_stride + head * value_head_stride + column;
    copy_pair(key_pages + target, key + from_key);
    copy_pair(value_pages + target, value + from_value);
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
                        Element* rotated_query,  // (tokens, heads, head_size), contiguous
                        Element* key_pages, Element* value_pages) {
  const int64 token = blockIdx.x, slot = slot_mapping[token];
  const int64 page = slot / PAGE * page_stride + slot % PAGE * HEAD_SIZE;
  const int quarter = rotated / 4, half = rotated / 2;
  const int rest = (HEAD_SIZE - rotated) / 2;  // pairs of a row that are not rotated
  cosine += token * rotated;
  sine += token * rotated;
  const auto source_of = [&](int row) {
    return row < heads ? query + token * query_stride + int64(row) * HEAD_SIZE
                       : key + token * key_stride + int64(row - heads) * HEAD_SIZE;
  };
  const auto target_of = [&](int row) {
    return row < heads ? rotated_query + (token * heads + row) * HEAD_SIZE
                       : key_pages + page + int64(row - heads) * PAGE * HEAD_SIZE;
  };
  const int rows = heads + kv_heads;
  for (int i = threadIdx.x; i < rows * quarter; i += THREADS) {
    const int first = i % quarter * 2;
    rotate(target_of(i / quarter), source_of(i / quarter), cosine, sine, first, first + half);
  }
  for (int i = threadIdx.x; i < rows * rest; i += THREADS) {
    const int column = rotated + i % rest * 2;
    copy_pair(target_of(i / rest) + column, source_of(i / rest) + column);
  }
  for (int i = threadIdx.x; i < kv_heads * (HEAD_SIZE / 2); i += THREADS) {
    const int head = i / (HEAD_SIZE / 2), column = i % (HEAD_SIZE / 2) * 2;
    copy_pair(value_pages + page + int64(head) * PAGE * HEAD_SIZE + column,
              value + token * value_stride + int64(head) * HEAD_SIZE + column);
  }
}
