// The kernels with AVX2 and the integer dot product of AVX-512 VNNI (its 256-bit form, VL); built
// with those flags, called only where the CPU has them.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(EAGLEJAX_EMULATE_VNNI)
#define EAGLEJAX_AVX2 1
#define EAGLEJAX_VNNI 1
#define EAGLEJAX_ISA avx512
#include "kernels.inc"

namespace eaglejax {
const Kernels* avx512_kernels() { return &avx512::kTable; }
}  // namespace eaglejax
#else
#include "kernels.h"
namespace eaglejax {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace eaglejax
#endif
