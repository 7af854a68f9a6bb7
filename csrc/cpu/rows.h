// Divide work on single rows (norms, rotation, a router's choice) among the threads of threads.h.
#pragma once

#include "threads.h"

namespace pensieve {

constexpr int kRowsAtOnce = 192;      // rows in one piece of a product; they fit into the cache together with a panel
constexpr int kRowsWorthThreads = 8;  // with fewer rows, waking a thread takes longer than the work

template <typename DoRow>
void each_row(int num_threads, int num_rows, DoRow do_row) {
  if (num_rows < kRowsWorthThreads) num_threads = 1;
  const int step = num_rows / (4 * num_threads) + 1;
  each_piece(num_threads, (num_rows + step - 1) / step, [&](int piece, int) {
    const int first = piece * step, end = std::min(first + step, num_rows);
    for (int row = first; row < end; ++row) do_row(row);
  });
}

}  // namespace pensieve
