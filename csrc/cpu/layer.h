// The interface that an instruction set implements for the dense parts of a decoder layer.
//
// Activations are `Element`s (float, bfloat16 or fp16). Sums, and the residual inside a layer, are float. A row's
// result does not depend on other rows: each sum runs over its inputs in one fixed order.
#pragma once

#include <cstdint>

#include "attention.h"

namespace pensieve {

// Weights in panels. A panel has the weights of two vectors of outputs, as a sequence of steps. A step has the
// weights of one input for all outputs of the panel, side by side (of two inputs for bfloat16, of four for int8). So a
// product reads a panel from front to back.
struct Linear {
  const void* panels;
  const float* bias;   // in the order of the panels' outputs, like scales and offsets; null: none
  const float* scales;  // for int8 weights: an output's scale; null: weights are Elements
  const int32_t* offsets;  // for int8 weights: kZero times the sum of an output's weights
  int64_t panel_bytes;
  int32_t inputs;      // even for bfloat16, a multiple of 4 for int8
  int32_t width;       // row size: `inputs` without the padding of the last step
  int32_t outputs;     // columns of the result
  int32_t activation;  // 0: none; otherwise applied to a panel's first vector, which then multiplies the second
  int32_t pointwise = 0;  // 0: none; otherwise applied to every output
};

// Returns the address of a panel, or null if there is no such panel or `linear` is null.
inline const char* panel_of(const Linear* linear, int lanes, int64_t panel) {
  if (!linear || panel * (linear->activation ? lanes : 2 * lanes) >= linear->outputs) return nullptr;
  return static_cast<const char*>(linear->panels) + panel * linear->panel_bytes;
}

constexpr int kZero = 128;  // the unsigned byte that stands for 0 in a quantised row
enum Activation : int32_t {
  kNone = 0,
  kSilu = 1,
  kGeluTanh = 2,
  kRelu = 3,
  kGelu = 4,  // exact, with the error function
};

// A norm by the root mean square over `width` elements (a divisor of the row size), with weights (null: no norm).
// `centred` first subtracts the mean from each value (LayerNorm).
struct Norm {
  const float* weight;
  int32_t width;
  float eps;
  const float* bias = nullptr;  // null: none
  int32_t centred = 0;
};

struct Product {
  const Linear* linear;
  const void* rows;
  int64_t row_stride;  // elements; for quantised rows: bytes
  int32_t num_rows;
  void* out;
  int64_t out_stride;
  int32_t out_float;  // 1: the result is float; 0: Element
  const float* row_scales = nullptr;  // only for quantised rows
};

// Multiplies rows first..end by panel `panel`. Prefetches a panel from `ahead`, unless `ahead` is null.
using Multiply = void (*)(const Product&, int32_t panel, int32_t first, int32_t end,
                          const char* ahead);

// Multiplies rows first..end (at most kBlockRows) by panels `panel` to `end_panel` (at most kBlockPanels). The inputs
// are divided into stretches whose rows and weights stay in the second-level cache. Prefetches the start of `ahead`.
using MultiplyBlock = void (*)(const Product&, int32_t panel, int32_t end_panel, int32_t first,
                               int32_t end, const char* ahead);
constexpr int kBlockRows = 256, kBlockPanels = 8;

// Computes sum = base + factor * after(added) and out = before(sum). `after` and `before` are norms, and `after` is
// not centred. `base` is Element or float. Null arguments are omitted.
struct SumAndNorm {
  const void* base;
  int32_t base_float;
  const float* added;
  Norm after, before;
  float factor;
  float* sum;
  void* out;
  int32_t width;
};
using ComputeSumAndNorm = void (*)(const SumAndNorm&, int32_t row);

// Applies the norms of queries and keys, then the rotation of halves (rotary embedding), in place.
struct Rotating {
  void* rows;  // queries, keys, values of each token
  int64_t row_stride;
  const void *cosines, *sines;  // (tokens, rotary), Element or float
  int32_t rotation_float;
  Norm query_norm, key_norm;
  int32_t num_heads, num_kv_heads, head_size, rotary;
};
using RotateRow = void (*)(const Rotating&, int32_t row);

// Quantises a row to bytes around kZero. Returns the step size. Bytes after the row, up to `padded`, are kZero.
using Quantise = float (*)(const void* row, int32_t width, int32_t padded, uint8_t* out);

// Returns the first column of the largest value, or -1 if any value is not finite.
using Largest = int32_t (*)(const float* row, int32_t width);

// An expert, and its logit minus the row's largest logit.
struct Scored {
  float score;
  int32_t expert;
};

// Finds each row's `num_chosen` largest logits, largest first, and their softmax over all experts (shares).
struct Choosing {
  const void* logits;  // (rows, num_experts) Element
  int32_t num_experts, num_chosen;
  int32_t normalised, rounded;  // as in `Experts` (experts.h)
  int32_t* experts;             // (rows, num_chosen)
  float* shares;                // (rows, num_chosen)
  Scored* scored;               // (rows, num_experts), scratch memory
  // Sorts the largest logits to the front. Compiled once, for any processor, because it uses the C++ library.
  void (*take_largest)(Scored* scored, int32_t num_experts, int32_t num_chosen);
};
using Choose = void (*)(const Choosing&, int32_t row);

// Converts a row of fp16 to floats, or a row of bfloat16 if no instruction multiplies pairs of bfloat16.
using Widen = void (*)(const void* row, int32_t width, float* out);

struct Dense {
  int32_t lanes;
  Multiply multiply, multiply_bytes;
  Quantise quantise;
  ComputeSumAndNorm sum_and_norm;
  RotateRow rotate_row;
  Largest largest;
  Choose choose;
  Widen widen = nullptr;  // null: products take rows of Elements
  MultiplyBlock multiply_block = nullptr, multiply_block_bytes = nullptr;  // null: panel by panel
};

// Returns the kernels of the best supported instruction set, or of the instruction set named `only`.
const Dense& dense_of(const char* only, Type type);

}  // namespace pensieve
