// Send rows to their experts, and combine the experts' outputs.
//
//   router  computes the logits (as Elements) of all rows; chooses each row's num_chosen largest logits and computes
//           their shares
//   sort    sorts the *pairs* (row, expert) by expert, so that an expert's rows are contiguous in the buffers
//   in      computes gate and up for the rows of each expert
//   out     computes the experts' outputs (hidden width, floats)
//   sum     adds, for each row, the outputs of its experts times their shares, the largest share first
//
// In a decode batch of 16 rows, most of 128 experts get one or two rows. Threads would be idle if they shared the rows
// of one expert after the other, or if each thread took a whole expert. So threads claim panels (layer.h) of all experts
// from one counter. While a thread works on a panel, it prefetches the first bytes of the next panel. Each expert's
// weights are read once for all of its rows.
//
// A row's result depends on that row alone: its logits choose its experts, products do not depend on other rows, and
// outputs are added in the order of the row's own shares.
//
// Logits of bfloat16 and fp16 have few bits, so some are often equal. Then the sorting algorithm decides which experts
// are chosen. The transformers library chooses with torch.topk, which uses the algorithms of the C++ library on a CPU.
// `take_largest` makes the same comparisons in the same order, so it chooses the same experts. (Torch sorts the softmax.
// This code sorts the differences from which the softmax is computed.) tests/kernels/layer/test_ties.py compares the
// chosen experts.
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "copies.h"
#include "rows.h"
#include "threads.h"

namespace pensieve {
namespace {

// The rows first..end of the buffers, and the weights by which they are multiplied. A piece of the work multiplies one of
// `num_row_parts` parts of the rows by one panel.
struct Group {
  int expert, first, end;
  const Linear* linear = nullptr;
  int num_row_parts = 0, first_piece = 0;
};

// Multiplies each group's rows by the group's weights. `product` has everything except the weights. All groups' weights
// have the same sizes. `next_linear` is multiplied next: its first panels are prefetched.
void multiply_groups(Multiply kernel, int lanes, std::vector<Group>& groups, const Product& product,
                     const Linear* next_linear, int num_threads) {
  if (groups.empty()) return;
  const Linear& any = *groups[0].linear;
  const int width = any.activation ? lanes : 2 * lanes;
  const int panels = (any.outputs + width - 1) / width;
  int pieces = 0;
  for (Group& group : groups) {
    group.num_row_parts = (group.end - group.first + kRowsAtOnce - 1) / kRowsAtOnce;
    group.first_piece = pieces;
    pieces += panels * group.num_row_parts;
  }
  auto group_of = [&](int piece) -> const Group& {
    auto after = [](int piece, const Group& group) { return piece < group.first_piece; };
    return *(std::upper_bound(groups.begin(), groups.end(), piece, after) - 1);
  };
  each_piece(num_threads, pieces, [&](int piece, int following) {
    const Group& group = group_of(piece);
    const int panel = (piece - group.first_piece) / group.num_row_parts;
    const char* ahead = nullptr;
    if (following >= pieces) {
      ahead = panel_of(next_linear, lanes, following - pieces);
    } else {
      const Group& after = group_of(following);
      const int panel_after = (following - after.first_piece) / after.num_row_parts;
      if (&after != &group || panel_after != panel) ahead = panel_of(after.linear, lanes, panel_after);
    }
    Product own = product;
    own.linear = group.linear;
    const int stretch = (piece - group.first_piece) % group.num_row_parts, rows = group.end - group.first;
    kernel(own, panel, group.first + int(int64_t(rows) * stretch / group.num_row_parts),
           group.first + int(int64_t(rows) * (stretch + 1) / group.num_row_parts), ahead);
  });
}

// Buffers for one part of the rows. The thread that calls run_experts keeps them between calls.
struct Pairs {
  std::vector<int32_t> experts;  // (rows * chosen), by row
  std::vector<float> shares;     // (rows * chosen)
  std::vector<Scored> scored;    // (rows * experts)
  std::vector<int32_t> places;   // (rows * chosen): the pair's row in the buffers
  std::vector<int32_t> sources;  // for each row of the buffers: the source row
  std::vector<int32_t> counts;   // by expert
  std::vector<Group> groups;
  Copies routed, given, gated;
};

// Chooses like torch.topk (see above), which uses a partial sort to choose few of many values.
void take_largest(Scored* scored, int32_t num_experts, int32_t num_chosen) {
  const auto larger = [](const Scored& one, const Scored& other) { return one.score > other.score; };
  Scored* const end = scored + num_experts;
  if (num_chosen * 64 <= num_experts) {
    std::partial_sort(scored, scored + num_chosen, end, larger);
  } else {
    Scored* const last = scored + num_chosen - 1;
    std::nth_element(scored, last, end, larger);
    std::sort(scored, last, larger);
  }
}

void sort_pairs(Pairs& pairs, int num_experts, int num_chosen) {
  const int count = int(pairs.experts.size());
  pairs.counts.assign(num_experts, 0);
  for (int expert : pairs.experts) ++pairs.counts[expert];
  pairs.groups.clear();
  int first = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    const int rows = pairs.counts[expert];
    if (rows) pairs.groups.push_back({expert, first, first + rows});
    pairs.counts[expert] = first;  // from now on, the next place of this expert
    first += rows;
  }
  pairs.places.resize(count);
  pairs.sources.resize(count);
  for (int pair = 0; pair < count; ++pair) {
    const int place = pairs.counts[pairs.experts[pair]]++;
    pairs.places[pair] = place;
    pairs.sources[place] = pair / num_chosen;
  }
}

// Multiplies all pairs by their experts' weights. `linears` has an element for each expert. `row_of(place)` is the
// address of a pair's row. Rows that are not contiguous are copied to `gathered`.
template <typename RowOf>
void multiply_pairs(const Dense& dense, Pairs& pairs, const Linear* linears, Copies& copies, Product product,
                    RowOf row_of, void* gathered, int64_t row_bytes, const Linear* next_linear, int num_threads) {
  for (Group& group : pairs.groups) group.linear = linears + group.expert;
  const Linear& any = *linears;
  const int count = product.num_rows;
  if (any.scales) {
    copies.quantise(dense, any, product, row_of, num_threads);
    multiply_groups(dense.multiply_bytes, dense.lanes, pairs.groups, product, next_linear, num_threads);
    return;
  }
  if (dense.widen) {
    copies.widen(dense, any.inputs, product, row_of, num_threads);
  } else if (gathered) {
    char* const to = static_cast<char*>(gathered);
    each_row(num_threads, count,
             [&](int place) { std::memcpy(to + place * row_bytes, row_of(place), row_bytes); });
    product.rows = gathered;
  }
  multiply_groups(dense.multiply, dense.lanes, pairs.groups, product, next_linear, num_threads);
}

void run_part(const Dense& dense, const ExpertCall& call, Pairs& pairs, int num_threads) {
  const Experts& experts = *call.experts;
  const ExpertBuffers& buffers = *call.buffers;
  const int rows = call.num_rows, chosen = experts.num_chosen, count = rows * chosen;
  const int hidden = experts.out[0].outputs, wide = experts.in[0].outputs;
  const int64_t row_bytes = hidden * call.element_bytes, wide_bytes = wide * call.element_bytes;

  const char* const given = static_cast<const char*>(call.rows);
  Product routed{nullptr, call.rows, hidden, rows, buffers.logits, experts.num_experts, 0};
  if (dense.widen)
    pairs.routed.widen(dense, experts.router.inputs, routed, [&](int row) { return given + row * row_bytes; }, num_threads);
  pairs.groups.assign(1, {0, 0, rows, &experts.router});
  multiply_groups(dense.multiply, dense.lanes, pairs.groups, routed, nullptr, num_threads);
  pairs.experts.resize(count);
  pairs.shares.resize(count);
  pairs.scored.resize(int64_t(rows) * experts.num_experts);
  const Choosing choosing{buffers.logits, experts.num_experts, chosen, experts.normalised,
                          experts.rounded, pairs.experts.data(), pairs.shares.data(), pairs.scored.data(), take_largest};
  each_row(num_threads, rows, [&](int row) { dense.choose(choosing, row); });
  sort_pairs(pairs, experts.num_experts, chosen);

  multiply_pairs(
      dense, pairs, experts.in, pairs.given, {nullptr, nullptr, hidden, count, buffers.gated, wide, 0},
      [&](int place) { return given + pairs.sources[place] * row_bytes; }, buffers.rows, row_bytes,
      nullptr, num_threads);
  const char* const gated = static_cast<const char*>(buffers.gated);
  multiply_pairs(
      dense, pairs, experts.out, pairs.gated, {nullptr, gated, wide, count, buffers.outputs, hidden, 1},
      [&](int place) { return gated + place * wide_bytes; }, nullptr, wide_bytes, call.then,
      num_threads);

  each_row(num_threads, rows, [&](int row) {
    float* const sum = call.out + int64_t(row) * hidden;
    for (int i = 0; i < chosen; ++i) {
      const float share = pairs.shares[row * chosen + i];
      const float* output = buffers.outputs + int64_t(pairs.places[row * chosen + i]) * hidden;
      if (i)
        for (int column = 0; column < hidden; ++column) sum[column] += share * output[column];
      else
        for (int column = 0; column < hidden; ++column) sum[column] = share * output[column];
    }
  });
}

}  // namespace

void run_experts(const Dense& dense, const ExpertCall& call, int num_threads) {
  static thread_local Pairs pairs;
  const int hidden = call.experts->out[0].outputs;
  for (int first = 0; first < call.num_rows; first += call.buffers->rows_max) {
    ExpertCall part = call;
    const int left = call.num_rows - first;
    part.num_rows = left < call.buffers->rows_max ? left : call.buffers->rows_max;
    part.rows = static_cast<const char*>(call.rows) + int64_t(first) * hidden * call.element_bytes;
    part.out = call.out + int64_t(first) * hidden;
    if (part.num_rows < left) part.then = nullptr;
    run_part(dense, part, pairs, num_threads);
  }
}

}  // namespace pensieve
