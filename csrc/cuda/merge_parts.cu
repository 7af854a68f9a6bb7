// Merge the results of a row's parts.  A row has several parts if multi_token_attention has cut its context, or if the
// first pages of its context belong to a pack (include/work.h).
//
//   out[row] = Σ over parts of 2^(sum[part] - most) · values[part] / Σ of 2^(sum[part] - most)
//
// A part's values are normalised, and `sum` is log2 of its softmax sum (-infinity if the part saw no key).  `most` is the
// largest `sum` of the row's parts.
//
// One warp does one row of one KV head, and a block does a run of four rows.  Block b does the run with number
// b % row_runs, of KV head b / row_runs % kv_heads, of the merge item b / row_runs / kv_heads.  If the item has no such
// rows, the block ends at once.  A lane reads four neighbouring values at a time and loads UNROLLED parts together,
// because the kernel is short and bound by latency.
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

constexpr int WARPS = 4, UNROLLED = 4;
constexpr int QUADS = (HEAD_SIZE + 127) / 128;  // how many Quads a lane holds

struct alignas(16) Quad {
  float values[4];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    merge_parts(const float* part_values,  // (part rows, kv_heads, head_size)
                const float* part_sums,    // (part rows, kv_heads)
                const int* slice_offsets,  // (slices + 1)
                const MergeItem* items,    // gridDim.x / row_runs / kv_heads of them
                int row_runs, int kv_heads, int group, int64 out_stride,
                ELEMENT* out) {  // (tokens, heads, head_size)
  const MergeItem item = items[blockIdx.x / row_runs / kv_heads];
  const int head = blockIdx.x / row_runs % kv_heads, lane = threadIdx.x % 32;
  const int row = blockIdx.x % row_runs * WARPS + threadIdx.x / 32;
  if (row >= item.num_rows) return;
  const auto part = [&](int index) {
    const int behind = index - item.num_parts;  // index among the parts of the pack, or negative
    const int first =
        behind < 0 ? item.first_part_row + index * item.num_rows : item.first_pack_row + behind * item.pack_stride;
    return int64(first + row) * kv_heads + head;
  };
  const int num_parts = item.num_parts + item.num_pack_parts;
  float most = ptx::minus_infinity();
  for (int index = 0; index < num_parts; ++index) most = fmaxf(most, part_sums[part(index)]);
  float total = 0.0f, sums[QUADS][4] = {};
#pragma unroll UNROLLED
  for (int index = 0; index < num_parts; ++index) {
    const float weight = ptx::exp2(part_sums[part(index)] - most);
    const float* const values = part_values + part(index) * HEAD_SIZE;
    total += weight;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int column = 4 * (lane + 32 * i);
      if (column >= HEAD_SIZE) continue;
      const Quad quad = *reinterpret_cast<const Quad*>(values + column);
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[i][k] += weight * quad.values[k];
    }
  }
  const int token = slice_offsets[item.slice] + (item.row_begin + row) / group;
  const int member = (item.row_begin + row) % group;
  ELEMENT* const target = out + token * out_stride + int64(head * group + member) * HEAD_SIZE;
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    const int column = 4 * (lane + 32 * i);
    if (column >= HEAD_SIZE) continue;
    const uint32 low = ptx::pack<ELEMENT>(sums[i][0] / total, sums[i][1] / total);
    const uint32 high = ptx::pack<ELEMENT>(sums[i][2] / total, sums[i][3] / total);
    *reinterpret_cast<uint64*>(target + column) = uint64(high) << 32 | low;
  }
}
