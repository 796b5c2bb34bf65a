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

bool machine_has_vnni() {
#if defined(EAGLEJAX_EMULATE_VNNI)
  return machine_has_avx2();
#elif defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  return machine_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

struct InstructionSet {
  const char* name;
  const Kernels* table;  // null where this build lacks it
  bool runs;
};

}  // namespace

const Kernels* choose_kernels(const char** name, const char** error) {
  const char* wanted = std::getenv("EAGLEJAX_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  const InstructionSet best_first[] = {
      {"avx512", avx512_kernels(), machine_has_vnni()},
      {"avx2", avx2_kernels(), machine_has_avx2()},
      {"portable", portable_kernels(), true},
  };
  *error = "EAGLEJAX_CPU_ISA: expected avx512, avx2 or portable";
  for (const InstructionSet& set : best_first) {
    const bool named = !any && std::strcmp(wanted, set.name) == 0;
    if (!any && !named) continue;
    if (set.table != nullptr && set.runs) {
      *name = set.name, *error = nullptr;
      return set.table;
    }
    if (named) *error = "EAGLEJAX_CPU_ISA: this machine or this build lacks that instruction set";
  }
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
