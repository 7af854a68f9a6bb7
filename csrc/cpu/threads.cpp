// How the team of threads.h shares an operation, and how its threads wait.
//
// An operation (a *round*) is over when its pieces are done, not when every thread has come: a helper that
// the operating system runs elsewhere, or not at all, is not waited for. The caller opens the gate, works,
// and closes it; then it waits only for the helpers that are inside. A helper that comes later finds the
// gate closed. That is the difference to OpenMP, where each thread has to arrive at each barrier, and one
// busy process beside ours makes every barrier cost a time slice of the operating system.
//
//   gate     wanted (helpers that may enter; none while it is closed), inside (that have not left)
//   round    counts rounds; a helper waits until it has changed
//
//   caller   act, work; gate = (wanted, 0); ++round; wakes who sleeps; works; closes; waits for
//            inside == 0
//   helper   waits for another round; enters (a compare-and-swap that fails where the gate is closed); works;
//            leaves; wakes the caller if it was the last one and the gate is closed
//
// `act` and `work` are written only while the gate is closed and nobody is inside, and read only inside, so
// they need no lock. A helper may enter a round that began while it was coming for the one before, and may
// enter one twice; both find what there is to claim.
//
// Threads that wait spin for kSpin and sleep then: spinning is the fastest way to wait while every thread
// has a core, and takes the core from whoever is waited for where they have not. kSpin is about what a sleep
// and a wake-up cost, so no wait costs more than twice what the best choice would have.
//
// One caller at a time has the team; a second one, or one inside of a round, works alone. After a fork the
// child has no helpers and begins anew.
#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace pensieve {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);
constexpr int kHelpersMax = 1023;
constexpr uint32_t kWanted = 1u << 16;  // above it how many are wanted, below it how many are inside

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A place to sleep until a condition is true, for threads that make it true with one atomic operation.
class Bed {
 public:
  template <typename Condition>
  void wait(Condition is_true) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (is_true()) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    condition_.wait(lock, is_true);
    sleeping_.fetch_sub(1);
  }

  // After the condition may have become true. Either this sees the sleeper, or the sleeper the condition.
  void wake() {
    if (!sleeping_.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    condition_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<int> sleeping_{0};
};

class Team {
 public:
  // False if somebody else has it.
  bool run(int num_helpers, Act act, void* work) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    if (num_helpers > num_helpers_) hire(num_helpers);
    act_ = act;
    work_ = work;
    const int wanted = num_helpers < num_helpers_ ? num_helpers : num_helpers_;
    gate_.store(uint32_t(wanted) * kWanted);
    round_.fetch_add(1);
    helpers_.wake();
    act(work);
    if (gate_.fetch_and(kWanted - 1) % kWanted) caller_.wait([this] { return gate_.load() == 0; });
    taken_.store(false, std::memory_order_release);
    return true;
  }

 private:
  void hire(int num_helpers) {
    sigset_t all, before;  // signals are for the threads that know of them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; num_helpers_ < num_helpers && num_helpers_ < kHelpersMax; ++num_helpers_)
        std::thread([this, number = num_helpers_, seen = round_.load()] { help(number, seen); }).detach();
    } catch (const std::exception&) {  // no thread or no memory is left for another; the others do the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help(int number, uint32_t seen) {
    for (;;) {
      helpers_.wait([&] { return round_.load() != seen; });
      seen = round_.load();
      uint32_t gate = gate_.load();
      bool entered = false;
      while (gate / kWanted > uint32_t(number) &&
             !(entered = gate_.compare_exchange_weak(gate, gate + 1))) {
      }
      if (!entered) continue;
      seen = round_.load();
      act_(work_);
      if (gate_.fetch_sub(1) == 1) caller_.wake();
    }
  }

  std::atomic<bool> taken_{false};
  int num_helpers_ = 0;
  Act act_ = nullptr;
  void* work_ = nullptr;
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  Bed helpers_, caller_;
};

std::atomic<Team*> g_team{nullptr};  // never destroyed: its helpers run until the process ends

// Null if there is no memory for one.
Team* team() {
  static const bool prepared = [] {
    g_team = new (std::nothrow) Team;
    pthread_atfork(nullptr, nullptr, [] { g_team = new (std::nothrow) Team; });
    return true;
  }();
  (void)prepared;
  return g_team;
}

}  // namespace

void run_on_threads(int num_threads, Act act, void* work) {
  Team* const found = team();
  if (!found || !found->run(num_threads - 1, act, work)) act(work);
}

}  // namespace pensieve
