// The interface that an instruction set implements for the dense parts of a decoder layer.
//
// Activations are `Element`s (float, bfloat16 or fp16). Sums, and the residual inside a layer, are float. A row's
// result does not depend on other rows: each sum runs over its inputs in one fixed order.
#pragma once

#include <cstdint>

#include "attention.h"

namespace pensieve {

// Weights in panels of two vectors of outputs. A panel is ordered by steps (one input, or a pair of bfloat16 inputs).
// In each step, the weights of all its outputs are side by side. So a product reads a panel from front to back.
struct Linear {
  const void* panels;
  const float* bias;   // in the order of the panels' outputs, like scales and offsets; null: none
  const float* scales;  // of int8 weights: the value of 1 in an output's weights; null: weights are Elements
  const int32_t* offsets;  // of int8 weights: kZero times the sum of an output's weights
  int64_t panel_bytes;
  int32_t inputs;      // of bfloat16: even; of int8: a multiple of 4
  int32_t width;       // of a row: `inputs` without the padding of the last step
  int32_t outputs;     // columns of the result
  int32_t activation;  // 0: none; else of a panel's first vector, which then multiplies the second
  int32_t pointwise = 0;  // 0: none; else an activation of every output
};

// Returns the first byte of a panel; null after the last panel, or if there is no product.
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
  kGelu = 4,  // by the error function
};

// A norm by the root mean square over `width` (a divisor of the row), with weights; null: none. `centred` first
// subtracts the mean from each value (LayerNorm).
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
  int64_t row_stride;  // elements; of quantised rows: bytes
  int32_t num_rows;
  void* out;
  int64_t out_stride;
  int32_t out_float;  // the result is float, else Element
  const float* row_scales = nullptr;  // of quantised rows
};

// Multiplies rows first..end by panel `panel`; prefetches as many bytes from `ahead`, unless it is null.
using Multiply = void (*)(const Product&, int32_t panel, int32_t first, int32_t end,
                          const char* ahead);

// Multiplies rows first..end by panels `panel` to `end_panel`, at most kBlockRows by kBlockPanels, in stretches of
// inputs whose rows and weights stay in the second-level cache; prefetches the beginning of `ahead`.
using MultiplyBlock = void (*)(const Product&, int32_t panel, int32_t end_panel, int32_t first,
                               int32_t end, const char* ahead);
constexpr int kBlockRows = 256, kBlockPanels = 8;

// Computes sum = base + factor * after(added) and out = before(sum). `after` and `before` are norms, and `after` is
// not centred. `base` is Element or float. Null arguments are left out.
struct Joint {
  const void* base;
  int32_t base_float;
  const float* added;
  Norm after, before;
  float factor;
  float* sum;
  void* out;
  int32_t width;
};
using Join = void (*)(const Joint&, int32_t row);

// Applies the norms of queries and keys, then the rotation of halves (rotary embedding), in place.
struct Turning {
  void* rows;  // queries, keys, values of each token
  int64_t row_stride;
  const void *cosines, *sines;  // (tokens, rotary), Element or float
  int32_t rotation_float;
  Norm query_norm, key_norm;
  int32_t num_heads, num_kv_heads, head_size, rotary;
};
using Turn = void (*)(const Turning&, int32_t row);

// Quantises a row to bytes around kZero; returns the step. Bytes behind the row, up to `padded`, are kZero.
using Quantise = float (*)(const void* row, int32_t width, int32_t padded, uint8_t* out);

// Returns the first column of the largest value, or -1 if any value is not finite.
using Largest = int32_t (*)(const float* row, int32_t width);

// An expert, and how far its logit is below the row's largest logit.
struct Scored {
  float score;
  int32_t expert;
};

// Finds each row's `num_chosen` largest logits, largest first, and their softmax over all experts (shares).
struct Choosing {
  const void* logits;  // (rows, num_experts) Element
  int32_t num_experts, num_chosen;
  int32_t normalised, rounded;  // as in Experts
  int32_t* experts;             // (rows, num_chosen)
  float* shares;                // (rows, num_chosen)
  Scored* scored;               // (rows, num_experts), to work in
  // Sorts the largest to the front. It is compiled once, for any processor, because it uses code of the C++ library.
  void (*take_largest)(Scored* scored, int32_t num_experts, int32_t num_chosen);
};
using Choose = void (*)(const Choosing&, int32_t row);

// Converts a row to floats: of fp16, or of bfloat16 if no instruction multiplies pairs of it.
using Widen = void (*)(const void* row, int32_t width, float* out);

struct Dense {
  int32_t lanes;
  Multiply multiply, multiply_bytes;
  Quantise quantise;
  Join join;
  Turn turn;
  Largest largest;
  Choose choose;
  Widen widen = nullptr;  // null: products take rows unconverted
  MultiplyBlock multiply_block = nullptr, multiply_block_bytes = nullptr;  // null: panel by panel
};

// Returns the kernels of the best instruction set here, or of the instruction set named `only`.
const Dense& dense_of(const char* only, Type type);

}  // namespace pensieve
