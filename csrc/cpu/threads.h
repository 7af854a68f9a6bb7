// Runs work on torch's own OpenMP threads.
//
// They spin for a while after each of torch's operations, so a second pool would have to share the cores
// with them. Python passes the address of GOMP_parallel of the library that torch has loaded
// (pensieve/kernels/cpu_library.py). Without it, the calling thread does everything.
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
