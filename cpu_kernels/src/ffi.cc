// XLA FFI handlers: check every size, then run the kernels over XLA's thread pool.
#include <algorithm>
#include <memory>
#include <string>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace eaglejax {
namespace {

// The table in use, chosen once; an error from the environment variable is reported by every call.
struct Choice {
  const char* name = nullptr;
  const char* error = nullptr;
  const Kernels* table = choose_kernels(&name, &error);
};
const Choice& choice() {
  static const Choice chosen;
  return chosen;
}

ffi::Error bad(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "eaglejax: " + what);
}

int64_t product(ffi::Span<const int64_t> dims, size_t first, size_t last) {
  int64_t total = 1;
  for (size_t i = first; i < last; ++i) total *= dims[i];
  return total;
}

bool is(const ffi::AnyBuffer& buffer, ffi::DataType type) { return buffer.element_type() == type; }

// Whether two buffers agree in their first `count` dimensions and in their rank.
bool alike(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, size_t count) {
  const auto ad = a.dimensions(), bd = b.dimensions();
  return ad.size() == bd.size() && std::equal(ad.begin(), ad.begin() + count, bd.begin());
}
bool alike(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  return alike(a, b, a.dimensions().size());
}

// About the cycles that a thread must be given so that waking it pays.
constexpr int64_t kPieceCycles = 20000;

// The quantised form of all rows of an activation matrix.
struct Activations {
  std::unique_ptr<int8_t[]> levels;
  std::unique_ptr<float[]> scale, scaled_sum;

  Activations(ffi::ThreadPool& pool, const float* x, int64_t rows, int64_t k)
      : levels(new int8_t[rows * k]),
        scale(new float[rows * (k / kGroup)]),
        scaled_sum(new float[rows * (k / kGroup)]) {
    const int64_t cycles = k + 1;  // of a row
    parallel_for(pool, rows, kPieceCycles / cycles + 1, [&](int64_t first, int64_t last) {
      choice().table->quantise(x, k, first, last, levels.get(), scale.get(), scaled_sum.get());
    });
  }
  QuantRows view() const { return {levels.get(), scale.get(), scaled_sum.get()}; }
};

// x [..., K], weights uint8 [L, N/8, K/32, block], layer int32 [] -> out [..., N].
ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights,
                  ffi::AnyBuffer layer, ffi::Result<ffi::AnyBuffer> out) {
  if (choice().table == nullptr) return bad(choice().error);
  const auto xd = x.dimensions(), wd = weights.dimensions(), od = out->dimensions();
  if (!is(x, ffi::F32) || !is(*out, ffi::F32) || !is(weights, ffi::U8) || !is(layer, ffi::S32))
    return bad("matmul: expected float32 rows, uint8 weights, an int32 layer and float32 results");
  if (xd.size() < 1 || wd.size() != 4 || !alike(x, *out, xd.size() - 1) ||
      layer.element_count() != 1)
    return bad("matmul: expected rows [..., K], weights [L, N/8, K/32, block] and one layer");
  const int64_t k = xd[xd.size() - 1], n = od[od.size() - 1], rows = product(xd, 0, xd.size() - 1);
  if (wd[1] * kLanes != n || wd[2] * kGroup != k)
    return bad("matmul: K = " + std::to_string(k) + ", N = " + std::to_string(n) +
               " do not fit weights of K = " + std::to_string(wd[2] * kGroup) +
               ", N = " + std::to_string(wd[1] * kLanes));
  if (wd[3] != kBlock4 && wd[3] != kBlock8) return bad("matmul: unknown block size");
  const int64_t index = *layer.typed_data<int32_t>();
  if (index < 0 || index >= wd[0])
    return bad("matmul: layer " + std::to_string(index) + " of " + std::to_string(wd[0]));
  const Activations a(pool, x.typed_data<float>(), rows, k);
  const uint8_t* w = weights.typed_data<uint8_t>() + index * wd[1] * wd[2] * wd[3];
  const auto run = wd[3] == kBlock4 ? choice().table->matmul4 : choice().table->matmul8;
  const QuantRows view = a.view();
  float* result = out->typed_data<float>();
  // Pieces are whole pairs of tiles.
  const int64_t tiles = n / kLanes, cycles = 2 * (k / kGroup) * (20 + 8 * rows) + 1;
  parallel_for(pool, (tiles + 1) / 2, kPieceCycles / cycles + 1, [&](int64_t first, int64_t last) {
    run(view, w, rows, k, n, 2 * first, std::min(2 * last, tiles), result);
  });
  return ffi::Error::Success();
}

// x [..., D], scale [L, D], layer [] -> y like x.
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                    ffi::AnyBuffer layer, ffi::Result<ffi::AnyBuffer> y, float eps) {
  if (choice().table == nullptr) return bad(choice().error);
  const auto xd = x.dimensions(), sd = scale.dimensions();
  if (!is(x, ffi::F32) || !is(scale, ffi::F32) || !is(*y, ffi::F32) || !is(layer, ffi::S32))
    return bad("rms_norm: expected float32 arrays and an int32 layer");
  if (xd.size() < 1 || sd.size() != 2 || xd[xd.size() - 1] != sd[1] ||
      !alike(x, *y) || layer.element_count() != 1)
    return bad("rms_norm: expected rows [..., D], scale [L, D] and one layer");
  const int64_t d = sd[1], index = *layer.typed_data<int32_t>();
  if (index < 0 || index >= sd[0])
    return bad("rms_norm: layer " + std::to_string(index) + " of " + std::to_string(sd[0]));
  const float* in = x.typed_data<float>();
  const float* s = scale.typed_data<float>() + index * d;
  float* out = y->typed_data<float>();
  parallel_for(pool, product(xd, 0, xd.size() - 1), 16, [&](int64_t first, int64_t last) {
    choice().table->rms_norm(in, s, eps, d, first, last, out);
  });
  return ffi::Error::Success();
}

// gate, up -> silu(gate) * up, all of one shape.
ffi::Error swiglu(ffi::ThreadPool pool, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                  ffi::Result<ffi::AnyBuffer> y) {
  if (choice().table == nullptr) return bad(choice().error);
  if (!is(gate, ffi::F32) || !is(up, ffi::F32) || !is(*y, ffi::F32) || !alike(gate, up) ||
      !alike(gate, *y))
    return bad("swiglu: expected float32 arrays of one shape");
  const float *g = gate.typed_data<float>(), *u = up.typed_data<float>();
  float* out = y->typed_data<float>();
  parallel_for(pool, static_cast<int64_t>(gate.element_count()), 8192,
               [&](int64_t first, int64_t last) {
                 choice().table->swiglu(g, u, first, last, out);
               });
  return ffi::Error::Success();
}

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxMatmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxRmsNorm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxSwiglu, swiglu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
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
