// Merges the parts of contexts that were cut for multi_token_attention.
//
//   out[row] = Σ over parts of 2^(sum[part] - most) · values[part] / Σ of 2^(sum[part] - most)
//
// Values are normalised rows, sums are log2 of their softmax sums (-infinity where a part saw no key).
// One warp does one row of one KV head; a block has four.
#include <element.h>
#include <ptx.h>
#include <work.h>

#ifndef HEAD_SIZE
#define HEAD_SIZE 128
#endif
#ifndef ELEMENT
#define ELEMENT Bf16
#endif

namespace {
constexpr int WARPS = 4;
constexpr int PAIRS = (HEAD_SIZE + 63) / 64;  // of elements that a lane holds
}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    merge_parts(const float* part_values,  // (part rows, kv_heads, head_size)
                const float* part_sums,    // (part rows, kv_heads)
                const int* slice_offsets,  // (slices + 1)
                const MergeItem* items,    // gridDim.x / kv_heads of them
                int kv_heads, int group, int64 out_stride,
                ELEMENT* out) {  // (tokens, heads, head_size)
  const MergeItem item = items[blockIdx.x / kv_heads];
  const int head = blockIdx.x % kv_heads, lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < item.num_rows; row += WARPS) {
    const auto part = [&](int index) {
      return int64(item.first_part_row + index * item.num_rows + row) * kv_heads + head;
    };
    float most = ptx::nothing();
    for (int index = 0; index < item.num_parts; ++index) most = fmaxf(most, part_sums[part(index)]);
    float total = 0.0f, sums[PAIRS][2] = {};
    for (int index = 0; index < item.num_parts; ++index) {
      const float weight = ptx::exp2(part_sums[part(index)] - most);
      const float* const values = part_values + part(index) * HEAD_SIZE;
      total += weight;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const int column = 2 * (lane + 32 * i);
        if (column >= HEAD_SIZE) continue;
        sums[i][0] += weight * values[column];
        sums[i][1] += weight * values[column + 1];
      }
    }
    const int token = slice_offsets[item.slice] + (item.row_begin + row) / group;
    const int member = (item.row_begin + row) % group;
    ELEMENT* const target = out + token * out_stride + int64(head * group + member) * HEAD_SIZE;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int column = 2 * (lane + 32 * i);
      if (column >= HEAD_SIZE) continue;
      *reinterpret_cast<uint32*>(target + column) =
          ptx::pack<ELEMENT>(sums[i][0] / total, sums[i][1] / total);
    }
  }
}
