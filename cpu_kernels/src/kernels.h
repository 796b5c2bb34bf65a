// The kernels, free of XLA: plain pointers and sizes. Each instruction set compiles kernels.inc
// once into a table of functions; dispatch.cc picks the table.
#pragma once

#include <cstdint>

namespace eaglejax {

constexpr int kLanes = 8;    // columns of a weight tile
constexpr int kGroup = 32;   // inputs that share a scale, in weights and in activations
// Bytes of one (tile, group) block: levels, then 8 half scales, and for INT4 8 half minima.
constexpr int kBlock4 = kLanes * kGroup / 2 + 2 * kLanes + 2 * kLanes;
constexpr int kBlock8 = kLanes * kGroup + 2 * kLanes;

// Activations, quantised to 8 bits in groups of 32.
struct QuantRows {
  int8_t* levels;     // [rows, K]
  float* scale;       // [rows, K/32]
  float* scaled_sum;  // [rows, K/32]: scale * sum of levels
};

// One quantised matrix, in tiles as cpu_kernels/packing.py lays them out.
struct Matrix {
  const uint8_t* blocks;
  int64_t k, n;
  bool four;  // INT4 with minima, else INT8

  int64_t bytes() const { return n / kLanes * (k / kGroup) * (four ? kBlock4 : kBlock8); }
};

// Where a product goes: column 0 of the first tile asked for at `at`, rows `stride` apart. `add` is
// laid out alike and added, or null; it may be the result itself.
struct Output {
  float* at;
  int64_t stride;
  const float* add;
};

struct Attention {
  const float* q;             // [B, n, H, h]
  const float* fresh_k;       // [B, m, K, h], or [B, n, K, h] after block_k
  const float* fresh_v;
  const float* block_k;       // [B, m - n, K, h], or null where fresh_k has all m rows
  const float* block_v;
  const bool* ancestors;      // [B, n, m], or null for causal
  const float* pages_k;       // [L, P, p, K, h], or null without a prefix
  const float* pages_v;
  const int32_t* page_table;  // [B, S]
  const int32_t* lengths;     // [B]
  float* out;                 // [B, n, H, h]
  int64_t batch, n, m, heads, kv_heads, width;
  int64_t layer, pages, page_size, table_width;
};

constexpr int64_t kTileQueries = 12;

// Queries (rows by heads) of one sequence that read the same kv head, so that a key is loaded once
// for all of them.
struct AttentionTile {
  int64_t b, kv, first_row, rows, first_head, heads;
};

// How attention is cut into tiles.
struct AttentionTiles {
  int64_t heads, rows;  // of a tile; the last ones may be smaller
  int64_t head_tiles, row_tiles, count;

  AttentionTiles(const Attention& a, int64_t threads) {
    const int64_t group = a.heads / a.kv_heads, all = a.batch * a.n;
    heads = group < kTileQueries ? group : kTileQueries;
    rows = heads > 0 ? kTileQueries / heads : 1;
    if (rows > a.n) rows = a.n;
    // Few queries: loading a key again costs less than a thread without work.
    if (all * a.kv_heads < 4 * threads * rows) rows = 1;
    if (all * a.kv_heads < 4 * threads) heads = heads < 1 ? heads : 1;
    head_tiles = heads > 0 ? (group + heads - 1) / heads : 0;
    row_tiles = rows > 0 ? (a.n + rows - 1) / rows : 0;
    count = a.batch * a.kv_heads * head_tiles * row_tiles;
  }

  AttentionTile tile(const Attention& a, int64_t index) const {
    const int64_t group = a.heads / a.kv_heads, row_tile = index % row_tiles;
    const int64_t head_tile = index / row_tiles % head_tiles;
    const int64_t kv = index / row_tiles / head_tiles % a.kv_heads;
    const int64_t first_row = row_tile * rows, first_head = head_tile * heads;
    return {index / row_tiles / head_tiles / a.kv_heads,
            kv,
            first_row,
            rows < a.n - first_row ? rows : a.n - first_row,
            kv * group + first_head,
            heads < group - first_head ? heads : group - first_head};
  }
};

// Memory of one thread for tiles that see up to `keys` keys.
struct AttentionScratch {
  int64_t keys_rounded, width_rounded;  // up to whole vectors
  float* scores;                        // [kTileQueries, keys_rounded]
  float* sums;                          // [kTileQueries, width_rounded]
  const float** keys;                   // [keys]
  const float** values;                 // [keys]
};

// A stack of Llama-type decoder layers over R = batch * n rows; matrices are those of layer 0, the
// other layers' follow them.
struct Decoder {
  Attention attention;  // sizes, ancestors and prefix; q, fresh keys and values, out, layer are free
  int64_t layers, rows, hidden, ffn;
  float eps;
  Matrix q, k, v, o, gate, up, down;
  const float* input;           // [R, q.k], normalised already (one layer only), or null
  const float* attention_norm;  // [layers, hidden], unless there is an input
  const float* mlp_norm;        // [layers, hidden]
  const float* cos;             // [R, h/2]
  const float* sin;
  const int64_t* feature_layers;
  int64_t feature_count;
  float* x;         // [R, hidden], the residual stream, changed in place
  float* features;  // [R, feature_count * hidden], the stream after each feature layer
  float* fresh_k;   // [layers, B, n, K, h]
  float* fresh_v;
  // Memory that all threads share.
  float* normed;       // [R, q.k or hidden, the larger]
  float* queries;      // [R, H, h]
  float* attended;     // [R, H, h]
  QuantRows narrow;    // [R, q.k or hidden, the larger]
  QuantRows mixed;     // [R, H * h]
  QuantRows wide;      // [R, ffn]
};

// How a row is sampled.
struct Sampling {
  float temperature, top_p, min_p;
  int32_t top_k;  // 0: no limit
};
constexpr float kTinyTemperature = 1e-4f;  // below it scaled gaps overflow: such rows are greedy

class Team;

struct Kernels {
  // Quantises rows [first, last) of x [rows, K].
  void (*quantise)(const float* x, int64_t k, int64_t first, int64_t last, const QuantRows& to);
  // Tiles [first, last) of x @ W for rows of x.
  void (*matmul)(const QuantRows& x, const Matrix& w, int64_t rows, int64_t first, int64_t last,
                 const Output& out);
  // The same on float32 activations x [rows, K]; nothing is added.
  void (*float_matmul)(const float* x, const Matrix& w, int64_t rows, int64_t first, int64_t last,
                       const Output& out);
  // Rows [first, last) of y = x / rms(x) * scale.
  void (*rms_norm)(const float* x, const float* scale, float eps, int64_t d, int64_t first,
                   int64_t last, float* y);
  // Elements [first, last) of y = silu(gate) * up.
  void (*swiglu)(const float* gate, const float* up, int64_t first, int64_t last, float* y);
  // Tiles [first, last).
  void (*attention)(const Attention& a, const AttentionTiles& tiles, int64_t first, int64_t last,
                    const AttentionScratch& scratch);
  // The id of the largest of n logits, the lowest among equals; of the first that is not a number.
  int32_t (*argmax)(const float* row, int64_t n);
  // A token of a row of n logits, by inverse CDF; `weights` is memory for n floats.
  int32_t (*sample)(const float* row, int64_t n, const Sampling& p, float coin, float* weights);
  // The k largest of n logits, best first, the lower id first among equals: log-probabilities and ids.
  void (*top_k)(const float* row, int64_t n, int64_t k, float* scores, int32_t* ids);
  // The whole stack, as one thread of a team walks through it.
  void (*decoder)(const Decoder& d, Team& team, const AttentionScratch& scratch);
};

// The table of an instruction set, or null where this build or this machine lacks it.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// The best table, or the one that EAGLEJAX_CPU_ISA names; null (with a reason) if it cannot run.
const Kernels* choose_kernels(const char** name, const char** error);

// The table in use, chosen once; an error from the environment variable is reported by every call.
struct Choice {
  const char* name = nullptr;
  const char* error = nullptr;
  const Kernels* table = choose_kernels(&name, &error);
};
const Choice& choice();

}  // namespace eaglejax
