// The C interface of a decoder layer on CPUs.
//
// There are functions for the whole layer, and functions for its dense parts (products, norms, rotation). Callers of
// the functions for dense parts compute the attention themselves.
#include "layer.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "copies.h"
#include "experts.h"
#include "laps.h"
#include "rows.h"
#include "threads.h"

namespace pensieve {
namespace {

constexpr int kRowsOfDecodes = 64;    // up to this number of rows, reading weights is the limit, so blocks do not help
constexpr int kRowBytes = 512 << 10;  // up to this size, all rows together stay in the cache from panel to panel
constexpr int kPiecesOfThread = 4;    // minimum blocks per thread: blocks are small, so the last block is soon done

struct Worker {
  const Dense& dense;
  int64_t element_bytes;
  int num_threads;

  Worker(const char* only, int32_t type, int num_threads)
      : dense(dense_of(only, Type(type))),
        element_bytes(Type(type) == Type::kFloat ? 4 : 2),
        num_threads(num_threads) {}

  // Multiplies rows by weights. Before that, quantises the rows to bytes if the weights are int8, or widens them if
  // products take floats.
  void multiply(Product product, const Linear* then) const {
    static thread_local Copies copies;
    const Linear& linear = *product.linear;
    const char* const rows = static_cast<const char*>(product.rows);
    const int64_t row_bytes = product.row_stride * element_bytes;
    auto row_of = [=](int row) { return rows + row * row_bytes; };
    if (linear.scales) {
      copies.quantise(dense, linear, product, row_of, num_threads);
      multiply_by(dense.multiply_bytes, dense.multiply_block_bytes, product, then);
    } else if (dense.widen) {
      copies.widen(dense, linear.inputs, product, row_of, num_threads);
      multiply_by(dense.multiply, nullptr, product, then);
    } else {
      multiply_by(dense.multiply, dense.multiply_block, product, then);
    }
  }

  // A thread that finds no more panels prefetches the first panels of `then`, the next product.
  void multiply_by(Multiply kernel, MultiplyBlock block, const Product& product, const Linear* then) const {
    const Linear& linear = *product.linear;
    const int64_t row_bytes = linear.inputs * (linear.scales ? 1 : element_bytes);
    if (block && product.num_rows > kRowsOfDecodes && product.num_rows * row_bytes > kRowBytes)
      return multiply_in_blocks(block, product, then);
    const int width = linear.activation ? dense.lanes : 2 * dense.lanes;
    const int stretches = (product.num_rows + kRowsAtOnce - 1) / kRowsAtOnce;
    const int pieces = (linear.outputs + width - 1) / width * stretches;
    each_piece(num_threads, pieces, [&](int piece, int following) {
      const int panel = piece / stretches, stretch = piece % stretches;
      const char* ahead = nullptr;
      if (following >= pieces)
        ahead = panel_of(then, dense.lanes, following - pieces);
      else if (following / stretches != panel)
        ahead = panel_of(&linear, dense.lanes, following / stretches);
      kernel(product, panel, int(int64_t(product.num_rows) * stretch / stretches),
             int(int64_t(product.num_rows) * (stretch + 1) / stretches), ahead);
    });
  }

  // Multiplies rows that do not stay in the cache from one panel to the next. A piece is some rows and several panels.
  void multiply_in_blocks(MultiplyBlock kernel, Product product, const Linear* then) const {
    const Linear& linear = *product.linear;
    static thread_local std::vector<char> copied;
    if (!linear.scales && row_distance(product.row_stride * element_bytes) != product.row_stride * element_bytes) {
      const int64_t from_bytes = product.row_stride * element_bytes, to_bytes = row_distance(from_bytes);
      const char* const from = static_cast<const char*>(product.rows);
      copied.resize(to_bytes * product.num_rows);
      char* const to = copied.data();
      each_row(product.num_rows, [&](int row) {
        std::memcpy(to + row * to_bytes, from + row * from_bytes, linear.inputs * element_bytes);
      });
      product.rows = to;
      product.row_stride = to_bytes / element_bytes;
    }
    const int width = linear.activation ? dense.lanes : 2 * dense.lanes;
    const int num_panels = (linear.outputs + width - 1) / width;
    const int stretches = (product.num_rows + kBlockRows - 1) / kBlockRows;
    const int each = (product.num_rows + 32 * stretches - 1) / (32 * stretches) * 32;  // whole tiles
    const int most = std::max(1, num_panels * stretches / (kPiecesOfThread * num_threads));
    const int group = std::min(most, kBlockPanels);
    const int pieces = (num_panels + group - 1) / group * stretches;
    each_piece(num_threads, pieces, [&](int piece, int following) {
      const int panel = piece / stretches * group, first = piece % stretches * each;
      const Linear* after = following < pieces ? &linear : then;
      const int64_t panel_after = following < pieces ? following / stretches * group : following - pieces;
      kernel(product, panel, std::min(panel + group, num_panels), first, std::min(first + each, product.num_rows),
             panel_of(after, dense.lanes, panel_after));
    });
  }

  template <typename DoRow>
  void each_row(int num_rows, DoRow do_row) const {
    pensieve::each_row(num_threads, num_rows, do_row);
  }
};

}  // namespace

// A decoder layer.
struct Layer {
  int32_t type, index, hidden;
  int32_t num_heads, num_kv_heads, head_size;
  Norm attention_before, query_norm, key_norm, attention_after, mlp_before, mlp_after;
  Linear attention_in, attention_out, mlp_in, mlp_out;
  float factor;  // multiplies outputs that are added to the residual
  AttentionKind kind;
  const Linear* then;  // the product that is computed after this layer; null: not known
  const Experts* experts;  // replace mlp_in and mlp_out; null: no experts
  int32_t parallel;  // 1: the MLP reads the layer's input (through mlp_before), not the sum after the attention
};

// Scratch memory for all rows of a call.
struct Buffers {
  void* normed;   // (rows, hidden) Element
  void* rotated;   // (rows, queries + keys + values) Element, rotated
  void* gated;    // (rows, mlp) Element
  float* added;   // (rows, hidden)
  float* sum;     // (rows, hidden)
  void* attended; // (rows, heads * head_size) Element
  ExpertBuffers experts;
};

// One iteration's positions, and the addresses of all layers' keys and values.
struct Pages {
  int32_t num_rows, num_slices;
  const void *cosines, *sines;
  int32_t rotation_float, rotary;
  const int64_t* slot_mapping;
  const int32_t *page_table, *slice_offsets, *slice_turns, *slice_starts;
  const int32_t *slice_groups, *group_pages;  // slices that share pages (multi_token_attention.cpp)
  int64_t num_groups, pages_max, num_pages;
  char* arena;  // (layers, pages, keys and values, KV heads, slots, row)
  int32_t slots, num_threads;
  Stored stored;  // the format of a row
};

// Runs work that may fail to allocate copies of rows. Returns 0, or 3 if there was too little memory. After 3, the
// output is undefined.
template <typename Work>
int32_t answered(Work work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 3;
  }
}

}  // namespace pensieve

using namespace pensieve;

#pragma GCC visibility push(default)
extern "C" {

// Returns how many outputs a vector holds; a panel has two vectors.
int32_t pensieve_lanes(const char* only) { return dense_of(only, Type::kFloat).lanes; }

int32_t pensieve_multiply(const char* only, int32_t type, const Product* product, int32_t num_threads) {
  return answered([&] {
    Laps laps;
    Worker(only, type, num_threads).multiply(*product, nullptr);
    laps.lap(Stage::kAlone);
  });
}

// From now on, adds the nanoseconds of each Stage to the given array. Null stops this. Returns the number of stages.
int32_t pensieve_measure_parts(int64_t* sums) {
  g_parts = sums;
  return int32_t(Stage::kNumStages);
}

// Computes queries, keys and values from the residual; rotates queries and keys by position if `rotary` is not 0.
static void before_attention(const char* only, const Layer* layer, const Buffers* buffers,
                             const void* residual, const void* cosines, const void* sines,
                             int32_t rotation_float, int32_t rotary, int32_t num_rows, int32_t num_threads) {
  Laps laps;
  const Worker worker(only, layer->type, num_threads);
  const Dense& dense = worker.dense;
  const void* input = residual;
  if (layer->attention_before.weight) {
    const SumAndNorm task{
        residual, layer->type == 0, nullptr, {}, layer->attention_before, 1.0f, nullptr, buffers->normed, layer->hidden};
    worker.each_row(num_rows, [&](int row) { dense.sum_and_norm(task, row); });
    input = buffers->normed;
  }
  laps.lap(Stage::kNormBefore);
  const int32_t width = layer->attention_in.outputs;
  worker.multiply({&layer->attention_in, input, layer->hidden, num_rows, buffers->rotated, width, 0},
                  &layer->attention_out);
  laps.lap(Stage::kHeadsIn);
  const Rotating rotating{buffers->rotated, width, cosines,
                          sines, rotation_float, layer->query_norm,
                          layer->key_norm, layer->num_heads, layer->num_kv_heads,
                          layer->head_size, rotary};
  if (rotary || layer->query_norm.weight)
    worker.each_row(num_rows, [&](int row) { dense.rotate_row(rotating, row); });
  laps.lap(Stage::kRotation);
}

int32_t pensieve_before_attention(const char* only, const Layer* layer, const Buffers* buffers,
                                  const void* residual, const void* cosines, const void* sines,
                                  int32_t rotation_float, int32_t rotary, int32_t num_rows, int32_t num_threads) {
  return answered([&] {
    before_attention(only, layer, buffers, residual, cosines, sines, rotation_float, rotary, num_rows,
                     num_threads);
  });
}

// Computes the next layer's residual from the attention's result, (rows, heads * head_size).
static void after_attention(const char* only, const Layer* layer, const Buffers* buffers,
                            const void* residual, const void* attended, void* out,
                            int32_t num_rows, int32_t num_threads) {
  Laps laps;
  const Worker worker(only, layer->type, num_threads);
  const Dense& dense = worker.dense;
  const int32_t hidden = layer->hidden, wide = layer->mlp_in.outputs;
  worker.multiply({&layer->attention_out, attended, layer->attention_out.width, num_rows,
                   buffers->added, hidden, 1},
                  layer->experts ? &layer->experts->router : &layer->mlp_in);
  laps.lap(Stage::kHeadsOut);
  SumAndNorm middle{residual, layer->type == 0, buffers->added, layer->attention_after,
                    layer->mlp_before, layer->factor, buffers->sum, buffers->normed, hidden};
  if (layer->parallel) {
    // Each row's sum is computed before its norm, because `residual` and `normed` may be the same buffer.
    middle.before = {};
    middle.out = nullptr;
    const SumAndNorm mlp_norm{
        residual, layer->type == 0, nullptr, {}, layer->mlp_before, 1.0f, nullptr, buffers->normed, hidden};
    worker.each_row(num_rows, [&](int row) {
      dense.sum_and_norm(middle, row);
      dense.sum_and_norm(mlp_norm, row);
    });
  } else {
    worker.each_row(num_rows, [&](int row) { dense.sum_and_norm(middle, row); });
  }
  laps.lap(Stage::kSumAndNorm);
  if (layer->experts) {
    run_experts(dense,
                {layer->experts, &buffers->experts, buffers->normed, num_rows, worker.element_bytes,
                 buffers->added, layer->then},
                num_threads);
  } else {
    worker.multiply({&layer->mlp_in, buffers->normed, hidden, num_rows, buffers->gated, wide, 0},
                    &layer->mlp_out);
    laps.lap(Stage::kMlpIn);
    worker.multiply({&layer->mlp_out, buffers->gated, wide, num_rows, buffers->added, hidden, 1},
                    layer->then);
  }
  laps.lap(Stage::kMlpOut);
  const SumAndNorm last{buffers->sum, 1, buffers->added, layer->mlp_after, {}, layer->factor, buffers->sum, out, hidden};
  worker.each_row(num_rows, [&](int row) { dense.sum_and_norm(last, row); });
  laps.lap(Stage::kSum);
}

int32_t pensieve_after_attention(const char* only, const Layer* layer, const Buffers* buffers,
                                 const void* residual, const void* attended, void* out,
                                 int32_t num_rows, int32_t num_threads) {
  return answered(
      [&] { after_attention(only, layer, buffers, residual, attended, out, num_rows, num_threads); });
}

// Runs the whole layer and writes its keys and values to their slots. Unless num_kept is -1, only the kept rows are
// computed after the attention, and `out` has only these rows. Returns 0, or the status of the
// step that failed.
int32_t pensieve_layer(const char* only, const Layer* layer, const Buffers* buffers,
                       const Pages* pages, const void* residual, const int64_t* kept,
                       int32_t num_kept, void* out) {
  const int64_t bytes = layer->type == 0 ? 4 : 2;
  const bool codes = pages->stored == Stored::kCodes;
  const int64_t stored_bytes = codes ? 1 : bytes;  // the unit of page strides
  const int64_t row = layer->head_size + (codes ? kScaleBytes : 0);
  const int64_t head = pages->slots * row, half = head * layer->num_kv_heads;
  char* keys = pages->arena + layer->index * pages->num_pages * 2 * half * stored_bytes;
  char* values = keys + half * stored_bytes;
  const int64_t width = layer->attention_in.outputs, size = layer->head_size;
  const char* query = static_cast<const char*>(buffers->rotated);
  const char* key = query + layer->num_heads * size * bytes;
  const char* value = key + layer->num_kv_heads * size * bytes;
  int32_t answer = pensieve_before_attention(only, layer, buffers, residual, pages->cosines, pages->sines,
                                             pages->rotation_float, pages->rotary, pages->num_rows,
                                             pages->num_threads);
  if (answer) return answer;
  Laps laps;
  answer = pensieve_write_kv(
      only, layer->type, int32_t(pages->stored), key, width * bytes, size * bytes, value, width * bytes,
      size * bytes, pages->slot_mapping, pages->num_rows, layer->num_kv_heads, pages->slots,
      row * stored_bytes, keys, values, 2 * half * stored_bytes, head * stored_bytes, pages->num_pages,
      pages->num_threads);
  if (answer) return answer;
  laps.lap(Stage::kWriteKv);
  answer = pensieve_multi_token_attention(
      only, layer->type, int32_t(pages->stored), query, width, size, keys, values, 2 * half, head, pages->num_pages,
      pages->page_table, pages->pages_max, pages->slice_offsets, pages->slice_turns,
      pages->slice_starts, pages->slice_groups, pages->group_pages, int32_t(pages->num_groups), pages->num_slices, layer->num_heads, layer->num_kv_heads, pages->slots,
      layer->head_size, &layer->kind, buffers->attended, layer->num_heads * size, size,
      pages->num_threads);
  if (answer) return answer;
  laps.lap(Stage::kAttend);
  const void* attended = buffers->attended;
  int32_t num_rows = pages->num_rows;
  if (num_kept >= 0) {  // gather the kept rows in buffers that are no longer used
    const int64_t wide = layer->num_heads * size * bytes, narrow = layer->hidden * bytes;
    char *to = static_cast<char*>(buffers->rotated), *base = static_cast<char*>(buffers->normed);
    for (int32_t i = 0; i < num_kept; ++i) {
      std::memcpy(to + i * wide, static_cast<const char*>(attended) + kept[i] * wide, wide);
      std::memcpy(base + i * narrow, static_cast<const char*>(residual) + kept[i] * narrow, narrow);
    }
    attended = to;
    residual = base;
    num_rows = num_kept;
  }
  return pensieve_after_attention(only, layer, buffers, residual, attended, out, num_rows,
                                  pages->num_threads);
}

// Runs the layers in sequence. `state` (rows, hidden) holds the residuals between layers. The last layer computes only
// the kept rows after its attention.
int32_t pensieve_layers(const char* only, const Layer* const* layers, int32_t num_layers,
                        const Buffers* buffers, const Pages* pages, const void* residual,
                        const int64_t* kept, int32_t num_kept, void* state, void* out) {
  for (int32_t i = 0; i + 1 < num_layers; ++i) {
    const int32_t answer =
        pensieve_layer(only, layers[i], buffers, pages, residual, nullptr, -1, state);
    if (answer) return answer;
    residual = state;  // a layer reads its residual before it writes the next residual
  }
  return pensieve_layer(only, layers[num_layers - 1], buffers, pages, residual, kept, num_kept, out);
}

// out (rows, hidden) = norm(rows)
void pensieve_normalise(const char* only, int32_t type, const Norm* norm, const void* rows, void* out,
                        int32_t num_rows, int32_t num_threads) {
  const Worker worker(only, type, num_threads);
  const SumAndNorm task{rows, type == 0, nullptr, {}, *norm, 1.0f, nullptr, out, norm->width};
  worker.each_row(num_rows, [&](int row) { worker.dense.sum_and_norm(task, row); });
}

// Returns, for each row, the first column with the largest value, or -1 if any value of the row is not finite.
void pensieve_argmax(const char* only, const float* rows, int64_t row_stride, int32_t num_rows,
                     int32_t width, int64_t* out, int32_t num_threads) {
  const Worker worker(only, 0, num_threads);
  worker.each_row(num_rows, [&](int row) {
    out[row] = worker.dense.largest(rows + row * row_stride, width);
  });
}
}
#pragma GCC visibility pop
