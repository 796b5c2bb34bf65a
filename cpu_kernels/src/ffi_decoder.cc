// The handler of a stack of decoder layers.
#include <cstring>
#include <vector>

#include "attention_arguments.h"
#include "handler.h"
#include "parallel.h"
#include "quant_memory.h"
#include "team.h"

namespace eaglejax {
namespace {

// Positions of the arguments.
enum Argument {
  kX,              // [B, n, D]
  kInput,          // [B, n, A], or [0]
  kCos,            // [B, n, h/2]
  kSin,
  kAncestors,      // bool [B, n, m], or [0]
  kBlockK,         // [B, m - n, K, h], or [0]
  kBlockV,
  kPagesK,         // [L, P, p, K, h], or [0]
  kPagesV,
  kTable,          // [B, S]
  kLengths,        // [B]
  kAttentionNorm,  // [layers, D], or [0] with an input
  kMlpNorm,        // [layers, D]
  kQ,              // uint8 [layers, N/8, K/32, block]
  kK,
  kV,
  kO,
  kGate,
  kUp,
  kDown,
  kArguments
};

bool shaped(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> dims) {
  const auto found = buffer.dimensions();
  return is(buffer, ffi::F32) && found.size() == dims.size() &&
         std::equal(found.begin(), found.end(), dims.begin());
}

bool absent(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
}

// A stack [layers, N/8, K/32, block] of matrices from k inputs to n outputs; n = 0 takes any.
ffi::Error matrix(const ffi::AnyBuffer& blocks, int64_t layers, int64_t k, int64_t n,
                  const char* name, Matrix& to) {
  const auto d = blocks.dimensions();
  if (!is(blocks, ffi::U8) || d.size() != 4 || d[0] != layers ||
      (d[3] != kBlock4 && d[3] != kBlock8) || d[2] * kGroup != k || (n && d[1] * kLanes != n))
    return bad(std::string("decoder: the stack ") + name + " does not fit: expected " +
               std::to_string(layers) + " packed matrices of K = " + std::to_string(k) +
               (n ? ", N = " + std::to_string(n) : ""));
  to = {blocks.typed_data<uint8_t>(), k, d[1] * kLanes, d[3] == kBlock4};
  return ffi::Error::Success();
}

ffi::Error decoder(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   float eps, ffi::Span<const int64_t> feature_layers) {
  if (choice().table == nullptr) return bad(choice().error);
  if (args.size() != kArguments || rets.size() != 4) return bad("decoder: wrong number of arrays");
  std::vector<ffi::AnyBuffer> in;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    in.push_back(*buffer);
  }
  std::vector<ffi::AnyBuffer> out;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    out.push_back(**buffer);
  }
  const auto xd = in[kX].dimensions(), fd = out[2].dimensions();
  if (xd.size() != 3 || !is(in[kX], ffi::F32) || fd.size() != 5 || !is(out[2], ffi::F32))
    return bad("decoder: expected rows [B, n, D] and fresh keys [L, B, n, K, h], float32");
  const int64_t batch = xd[0], n = xd[1], hidden = xd[2];
  const int64_t layers = fd[0], kv_heads = fd[3], width = fd[4];
  if (hidden % kGroup || width % kGroup || width < 1 || kv_heads < 1 || layers < 1)
    return bad("decoder: hidden and head sizes must be multiples of 32");

  Decoder d = {};
  d.layers = layers, d.rows = batch * n, d.hidden = hidden, d.eps = eps;
  int64_t inputs = hidden;
  if (!absent(in[kInput])) {
    const auto id = in[kInput].dimensions();
    inputs = id.size() == 3 ? id[2] : 0;
    if (layers != 1 || !shaped(in[kInput], {batch, n, inputs}) || inputs % kGroup)
      return bad("decoder: expected an input [B, n, A] of one layer");
    d.input = in[kInput].typed_data<float>();
  } else if (!shaped(in[kAttentionNorm], {layers, hidden})) {
    return bad("decoder: expected an attention norm [layers, D]");
  } else {
    d.attention_norm = in[kAttentionNorm].typed_data<float>();
  }
  struct Stack {
    Argument at;
    int64_t k, n;
    const char* name;
    Matrix& to;
  };
  const auto read = [&](std::initializer_list<Stack> stacks) {
    for (const Stack& s : stacks)
      if (ffi::Error e = matrix(in[s.at], layers, s.k, s.n, s.name, s.to); e.failure()) return e;
    return ffi::Error::Success();
  };
  const int64_t kv_width = kv_heads * width;
  if (ffi::Error e = read({{kQ, inputs, 0, "q", d.q}, {kGate, hidden, 0, "gate", d.gate}});
      e.failure())
    return e;
  const int64_t q_width = d.q.n;
  d.ffn = d.gate.n;
  if (q_width % kv_width || q_width == 0 || d.ffn % kGroup)
    return bad("decoder: query heads or MLP width do not fit");
  if (ffi::Error e = read({{kK, inputs, kv_width, "k", d.k},
                           {kV, inputs, kv_width, "v", d.v},
                           {kO, q_width, hidden, "o", d.o},
                           {kUp, hidden, d.ffn, "up", d.up},
                           {kDown, d.ffn, hidden, "down", d.down}});
      e.failure())
    return e;
  const int64_t features = static_cast<int64_t>(feature_layers.size());
  if (!shaped(in[kCos], {batch, n, width / 2}) || !shaped(in[kSin], {batch, n, width / 2}) ||
      !shaped(in[kMlpNorm], {layers, hidden}) || !shaped(out[0], {batch, n, hidden}) ||
      !shaped(out[1], {batch, n, features * hidden}) ||
      !shaped(out[2], {layers, batch, n, kv_heads, width}) ||
      !shaped(out[3], {layers, batch, n, kv_heads, width}))
    return bad("decoder: angles, norms or results do not fit the rows");
  for (const int64_t layer : feature_layers)
    if (layer < 0 || layer >= layers)
      return bad("decoder: feature layer " + std::to_string(layer) + " of " +
                 std::to_string(layers));

  Attention& a = d.attention;
  a.batch = batch, a.n = n, a.m = n, a.width = width;
  a.heads = q_width / width, a.kv_heads = kv_heads;
  if (!absent(in[kBlockK])) {
    const auto bd = in[kBlockK].dimensions();
    const int64_t before = bd.size() == 4 ? bd[1] : 0;
    if (layers != 1 || !shaped(in[kBlockK], {batch, before, kv_heads, width}) ||
        !shaped(in[kBlockV], {batch, before, kv_heads, width}))
      return bad("decoder: expected block keys and values [B, m - n, K, h] of one layer");
    a.m += before;
    a.block_k = in[kBlockK].typed_data<float>(), a.block_v = in[kBlockV].typed_data<float>();
  }
  if (ffi::Error e = mask(in[kAncestors], a); e.failure()) return e;
  if (!absent(in[kPagesK]))
    if (ffi::Error e =
            prefix(in[kPagesK], in[kPagesV], in[kTable], in[kLengths], layers, a);
        e.failure())
      return e;

  d.mlp_norm = in[kMlpNorm].typed_data<float>();
  d.cos = in[kCos].typed_data<float>(), d.sin = in[kSin].typed_data<float>();
  d.feature_layers = feature_layers.begin(), d.feature_count = features;
  d.x = out[0].typed_data<float>(), d.features = out[1].typed_data<float>();
  d.fresh_k = out[2].typed_data<float>(), d.fresh_v = out[3].typed_data<float>();
  std::memcpy(d.x, in[kX].typed_data<float>(), sizeof(float) * d.rows * hidden);

  const int64_t widest = std::max(inputs, hidden);
  const std::unique_ptr<float[]> floats(new float[d.rows * (hidden + 2 * q_width)]);
  const QuantMemory narrow(d.rows, widest), mixed(d.rows, q_width), wide(d.rows, d.ffn);
  d.normed = floats.get();
  d.queries = d.normed + d.rows * hidden;
  d.attended = d.queries + d.rows * q_width;
  d.narrow = narrow.view, d.mixed = mixed.view, d.wide = wide.view;
  run_team(pool, 7 * layers + features, [&d](Team& team) {
    choice().table->decoder(d, team, AttentionMemory(d.attention).scratch);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EaglejaxDecoder, decoder,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("eps")
                                  .Attr<ffi::Span<const int64_t>>("feature_layers"));

}  // namespace eaglejax
