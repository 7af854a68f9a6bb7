// Measure the time of each stage of the layers, in nanoseconds, in the calling thread.
//
// The clock is read only if an array for the sums is set (`pensieve bench step --parts`). The array may be set or
// removed only while no thread computes.
#pragma once

#include <chrono>
#include <cstdint>

namespace pensieve {

enum class Stage : int {  // in the order of PARTS in pensieve/kernels/layer/cpu.py
  kNormBefore,
  kHeadsIn,
  kRotation,
  kWriteKv,
  kAttend,
  kHeadsOut,
  kSumAndNorm,
  kMlpIn,
  kMlpOut,
  kSum,
  kAlone,  // a product that is not part of a layer
  kNumStages,
};

inline int64_t* g_parts = nullptr;

class Laps {
 public:
  Laps() : to_(g_parts) {
    if (to_) last_ = Clock::now();
  }

  // Adds the time since the previous lap to this stage.
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
