// Convert the input rows of products: to bytes if the weights are int8, or to floats if `Dense` has a `widen`.
//
// The calling thread allocates the memory before the work is shared, because a helper cannot report a failure.
#pragma once

#include <vector>

#include "layer.h"
#include "rows.h"

namespace pensieve {

// Returns the distance in bytes between copied rows of `row_bytes` bytes. At a multiple of 4 KiB, rows would share few
// cache sets and evict each other.
inline int64_t row_distance(int64_t row_bytes) { return row_bytes % 4096 ? row_bytes : row_bytes + 64; }

// The thread that calls a product keeps this object between calls.
class Copies {
 public:
  // Converts the input rows of a product to bytes. They get the width and the padding of the weights `linear`. `row_of`
  // returns a row's address.
  template <typename RowOf>
  void quantise(const Dense& dense, const Linear& linear, Product& product, RowOf row_of, int num_threads) {
    const int32_t width = linear.width, padded = linear.inputs;
    const int64_t stride = row_distance(padded);
    bytes_.resize(stride * product.num_rows);
    steps_.resize(product.num_rows);
    uint8_t* const to = bytes_.data();
    float* const steps = steps_.data();
    each_row(num_threads, product.num_rows,
             [&](int row) { steps[row] = dense.quantise(row_of(row), width, padded, to + row * stride); });
    product.rows = to;
    product.row_stride = stride;
    product.row_scales = steps;
  }

  // Converts the rows to floats.
  template <typename RowOf>
  void widen(const Dense& dense, int32_t width, Product& product, RowOf row_of, int num_threads) {
    floats_.resize(int64_t(product.num_rows) * width);
    float* const to = floats_.data();
    each_row(num_threads, product.num_rows,
             [&](int row) { dense.widen(row_of(row), width, to + int64_t(row) * width); });
    product.rows = to;
    product.row_stride = width;
  }

 private:
  std::vector<uint8_t> bytes_;
  std::vector<float> steps_;  // the quantisation step (scale) of each row of bytes
  std::vector<float> floats_;
};

}  // namespace pensieve
