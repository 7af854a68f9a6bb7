// A team of threads that work on the pieces of one operation.
//
// `work` is called in the calling thread and in up to `num_threads` - 1 helpers at once. Each call claims
// pieces from a counter until none is left, so `work` must not care how many calls there are, or when they
// come. See threads.cpp for how the threads wait.
#pragma once

#include <algorithm>
#include <atomic>

namespace pensieve {

constexpr int kPiecesToClaimEarly = 4;  // for each thread

using Act = void (*)(void*);
void run_on_threads(int num_threads, Act act, void* work);

template <typename Work>
void on_threads(int num_threads, Work& work) {
  if (num_threads > 1)
    run_on_threads(num_threads, [](void* work) { (*static_cast<Work*>(work))(); }, &work);
  else
    work();
}

// Calls `act(piece, following)` for each of `num_pieces`, on threads that claim them one by one. `following` is what this
// thread is likely to work on next, for `act` to fetch its first bytes early: a piece, or from `num_pieces` on one of the
// operation behind this one. A thread claims the next piece before it begins one; but where there are few for each,
// only after it, since a claimed piece waits while other threads have nothing to do.
template <typename Act>
void each_piece(int num_threads, int num_pieces, Act act) {
  const bool early = num_pieces >= kPiecesToClaimEarly * num_threads;
  std::atomic<int> next{0};
  auto work = [&] {
    for (int piece = next.fetch_add(1), following; piece < num_pieces; piece = following) {
      following = early ? next.fetch_add(1) : piece + num_threads;
      act(piece, following);
      if (!early) following = next.fetch_add(1);
    }
  };
  on_threads(std::min(num_pieces, num_threads), work);
}

}  // namespace pensieve
