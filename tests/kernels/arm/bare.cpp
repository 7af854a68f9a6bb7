// The functions of the C and C++ libraries that csrc/cpu needs, for a program without an operating system.
//
// There is one thread, and memory is never freed. The emulator sets `features`, and clears `taken` between calls.
#include <cstddef>
#include <cstdint>

#include "../../../csrc/cpu/threads.h"

extern "C" {

uint64_t features[2];  // answers of getauxval: AT_HWCAP, AT_HWCAP2
uint64_t taken;
alignas(64) static char memory[64 << 20];

void* aligned_alloc(size_t, size_t bytes) {
  void* const given = memory + taken;
  taken += (bytes + 63) / 64 * 64;
  if (taken > sizeof memory) __builtin_trap();
  return given;
}

void free(void*) {}

unsigned long getauxval(unsigned long type) { return features[type == 26]; }

int strcmp(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a - *b;
}

void* memcpy(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}

void* memmove(void* to, const void* from, size_t bytes) {
  char* const target = static_cast<char*>(to);
  const char* const source = static_cast<const char*>(from);
  if (target <= source) return memcpy(to, from, bytes);
  for (size_t i = bytes; i-- > 0;) target[i] = source[i];
  return to;
}

int sched_yield() { return 0; }  // there is one thread

void* memset(void* to, int value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<char*>(to)[i] = char(value);
  return to;
}

float exp2f(float x) {  // only for x <= 0
  const int whole = x < -150.0f ? -150 : int(x);
  const double rest = (double(x) - whole) * 0.69314718055994531;
  double term = 1.0, sum = 1.0;
  for (int i = 1; i < 16; ++i) sum += term *= rest / i;
  for (int i = 0; i > whole; --i) sum *= 0.5;
  return float(sum);
}

void failed() __asm__("_ZNSt3__122__libcpp_verbose_abortEPKcz");
void failed() { __builtin_trap(); }
int64_t no_clock() __asm__("_ZNSt3__16chrono12steady_clock3nowEv");
int64_t no_clock() { __builtin_trap(); }  // used only when parts of a layer are timed
int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }
void* __dso_handle;
}

void* operator new(size_t bytes) { return aligned_alloc(64, bytes); }
void operator delete(void*) noexcept {}
void operator delete(void*, size_t) noexcept {}

namespace pensieve {

void run_on_threads(int, RunWork run_work, void* work) { run_work(work); }

}  // namespace pensieve
