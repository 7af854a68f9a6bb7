// Choose the best instruction set that this processor supports, and return its name.
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <cstring>

#include "attention.h"
#include "layer.h"

namespace pensieve {

namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() {
  unsigned a, b, c, d;  // older compilers have no query for F16C
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

[[maybe_unused]] bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

[[maybe_unused]] bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
[[maybe_unused]] bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

#if HAS_NEON || HAS_NEON_BF16
enum class Feature { kDotProduct,
                     kBfloat16,
                     kInt8Matrix };

// Whether the operating system reports this feature of the processor.
bool has(Feature feature) {
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // a bit of AT_HWCAP; the other bits are of AT_HWCAP2
  constexpr unsigned long kI8mm = 1ul << 13, kBf16 = 1ul << 14;
  if (feature == Feature::kDotProduct) return getauxval(AT_HWCAP) & kAsimdDp;
  return getauxval(AT_HWCAP2) & (feature == Feature::kBfloat16 ? kBf16 : kI8mm);
#elif defined(__APPLE__)
  const char* name = feature == Feature::kDotProduct ? "hw.optional.arm.FEAT_DotProd"
                     : feature == Feature::kBfloat16 ? "hw.optional.arm.FEAT_BF16"
                                                     : "hw.optional.arm.FEAT_I8MM";
  int32_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
#else
  (void)feature;
  return false;
#endif
}
#endif

bool runs(const Kernel& kernel) {
#if HAS_AMX
  if (&kernel == &kAmx) return has_bf16() && amx_works();
#endif
#if HAS_AVX512_BF16
  if (&kernel == &kAvx512Bf16) return has_bf16();
#endif
#if HAS_AVX512_VNNI
  if (&kernel == &kAvx512Vnni) return has_vnni();
#endif
#if HAS_AVX512
  if (&kernel == &kAvx512) return has_avx512();
#endif
#if HAS_AVX2
  if (&kernel == &kAvx2) return has_avx2();
#endif
#if HAS_NEON_BF16
  if (&kernel == &kNeonBf16) return has(Feature::kBfloat16) && has(Feature::kInt8Matrix);
#endif
#if HAS_NEON
  if (&kernel == &kNeon) return has(Feature::kDotProduct);
#endif
  return &kernel == &kPlain;
}

// Whether to use this kernel if no kernel is named. kAvx512Bf16 is used only if its products are fast: without tiles,
// Intel's cores multiply pairs of bfloat16 at half the speed of floats. AMD's cores multiply them at twice the speed.
bool prefers(const Kernel& kernel) {
#if HAS_AVX512_VNNI && HAS_AVX512_BF16
  if (&kernel == &kAvx512Bf16) return !__builtin_cpu_is("intel");
#endif
  (void)kernel;
  return true;
}

const Kernel* const kKernels[] = {
#if HAS_AMX
    &kAmx,
#endif
#if HAS_AVX512_BF16
    &kAvx512Bf16,
#endif
#if HAS_AVX512_VNNI
    &kAvx512Vnni,
#endif
#if HAS_AVX512
    &kAvx512,
#endif
#if HAS_AVX2
    &kAvx2,
#endif
#if HAS_NEON_BF16
    &kNeonBf16,
#endif
#if HAS_NEON
    &kNeon,
#endif
    &kPlain};

}  // namespace

Attend attend_of(const Kernel& kernel, Type type, Stored stored) {
#if HAS_AMX && HAS_AVX512_VNNI
  if (&kernel == &kAmx && stored == Stored::kCodes) return kAvx512Vnni.codes(type).attend;  // AMX has no kernel for codes
#endif
  return kernel.attend(type, stored);
}

const Kernel* kernel_for(int head_size, const char* only) {
  const bool any = !only || !*only;
  for (const Kernel* kernel : kKernels)
    if (runs(*kernel) && head_size % kernel->head_multiple == 0 &&
        (any ? prefers(*kernel) : !std::strcmp(only, kernel->name)))
      return kernel;
  return nullptr;
}

const Dense& dense_of(const char* only, Type type) {
  const Kernel* kernel = kernel_for(0, only);
  if (!kernel) kernel = &kPlain;
  return kernel->dense(type);
}

}  // namespace pensieve

#pragma GCC visibility push(default)
extern "C" {

// Returns the name of the instruction set that is used, or null if none supports this head size.
const char* pensieve_kernel(int32_t head_size, const char* only) {
  const pensieve::Kernel* kernel = pensieve::kernel_for(head_size, only);
  return kernel ? kernel->name : nullptr;
}
}
#pragma GCC visibility pop
