// Handlers of attention.
#include <memory>

#include "handler.h"
#include "parallel.h"

namespace eaglejax {
namespace {

// Sizes of q [B, n, H, h] and fresh keys and values [B, m, K, h] into `a`.
ffi::Error fresh_block(ffi::AnyBuffer q, ffi::AnyBuffer fresh_k, ffi::AnyBuffer fresh_v,
                       ffi::AnyBuffer out, Attention& a) {
  const auto qd = q.dimensions(), kd = fresh_k.dimensions();
  if (!is(q, ffi::F32) || !is(fresh_k, ffi::F32) || !is(fresh_v, ffi::F32) || !is(out, ffi::F32))
    return bad("attention: expected float32 queries, keys, values and results");
  if (qd.size() != 4 || kd.size() != 4 || !alike(fresh_k, fresh_v) || !alike(q, out))
    return bad("attention: expected queries [B, n, H, h], keys and values [B, m, K, h]");
  a.batch = qd[0], a.n = qd[1], a.heads = qd[2], a.width = qd[3];
  a.m = kd[1], a.kv_heads = kd[2];
  if (kd[0] != a.batch || kd[3] != a.width || a.m < a.n || a.kv_heads < 1 ||
      a.heads % a.kv_heads)
    return bad("attention: queries and fresh keys do not fit each other");
  a.q = q.typed_data<float>();
  a.fresh_k = fresh_k.typed_data<float>();
  a.fresh_v = fresh_v.typed_data<float>();
  a.out = out.typed_data<float>();
  return ffi::Error::Success();
}

// The committed prefix: pages, page table and lengths, every page id checked before it is used.
ffi::Error prefix(ffi::AnyBuffer pages_k, ffi::AnyBuffer pages_v, ffi::AnyBuffer table,
                  ffi::AnyBuffer lengths, ffi::AnyBuffer layer, Attention& a) {
  const auto pd = pages_k.dimensions(), td = table.dimensions();
  if (!is(pages_k, ffi::F32) || !is(pages_v, ffi::F32) || !is(table, ffi::S32) ||
      !is(lengths, ffi::S32) || !is(layer, ffi::S32))
    return bad("attention: expected float32 pages, int32 page table, lengths and layer");
  if (pd.size() != 5 || !alike(pages_k, pages_v) || td.size() != 2 || pd[3] != a.kv_heads ||
      pd[4] != a.width || td[0] != a.batch || lengths.dimensions().size() != 1 ||
      lengths.dimensions()[0] != a.batch || layer.element_count() != 1)
    return bad("attention: pages [L, P, p, K, h], table [B, S] and lengths [B] do not fit");
  a.pages_k = pages_k.typed_data<float>();
  a.pages_v = pages_v.typed_data<float>();
  a.page_table = table.typed_data<int32_t>();
  a.lengths = lengths.typed_data<int32_t>();
  a.layer = *layer.typed_data<int32_t>();
  a.pages = pd[1], a.page_size = pd[2], a.table_width = td[1];
  if (a.layer < 0 || a.layer >= pd[0])
    return bad("attention: layer " + std::to_string(a.layer) + " of " + std::to_string(pd[0]));
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

void run_attention(ffi::ThreadPool& pool, const Attention& a) {
  int64_t longest = 0;
  for (int64_t b = 0; a.pages_k && b < a.batch; ++b)
    longest = std::max<int64_t>(longest, a.lengths[b]);
  const int64_t keys = longest + a.m;
  const int64_t keys_rounded = (keys + 7) / 8 * 8, width_rounded = (a.width + 7) / 8 * 8;
  const AttentionTiles tiles(a);
  // About the cycles of a tile; a piece should take longer than waking a thread.
  const int64_t cycles = tiles.rows * tiles.heads * keys * a.width / 4 + 1;
  parallel_for(pool, tiles.count, kPieceCycles / cycles + 1, [&](int64_t first, int64_t last) {
    const std::unique_ptr<float[]> floats(new float[kTileQueries * (keys_rounded + width_rounded)]);
    const std::unique_ptr<const float*[]> pointers(new const float*[2 * keys]);
    const AttentionScratch scratch = {
        keys_rounded,
        width_rounded,
        floats.get(),
        floats.get() + kTileQueries * keys_rounded,
        pointers.get(),
        pointers.get() + keys,
    };
    choice().table->attention(a, first, last, scratch);
  });
}

// ancestors bool [B, n, m], or [0] for causal.
ffi::Error mask(ffi::AnyBuffer ancestors, Attention& a) {
  const auto dims = ancestors.dimensions();
  if (dims.size() == 1 && dims[0] == 0) return ffi::Error::Success();
  if (!is(ancestors, ffi::PRED) || dims.size() != 3 || dims[0] != a.batch || dims[1] != a.n ||
      dims[2] != a.m)
    return bad("attention: expected ancestors bool [B, n, m]");
  a.ancestors = ancestors.typed_data<bool>();
  return ffi::Error::Success();
}

ffi::Error attention_fresh(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer fresh_k,
                           ffi::AnyBuffer fresh_v, ffi::AnyBuffer ancestors,
                           ffi::Result<ffi::AnyBuffer> out) {
  if (choice().table == nullptr) return bad(choice().error);
  Attention a = {};
  if (ffi::Error e = fresh_block(q, fresh_k, fresh_v, *out, a); e.failure()) return e;
  if (ffi::Error e = mask(ancestors, a); e.failure()) return e;
  run_attention(pool, a);
  return ffi::Error::Success();
}

ffi::Error attention_paged(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer fresh_k,
                           ffi::AnyBuffer fresh_v, ffi::AnyBuffer ancestors,
                           ffi::AnyBuffer pages_k, ffi::AnyBuffer pages_v, ffi::AnyBuffer table,
                           ffi::AnyBuffer lengths, ffi::AnyBuffer layer,
                           ffi::Result<ffi::AnyBuffer> out) {
  if (choice().table == nullptr) return bad(choice().error);
  Attention a = {};
  if (ffi::Error e = fresh_block(q, fresh_k, fresh_v, *out, a); e.failure()) return e;
  if (ffi::Error e = mask(ancestors, a); e.failure()) return e;
  if (ffi::Error e = prefix(pages_k, pages_v, table, lengths, layer, a); e.failure()) return e;
  run_attention(pool, a);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxAttentionFresh, attention_fresh,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxAttentionPaged, attention_paged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace eaglejax
