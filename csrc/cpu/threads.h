// A team of threads that work on the pieces of one operation.
//
// `work` is called in the calling thread and in up to `num_threads` - 1 helpers at once. Each call claims
// pieces from a counter until none is left, so `work` must not care how many calls there are, or when they
// come. See threads.cpp for how the threads wait.
#pragma once

namespace pensieve {

using Act = void (*)(void*);
void run_on_threads(int num_threads, Act act, void* work);

template <typename Work>
void on_threads(int num_threads, Work& work) {
  if (num_threads > 1)
    run_on_threads(num_threads, [](void* work) { (*static_cast<Work*>(work))(); }, &work);
  else
    work();
}

}  // namespace pensieve
