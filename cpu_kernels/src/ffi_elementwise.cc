// Handlers of normalisation and activation functions.
#include "handler.h"
#include "parallel.h"

namespace eaglejax {
namespace {

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

}  // namespace

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

}  // namespace eaglejax
