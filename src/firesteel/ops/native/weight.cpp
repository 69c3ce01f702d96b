// Packed weights and the split of a product into tasks.
//
// Weights lie in tiles of 64 columns, [tile][k][column] (the last tile is as wide as
// its columns, rounded up to 16), in 32-bit words:
//   F32   one k a word
//   BF16  k and k+1 of a column (only where that is exact)
//   FP4   eight k of a column; each 32 k are led by one exponent byte a column
#ifndef FIRESTEEL_WEIGHT
#define FIRESTEEL_WEIGHT
#include "vec.cpp"

enum Kinds { F32 = 0, BF16 = 1, FP4 = 2 };
constexpr i64 TILE = 64;
constexpr int ROWS = 12;  // most rows of a kernel
#define UNROLL _Pragma("GCC unroll 16")

struct Weight {
  const void* data;
  i64 n, k, kind, quantised;
};

INLINE i64 tile_width(const Weight& w, i64 tile) {
  return std::min(TILE, (w.n - tile * TILE + 15) / 16 * 16);
}

INLINE i64 column_words(i64 k, i64 kind, i64 width) {  // words of `width` columns
  if (kind == FP4) return k / 32 * (4 * width + width / 4);
  return (kind == BF16 ? (k + 1) / 2 : k) * width;
}

struct Job {
  const float* x;
  i64 rows, ld;
  const Weight* w;
  float* out;
  i64 ldo;
  bool round;
  i64 tiles() const { return (w->n + TILE - 1) / TILE; }
  i64 blocks() const { return (rows + ROWS - 1) / ROWS; }
  i64 tasks() const { return tiles() * blocks(); }
};

// task t of a job, one per kind of weight: kernels.cpp is compiled once for each
void task_f32(const Job& job, i64 task);
void task_bf16(const Job& job, i64 task);
void task_fp4(const Job& job, i64 task);

#endif
