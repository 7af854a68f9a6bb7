// Implement the team of threads.h: how threads share an operation, and how they wait.
//
// An operation (a *round*) ends when its pieces are done, not when every thread has arrived. So a round does not wait
// for a helper that the operating system has not scheduled. The caller opens the gate, works, and closes the gate.
// Then the caller waits only for the helpers that are inside. A helper that comes later finds the gate closed. With
// OpenMP, each thread must arrive at each barrier, and a single busy process elsewhere on the machine makes every
// barrier cost a time slice.
//
//   gate     wanted: helpers that may enter (0 while the gate is closed); inside: helpers that have not left
//   round    number of the round; a helper waits until the number changes
//
//   caller   sets run_work_ and work_; gate = (wanted, 0); ++round; wakes sleepers; works; closes the gate; waits
//            for inside == 0
//   helper   waits for another round; enters (a compare-and-swap that fails if the gate is closed); works;
//            leaves; wakes the caller if it was the last helper inside and the gate is closed
//
// `run_work_` and `work_` need no lock. They are written only while the gate is closed and no helper is inside, and
// read only inside. A helper may wake up too late and enter the next round, or enter a round twice. This is
// harmless, because a helper claims only pieces that are left.
//
// Waiting threads spin for kSpin and then sleep. Spinning is the fastest way to wait while every thread has a core. On
// a shared core, spinning delays the other thread. kSpin is about the cost of a sleep and a wake-up, so a wait costs at
// most twice as much as the better of spinning and sleeping.
//
// The team serves one caller at a time. A second caller, or a caller inside a round, works alone. After a fork, the
// child process has no helpers and starts a new team.
#include "threads.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <climits>
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
constexpr uint32_t kWanted = 1u << 16;  // higher bits: helpers wanted; lower bits: helpers inside

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while a word keeps its value. On Linux, the sleeping and the waking thread share no lock. So a thread that is
// suspended in this code delays no other thread. (The condition variables of the C++ library have locks.)
class Sleep {
 public:
#if defined(__linux__)
  // May return early.
  void while_is(std::atomic<uint32_t>& word, uint32_t value) { call(word, FUTEX_WAIT_PRIVATE, value); }
  void end(std::atomic<uint32_t>& word) { call(word, FUTEX_WAKE_PRIVATE, INT_MAX); }

 private:
  static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free,
                "a futex must be a lock-free word of 4 bytes");

  static void call(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
  }
#else
  void while_is(std::atomic<uint32_t>& word, uint32_t value) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (word.load() == value) condition_.wait(lock);
  }
  void end(std::atomic<uint32_t>&) {
    std::lock_guard<std::mutex> lock(mutex_);
    condition_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
#endif
};

// A word that threads can wait for until it has a certain value.
class Word {
 public:
  std::atomic<uint32_t> value{0};

  template <typename Condition>
  void wait(Condition is_true) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (is_true(value.load())) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    sleeping_.fetch_add(1);
    for (uint32_t now; !is_true(now = value.load());) sleep_.while_is(value, now);
    sleeping_.fetch_sub(1);
  }

  // Call this after the word has changed. Either this call sees the sleeper, or the sleeper sees the change.
  void wake() {
    if (sleeping_.load()) sleep_.end(value);
  }

 private:
  std::atomic<int> sleeping_{0};
  Sleep sleep_;
};

class Team {
 public:
  // Returns false if another caller uses the team.
  bool run(int num_helpers, RunWork run_work, void* work) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    if (num_helpers > num_helpers_) hire(num_helpers);
    run_work_ = run_work;
    work_ = work;
    const int wanted = num_helpers < num_helpers_ ? num_helpers : num_helpers_;
    gate_.value.store(uint32_t(wanted) * kWanted);
    round_.value.fetch_add(1);
    round_.wake();
    run_work(work);
    if (gate_.value.fetch_and(kWanted - 1) % kWanted) gate_.wait([](uint32_t gate) { return gate == 0; });
    taken_.store(false, std::memory_order_release);
    return true;
  }

 private:
  void hire(int num_helpers) {
    sigset_t all, before;  // signals go to the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; num_helpers_ < num_helpers && num_helpers_ < kHelpersMax; ++num_helpers_)
        std::thread([this, number = num_helpers_, seen = round_.value.load()] { help(number, seen); }).detach();
    } catch (const std::exception&) {  // another helper could not be started; the other threads do the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help(int number, uint32_t seen) {
    for (;;) {
      round_.wait([&](uint32_t round) { return round != seen; });
      seen = round_.value.load();
      uint32_t gate = gate_.value.load();
      bool entered = false;
      while (gate / kWanted > uint32_t(number) &&
             !(entered = gate_.value.compare_exchange_weak(gate, gate + 1))) {
      }
      if (!entered) continue;
      seen = round_.value.load();
      run_work_(work_);
      if (gate_.value.fetch_sub(1) == 1) gate_.wake();
    }
  }

  std::atomic<bool> taken_{false};
  int num_helpers_ = 0;
  RunWork run_work_ = nullptr;
  void* work_ = nullptr;
  alignas(64) Word gate_;
  alignas(64) Word round_;
};

std::atomic<Team*> g_team{nullptr};  // never destroyed: its helpers run until the process ends

// Returns null if there is no memory for a team.
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

void run_on_threads(int num_threads, RunWork run_work, void* work) {
  Team* const found = team();
  if (!found || !found->run(num_threads - 1, run_work, work)) run_work(work);
}

}  // namespace pensieve
