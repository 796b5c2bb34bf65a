// Which instruction set runs: the best one the machine has, or the one EAGLEJAX_CPU_ISA names.
#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "xla/ffi/api/c_api.h"

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

const Choice& choice() {
  static const Choice chosen;
  return chosen;
}

}  // namespace eaglejax

extern "C" {
// The FFI version that this library was built against.
int eaglejax_ffi_api_major() { return XLA_FFI_API_MAJOR; }
int eaglejax_ffi_api_minor() { return XLA_FFI_API_MINOR; }
// Name of the instruction set in use, or null; the reason is then in eaglejax_isa_error.
const char* eaglejax_isa() {
  return eaglejax::choice().table ? eaglejax::choice().name : nullptr;
}
const char* eaglejax_isa_error() { return eaglejax::choice().error; }
}
