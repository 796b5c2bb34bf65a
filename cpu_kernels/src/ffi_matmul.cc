// The handler of the quantised matrix product.
#include <memory>

#include "handler.h"
#include "parallel.h"

namespace eaglejax {
namespace {

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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxMatmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace eaglejax
