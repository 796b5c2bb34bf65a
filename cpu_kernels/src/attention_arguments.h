// What the handlers that attend have in common: checked arguments and memory.
#pragma once

#include <memory>

#include "handler.h"

namespace eaglejax {

// The committed prefix: pages, page table and lengths, every page id checked before it is used.
// Layers a.layer and up are read, `layers` of them.
inline ffi::Error prefix(const ffi::AnyBuffer& pages_k, const ffi::AnyBuffer& pages_v,
                         const ffi::AnyBuffer& table, const ffi::AnyBuffer& lengths, int64_t layers,
                         Attention& a) {
  const auto pd = pages_k.dimensions(), td = table.dimensions();
  if (!is(pages_k, ffi::F32) || !is(pages_v, ffi::F32) || !is(table, ffi::S32) ||
      !is(lengths, ffi::S32))
    return bad("attention: expected float32 pages, int32 page table and lengths");
  if (pd.size() != 5 || !alike(pages_k, pages_v) || td.size() != 2 || pd[3] != a.kv_heads ||
      pd[4] != a.width || td[0] != a.batch || lengths.dimensions().size() != 1 ||
      lengths.dimensions()[0] != a.batch)
    return bad("attention: pages [L, P, p, K, h], table [B, S] and lengths [B] do not fit");
  a.pages_k = pages_k.typed_data<float>();
  a.pages_v = pages_v.typed_data<float>();
  a.page_table = table.typed_data<int32_t>();
  a.lengths = lengths.typed_data<int32_t>();
  a.pages = pd[1], a.page_size = pd[2], a.table_width = td[1];
  if (a.layer < 0 || layers > pd[0] - a.layer)
    return bad("attention: layer " + std::to_string(a.layer + layers - 1) + " of " +
               std::to_string(pd[0]));
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t length = a.lengths[b];
    if (length < 0 || length > a.table_width * a.page_size)
      return bad("attention: length " + std::to_string(length) + " of sequence " +
                 std::to_string(b) + " exceeds its page table");
    for (int64_t i = 0; i * a.page_size < length; ++i) {
      const int32_t page = a.page_table[b * a.table_width + i];
      if (page < 0 || page >= a.pages)
        return bad("attention: page id " + std::to_string(page) + " of " +
                   std::to_string(a.pages));
    }
  }
  return ffi::Error::Success();
}

// ancestors bool [B, n, m], or [0] for causal.
inline ffi::Error mask(const ffi::AnyBuffer& ancestors, Attention& a) {
  const auto dims = ancestors.dimensions();
  if (dims.size() == 1 && dims[0] == 0) return ffi::Error::Success();
  if (!is(ancestors, ffi::PRED) || dims.size() != 3 || dims[0] != a.batch || dims[1] != a.n ||
      dims[2] != a.m)
    return bad("attention: expected ancestors bool [B, n, m]");
  a.ancestors = ancestors.typed_data<bool>();
  return ffi::Error::Success();
}

// Memory of one thread for any tile of `a`, whose prefix has been checked.
class AttentionMemory {
 public:
  explicit AttentionMemory(const Attention& a)
      : keys_(longest(a)),
        floats_(new float[kTileQueries * (rounded(keys_) + rounded(a.width))]),
        pointers_(new const float*[2 * keys_]),
        scratch{rounded(keys_),
                rounded(a.width),
                floats_.get(),
                floats_.get() + kTileQueries * rounded(keys_),
                pointers_.get(),
                pointers_.get() + keys_} {}

  // Keys that a row sees at most.
  static int64_t longest(const Attention& a) {
    int64_t prefix = 0;
    for (int64_t b = 0; a.pages_k && b < a.batch; ++b)
      prefix = std::max<int64_t>(prefix, a.lengths[b]);
    return prefix + a.m;
  }

 private:
  static int64_t rounded(int64_t x) { return (x + 7) / 8 * 8; }

  const int64_t keys_;
  const std::unique_ptr<float[]> floats_;
  const std::unique_ptr<const float*[]> pointers_;

 public:
  const AttentionScratch scratch;
};

}  // namespace eaglejax
