// Torch's OpenMP threads spin for a while after each of its own operations. A second pool would have to
// share the cores with them, so the work runs on the same threads: Python hands over the GOMP_parallel
// of the library that torch has loaded. Without it, one thread does everything.
#pragma once

namespace pensieve {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
extern Parallel g_parallel;

template <typename Work>
void on_threads(int num_threads, Work& work) {
  if (num_threads > 1 && g_parallel) {
    g_parallel([](void* work) { (*static_cast<Work*>(work))(); }, &work, unsigned(num_threads), 0);
  } else {
    work();
  }
}

}  // namespace pensieve
