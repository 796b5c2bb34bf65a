// The handler of commit: fresh keys and values of the accepted path into the pages, in place.
#include <cstring>

#include "handler.h"

namespace eaglejax {
namespace {

// pages_k, pages_v [L, P, p, K, h] (the results are the same memory), fresh_k, fresh_v [L, B, n, K, h],
// page table [B, S], lengths [B], path [B, m], count [B]. Rows past a table or a pool are dropped.
ffi::Error commit(ffi::AnyBuffer pages_k, ffi::AnyBuffer pages_v, ffi::AnyBuffer fresh_k,
                  ffi::AnyBuffer fresh_v, ffi::AnyBuffer table, ffi::AnyBuffer lengths,
                  ffi::AnyBuffer path, ffi::AnyBuffer count, ffi::Result<ffi::AnyBuffer> out_k,
                  ffi::Result<ffi::AnyBuffer> out_v) {
  const auto pd = pages_k.dimensions(), fd = fresh_k.dimensions();
  const auto td = table.dimensions(), md = path.dimensions();
  for (const ffi::AnyBuffer* x : {&pages_k, &pages_v, &fresh_k, &fresh_v})
    if (!is(*x, ffi::F32)) return bad("commit: expected float32 pages and fresh rows");
  for (const ffi::AnyBuffer* x : {&table, &lengths, &path, &count})
    if (!is(*x, ffi::S32)) return bad("commit: expected int32 page table, lengths, path and count");
  if (pd.size() != 5 || fd.size() != 5 || !alike(pages_k, pages_v) || !alike(fresh_k, fresh_v) ||
      !alike(pages_k, *out_k) || !alike(pages_v, *out_v) || pd[0] != fd[0] || pd[3] != fd[3] ||
      pd[4] != fd[4])
    return bad("commit: expected pages [L, P, p, K, h] and fresh rows [L, B, n, K, h]");
  const int64_t batch = fd[1], n = fd[2];
  if (td.size() != 2 || md.size() != 2 || td[0] != batch || md[0] != batch ||
      lengths.dimensions().size() != 1 || lengths.dimensions()[0] != batch ||
      count.dimensions().size() != 1 || count.dimensions()[0] != batch)
    return bad("commit: page table [B, S], lengths [B], path [B, m] and count [B] do not fit");
  const void* const from[] = {pages_k.untyped_data(), pages_v.untyped_data()};
  void* const to[] = {out_k->untyped_data(), out_v->untyped_data()};
  for (int i = 0; i < 2; ++i)
    if (from[i] != to[i]) std::memcpy(to[i], from[i], pages_k.size_bytes());

  const int64_t layers = pd[0], pages = pd[1], page_size = pd[2], row = pd[3] * pd[4];
  const int32_t *tables = table.typed_data<int32_t>(), *length = lengths.typed_data<int32_t>();
  const int32_t *nodes = path.typed_data<int32_t>(), *counts = count.typed_data<int32_t>();
  const float *k = fresh_k.typed_data<float>(), *v = fresh_v.typed_data<float>();
  float *to_k = out_k->typed_data<float>(), *to_v = out_v->typed_data<float>();
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t steps = std::min<int64_t>(counts[b], md[1]);
    for (int64_t i = 0; i < steps; ++i) {
      const int64_t position = static_cast<int64_t>(length[b]) + i;
      if (position < 0 || position / page_size >= td[1]) continue;
      const int64_t page = tables[b * td[1] + position / page_size];
      if (page < 0 || page >= pages) continue;
      const int64_t node = std::clamp<int64_t>(nodes[b * md[1] + i], 0, n - 1);
      for (int64_t layer = 0; layer < layers; ++layer) {
        const int64_t at = ((layer * pages + page) * page_size + position % page_size) * row;
        const int64_t source = ((layer * batch + b) * n + node) * row;
        std::memcpy(to_k + at, k + source, row * sizeof(float));
        std::memcpy(to_v + at, v + source, row * sizeof(float));
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxCommit, commit,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace eaglejax
