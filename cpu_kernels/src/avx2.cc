// The kernels with AVX2, FMA and F16C; built with those flags, called only where the CPU has them.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define EAGLEJAX_AVX2 1
#define EAGLEJAX_ISA avx2
#include "kernels.inc"

namespace eaglejax {
const Kernels* avx2_kernels() { return &avx2::kTable; }
}  // namespace eaglejax
#else
#include "kernels.h"
namespace eaglejax {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace eaglejax
#endif
