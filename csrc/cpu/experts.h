// The MLP of a layer with experts. A router chooses a few experts for each row.
#pragma once

#include "layer.h"

namespace pensieve {

struct Experts {
  Linear router;           // has one output (logit) for each expert
  const Linear *in, *out;  // one for each expert; all experts have the same sizes
  int32_t num_experts, num_chosen;
  int32_t normalised;  // 1: divide the shares of the chosen experts by their sum
  int32_t rounded;     // 1: round the shares to Elements
};

// Buffers for a limited number of rows; more rows are computed in several parts.
struct ExpertBuffers {
  int32_t rows_max;
  void* logits;    // (rows, experts) Element
  void* rows;      // (rows * chosen, hidden) Element
  void* gated;     // (rows * chosen, mlp) Element
  float* outputs;  // (rows * chosen, hidden)
};

struct ExpertCall {
  const Experts* experts;
  const ExpertBuffers* buffers;
  const void* rows;  // (rows, hidden) Element, without gaps
  int32_t num_rows;
  int64_t element_bytes;
  float* out;          // (rows, hidden)
  const Linear* then;  // the product that is computed afterwards; null: not known
};
void run_experts(const Dense& dense, const ExpertCall& call, int num_threads);

}  // namespace pensieve
