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

// One row of activations, quantised to 8 bits in groups of 32.
struct QuantRows {
  const int8_t* levels;    // [rows, K]
  const float* scale;      // [rows, K/32]
  const float* scaled_sum; // [rows, K/32]: scale * sum of levels
};

struct Attention {
  const float* q;             // [B, n, H, h]
  const float* fresh_k;       // [B, m, K, h]
  const float* fresh_v;
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

// How attention is cut into tiles: queries (rows by heads) of one sequence that read the same kv
// head, so that a key is loaded once for all of them.
struct AttentionTiles {
  int64_t heads, rows;  // of a tile; the last ones may be smaller
  int64_t head_tiles, row_tiles, count;

  explicit AttentionTiles(const Attention& a) {
    const int64_t group = a.heads / a.kv_heads;
    heads = group < kTileQueries ? group : kTileQueries;
    rows = heads > 0 ? kTileQueries / heads : 1;
    if (rows > a.n) rows = a.n;
    head_tiles = heads > 0 ? (group + heads - 1) / heads : 0;
    row_tiles = rows > 0 ? (a.n + rows - 1) / rows : 0;
    count = a.batch * a.kv_heads * head_tiles * row_tiles;
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

struct Kernels {
  // Quantises rows [first, last) of x [rows, K].
  void (*quantise)(const float* x, int64_t k, int64_t first, int64_t last, int8_t* levels,
                   float* scale, float* scaled_sum);
  // Tiles [first, last) of out [rows, N] = x @ W.
  void (*matmul4)(const QuantRows& x, const uint8_t* weights, int64_t rows, int64_t k, int64_t n,
                  int64_t first, int64_t last, float* out);
  void (*matmul8)(const QuantRows& x, const uint8_t* weights, int64_t rows, int64_t k, int64_t n,
                  int64_t first, int64_t last, float* out);
  // Rows [first, last) of y = x / rms(x) * scale.
  void (*rms_norm)(const float* x, const float* scale, float eps, int64_t d, int64_t first,
                   int64_t last, float* y);
  // Elements [first, last) of y = silu(gate) * up.
  void (*swiglu)(const float* gate, const float* up, int64_t first, int64_t last, float* y);
  // Tiles [first, last) of AttentionTiles(a).
  void (*attention)(const Attention& a, int64_t first, int64_t last,
                    const AttentionScratch& scratch);
};

// The table of an instruction set, or null where this build or this machine lacks it.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();

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
