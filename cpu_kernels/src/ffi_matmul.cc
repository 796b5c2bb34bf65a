// The handler of the quantised matrix product.
#include "handler.h"
#include "parallel.h"
#include "quant_memory.h"

namespace eaglejax {
namespace {

// x [..., K], weights uint8 [L, N/8, K/32, block], layer int32 [] -> out [..., N].
ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights,
                  ffi::AnyBuffer layer, ffi::Result<ffi::AnyBuffer> out,
                  bool quantised) {
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
  Matrix w = {weights.typed_data<uint8_t>(), k, n, wd[3] == kBlock4};
  w.blocks += index * w.bytes();
  const float* in = x.typed_data<float>();
  float* result = out->typed_data<float>();
  const int64_t tiles = n / kLanes, cycles = 2 * (k / kGroup) * (20 + 8 * rows) + 1;
  const auto over_tiles = [&](const auto& run) {  // pieces are whole pairs of tiles
    parallel_for(pool, (tiles + 1) / 2, kPieceCycles / cycles + 1, [&](int64_t a, int64_t b) {
      run(2 * a, std::min(2 * b, tiles), Output{result + 2 * a * kLanes, n, nullptr});
    });
  };
  if (!quantised) {
    over_tiles([&](int64_t first, int64_t last, const Output& to) {
      choice().table->float_matmul(in, w, rows, first, last, to);
    });
    return ffi::Error::Success();
  }
  const QuantMemory memory(rows, k);
  parallel_for(pool, rows, kPieceCycles / (k + 1) + 1, [&](int64_t first, int64_t last) {
    choice().table->quantise(in, k, first, last, memory.view);
  });
  over_tiles([&](int64_t first, int64_t last, const Output& to) {
    choice().table->matmul(memory.view, w, rows, first, last, to);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxMatmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("quantised"));

}  // namespace eaglejax
