// The kernels in plain C++.
#define EAGLEJAX_ISA portable
#include "kernels.inc"

namespace eaglejax {
const Kernels* portable_kernels() { return &portable::kTable; }
}  // namespace eaglejax
