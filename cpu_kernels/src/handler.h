// What every XLA FFI handler needs: the table in use, error results, and checks of sizes.
#pragma once

#include <algorithm>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace eaglejax {

namespace ffi = xla::ffi;

inline ffi::Error bad(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "eaglejax: " + what);
}

inline int64_t product(ffi::Span<const int64_t> dims, size_t first, size_t last) {
  int64_t total = 1;
  for (size_t i = first; i < last; ++i) total *= dims[i];
  return total;
}

inline bool is(const ffi::AnyBuffer& buffer, ffi::DataType type) { return buffer.element_type() == type; }

// Whether two buffers agree in their first `count` dimensions and in their rank.
inline bool alike(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, size_t count) {
  const auto ad = a.dimensions(), bd = b.dimensions();
  return ad.size() == bd.size() && std::equal(ad.begin(), ad.begin() + count, bd.begin());
}
inline bool alike(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  return alike(a, b, a.dimensions().size());
}

// About the cycles that a thread must be given so that waking it pays.
constexpr int64_t kPieceCycles = 20000;

}  // namespace eaglejax
