// Where the time of layers goes: nanoseconds of each stage, added up by the thread that calls.
//
// No clock is read until somebody gives a place for the sums (`pensieve bench step --parts`), which is given and taken
// back while nobody computes.
#pragma once

#include <chrono>
#include <cstdint>

namespace pensieve {

enum class Stage : int {  // as PARTS in pensieve/kernels/layer/cpu.py
  kNormBefore,
  kHeadsIn,
  kTurn,
  kWriteKv,
  kAttend,
  kHeadsOut,
  kMiddle,
  kMlpIn,
  kMlpOut,
  kLast,
  kAlone,  // a product that is not part of a layer
  kNumStages,
};

inline int64_t* g_parts = nullptr;

class Laps {
 public:
  Laps() : to_(g_parts) {
    if (to_) last_ = Clock::now();
  }

  // What passed since the lap before was this stage.
  void lap(Stage stage) {
    if (!to_) return;
    const Clock::time_point now = Clock::now();
    to_[int(stage)] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  int64_t* const to_;
  Clock::time_point last_;
};

}  // namespace pensieve
