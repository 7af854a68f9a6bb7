// Copies of rows as products take them: bytes where weights are int8, floats where `Dense` widens.
//
// Its memory is taken in the thread that calls, before the work is shared: a helper that failed to get some could
// tell nobody.
#pragma once

#include <vector>

#include "layer.h"
#include "rows.h"

namespace pensieve {

// Bytes between rows that are `row_bytes` apart by nature. Rows at a distance of 4 KiB or a multiple would share few
// sets of the cache, and push one another out.
inline int64_t apart(int64_t row_bytes) { return row_bytes % 4096 ? row_bytes : row_bytes + 64; }

// Kept from call to call by the thread that computes.
class Copies {
 public:
  // The rows of a product become bytes, for weights like `linear`; `row_of` says where a row lies.
  template <typename RowOf>
  void quantise(const Dense& dense, const Linear& linear, Product& product, RowOf row_of, int num_threads) {
    const int32_t width = linear.width, padded = linear.inputs;
    const int64_t stride = apart(padded);
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

  // They become floats.
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
  std::vector<float> steps_;  // of each row of bytes
  std::vector<float> floats_;
};

}  // namespace pensieve
