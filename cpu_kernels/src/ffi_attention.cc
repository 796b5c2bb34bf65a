// Handlers of attention.
#include "attention_arguments.h"
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

void run_attention(ffi::ThreadPool& pool, const Attention& a) {
  const AttentionTiles tiles(a, pool.num_threads());
  // About the cycles of a tile; a piece should take longer than waking a thread.
  const int64_t cycles = tiles.rows * tiles.heads * AttentionMemory::longest(a) * a.width / 4 + 1;
  parallel_for(pool, tiles.count, kPieceCycles / cycles + 1, [&](int64_t first, int64_t last) {
    choice().table->attention(a, tiles, first, last, AttentionMemory(a).scratch);
  });
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
  if (!is(layer, ffi::S32) || layer.element_count() != 1)
    return bad("attention: expected one int32 layer");
  a.layer = *layer.typed_data<int32_t>();
  if (ffi::Error e = prefix(pages_k, pages_v, table, lengths, 1, a); e.failure()) return e;
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
