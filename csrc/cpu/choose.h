// Choose a row's experts from a router's logits, in vectors of LANES floats. Included once per instruction set.
//
// A *share* is an expert's softmax over all experts. experts.cpp explains the choice among equal logits.
#pragma once

#include "layer.h"
#include "vector.h"

namespace {

template <typename Element>
void choose(const pensieve::Choosing& choosing, int32_t row) {
  const int count = choosing.num_experts, chosen = choosing.num_chosen;
  const Element* logits = static_cast<const Element*>(choosing.logits) + int64_t(row) * count;
  int32_t* experts = choosing.experts + int64_t(row) * chosen;
  float* shares = choosing.shares + int64_t(row) * chosen;
  float most = -INFINITY, nan_sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float x = read_one(logits + i);
    most = x > most ? x : most;
    nan_sum += x - x;  // becomes NaN if a logit is not finite
  }
  if (nan_sum != 0.0f) {  // also true for NaN; then the row's result must not be finite, whichever experts are chosen
    for (int i = 0; i < chosen; ++i) {
      experts[i] = i;
      shares[i] = __builtin_nanf("");
    }
    return;
  }
  const float scale = 1.44269504088896f;
  float sum = 0.0f;
  int i = 0;
  for (; i + LANES <= count; i += LANES)
    sum += sum_of(exp2_nonpositive((read(logits + i) - most) * scale));
  for (; i < count; ++i) sum += exp2_nonpositive(splat((read_one(logits + i) - most) * scale))[0];
  pensieve::Scored* const scored = choosing.scored + int64_t(row) * count;
  for (i = 0; i < count; ++i) scored[i] = {read_one(logits + i) - most, i};
  choosing.take_largest(scored, count, chosen);
  float all = 0.0f;
  for (i = 0; i < chosen; ++i) {
    experts[i] = scored[i].expert;
    shares[i] = exp2_nonpositive(splat(scored[i].score * scale))[0] / sum;
    all += shares[i];
  }
  for (i = 0; i < chosen; ++i) {
    if (choosing.normalised) shares[i] /= all;
    if (choosing.rounded) {
      Element whole;
      write_one(&whole, shares[i]);
      shares[i] = read_one(&whole);
    }
  }
}

}  // namespace
