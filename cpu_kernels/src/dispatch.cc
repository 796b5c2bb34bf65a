// Which instruction set runs: the best one the machine has, or the one EAGLEJAX_CPU_ISA names.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace eaglejax {
namespace {

bool machine_has_avx2() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

}  // namespace

const Kernels* choose_kernels(const char** name, const char** error) {
  const char* wanted = std::getenv("EAGLEJAX_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  const bool avx2 = avx2_kernels() != nullptr && machine_has_avx2();
  if (any ? avx2 : std::strcmp(wanted, "avx2") == 0) {
    *name = "avx2";
    if (avx2) return avx2_kernels();
    *error = "EAGLEJAX_CPU_ISA=avx2: this machine or this build has no AVX2, FMA and F16C";
    return nullptr;
  }
  if (any || std::strcmp(wanted, "portable") == 0) {
    *name = "portable";
    return portable_kernels();
  }
  *error = "EAGLEJAX_CPU_ISA: expected avx2 or portable";
  return nullptr;
}

}  // namespace eaglejax
