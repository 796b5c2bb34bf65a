// Handlers of sampling: arg-max, the seeded sampler, the likeliest draft tokens.
#include <limits>
#include <memory>

#include "handler.h"
#include "parallel.h"

namespace eaglejax {
namespace {

// Rows [..., V] of logits that are not empty.
ffi::Error rows_of(const ffi::AnyBuffer& logits, int64_t& rows, int64_t& n) {
  const auto d = logits.dimensions();
  if (!is(logits, ffi::F32) || d.size() < 1 || d[d.size() - 1] < 1 ||
      d[d.size() - 1] > std::numeric_limits<int32_t>::max())
    return bad("sampling: expected float32 logits [..., V] with V >= 1");
  n = d[d.size() - 1], rows = product(d, 0, d.size() - 1);
  return ffi::Error::Success();
}

// logits [..., V] -> int32 [...].
ffi::Error argmax(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::Result<ffi::AnyBuffer> ids) {
  if (choice().table == nullptr) return bad(choice().error);
  int64_t rows = 0, n = 0;
  if (ffi::Error e = rows_of(logits, rows, n); e.failure()) return e;
  if (!is(*ids, ffi::S32) || static_cast<int64_t>(ids->element_count()) != rows)
    return bad("argmax: expected an int32 result for each row");
  const float* in = logits.typed_data<float>();
  int32_t* out = ids->typed_data<int32_t>();
  parallel_for(pool, rows, 4 * kPieceCycles / n + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) out[r] = choice().table->argmax(in + r * n, n);
  });
  return ffi::Error::Success();
}

// logits [B, N, V], coins [B, N], parameters [B] -> int32 [B, N].
ffi::Error sample(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer coins,
                  ffi::AnyBuffer temperature, ffi::AnyBuffer top_k, ffi::AnyBuffer top_p,
                  ffi::AnyBuffer min_p, ffi::Result<ffi::AnyBuffer> ids) {
  if (choice().table == nullptr) return bad(choice().error);
  int64_t rows = 0, n = 0;
  if (ffi::Error e = rows_of(logits, rows, n); e.failure()) return e;
  const auto d = logits.dimensions(), cd = coins.dimensions();
  if (d.size() != 3 || cd.size() != 2 || cd[0] != d[0] || cd[1] != d[1] || !is(coins, ffi::F32) ||
      !is(*ids, ffi::S32) || !alike(coins, *ids))
    return bad("sample: expected logits [B, N, V], float32 coins and int32 ids [B, N]");
  for (const ffi::AnyBuffer* x : {&temperature, &top_k, &top_p, &min_p}) {
    const auto xd = x->dimensions();
    if (xd.size() != 1 || xd[0] != d[0] || !is(*x, x == &top_k ? ffi::S32 : ffi::F32))
      return bad("sample: expected parameters [B], float32 and an int32 top_k");
  }
  const float *in = logits.typed_data<float>(), *coin = coins.typed_data<float>();
  const float *t = temperature.typed_data<float>(), *p = top_p.typed_data<float>();
  const float* m = min_p.typed_data<float>();
  const int32_t* k = top_k.typed_data<int32_t>();
  int32_t* out = ids->typed_data<int32_t>();
  const int64_t nodes = d[1];
  parallel_for(pool, rows, kPieceCycles / (8 * n) + 1, [&](int64_t first, int64_t last) {
    const std::unique_ptr<float[]> weights(new float[n]);
    for (int64_t r = first; r < last; ++r) {
      const int64_t b = r / nodes;
      const Sampling how = {t[b], p[b], m[b], k[b]};
      out[r] = choice().table->sample(in + r * n, n, how, coin[r], weights.get());
    }
  });
  return ffi::Error::Success();
}

// logits [..., V] -> float32 [..., k], int32 [..., k].
ffi::Error top_k(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::Result<ffi::AnyBuffer> scores,
                 ffi::Result<ffi::AnyBuffer> ids) {
  if (choice().table == nullptr) return bad(choice().error);
  int64_t rows = 0, n = 0;
  if (ffi::Error e = rows_of(logits, rows, n); e.failure()) return e;
  const auto d = logits.dimensions(), sd = scores->dimensions();
  if (!is(*scores, ffi::F32) || !is(*ids, ffi::S32) || !alike(*scores, *ids) ||
      !alike(logits, *scores, d.size() - 1))
    return bad("top_k: expected float32 scores and int32 ids [..., k]");
  const int64_t k = sd[sd.size() - 1];
  if (k < 1 || k > n)
    return bad("top_k: k = " + std::to_string(k) + " of " + std::to_string(n) + " logits");
  const float* in = logits.typed_data<float>();
  float* to = scores->typed_data<float>();
  int32_t* out = ids->typed_data<int32_t>();
  parallel_for(pool, rows, kPieceCycles / n + 1, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      choice().table->top_k(in + r * n, n, k, to + r * k, out + r * k);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxArgmax, argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxSample, sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxTopK, top_k,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace eaglejax
