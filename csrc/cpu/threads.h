// Share the pieces of one operation among a team of threads.
//
// `work` is called in the calling thread and in up to `num_threads` - 1 helpers at once. Each call claims pieces from
// a counter until none is left. So `work` must not depend on how many calls there are, or when they run. threads.cpp
// explains how the threads wait.
#pragma once

#include <algorithm>
#include <atomic>

namespace pensieve {

constexpr int kPiecesToClaimEarly = 4;  // minimum number of pieces per thread to claim the next piece early

using RunWork = void (*)(void*);
void run_on_threads(int num_threads, RunWork run, void* work);

template <typename Work>
void on_threads(int num_threads, Work& work) {
  if (num_threads > 1)
    run_on_threads(num_threads, [](void* work) { (*static_cast<Work*>(work))(); }, &work);
  else
    work();
}

// Calls `do_piece(piece, following)` for each of `num_pieces` pieces, on threads that claim pieces one by one.
// `following` is the thread's probable next piece, so that `do_piece` can prefetch the first bytes of that piece.
// If `following` is `num_pieces` or more, the thread has no more pieces of this operation. Then `following` stands
// for piece `following - num_pieces` of the next operation. A thread claims its next piece before it begins a
// piece. With few pieces per thread, it claims the next piece afterwards, because a claimed piece would wait while
// other threads are idle.
template <typename DoPiece>
void each_piece(int num_threads, int num_pieces, DoPiece do_piece) {
  const bool early = num_pieces >= kPiecesToClaimEarly * num_threads;
  std::atomic<int> next{0};
  auto work = [&] {
    for (int piece = next.fetch_add(1), following; piece < num_pieces; piece = following) {
      following = early ? next.fetch_add(1) : piece + num_threads;
      do_piece(piece, following);
      if (!early) following = next.fetch_add(1);
    }
  };
  on_threads(std::min(num_pieces, num_threads), work);
}

}  // namespace pensieve
