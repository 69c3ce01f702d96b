// Products, activation quantisation and packing.
#include "weight.cpp"

static void run_jobs(const Job* jobs, i64 count, int threads) {
  i64 total = 0;
  for (i64 i = 0; i < count; i++) total += jobs[i].tasks();
  parallel(total, threads, [&](i64 task) {
    const Job* j = jobs;
    while (task >= j->tasks()) task -= (j++)->tasks();
    if (j->w->kind == FP4)
      task_fp4(*j, task);
    else if (j->w->kind == BF16)
      task_bf16(*j, task);
    else
      task_f32(*j, task);
  });
}

static void product(const float* x, i64 rows, i64 ld, const Weight* w, float* out, i64 ldo, bool round, int threads) {
  Job job{x, rows, ld, w, out, ldo, round};
  run_jobs(&job, 1, threads);
}

// ---- activation quantisation ---------------------------------------------------
INLINE float pow2_scale(float ratio) {  // smallest power of two >= ratio > 0 (normal)
  u32 b = bits(ratio);
  return real((b & 0x7f800000u) + ((b & 0x007fffffu) ? 0x00800000u : 0u));
}

INLINE float e4m3(float x) {  // |x| <= 448 or NaN: to the grid, nearest even
  float a = real(bits(x) & 0x7fffffffu);
  u32 b = bits(a);
  float normal = real((b + 0x7ffffu + ((b >> 20) & 1u)) & 0xfff00000u);
  float small = (a + 24576.0f) - 24576.0f;  // step 2^-9 below 2^-6
  float y = a < 0.015625f ? small : normal;
  y = x != x ? x : y;
  return real((bits(y) & 0x7fffffffu) | (bits(x) & 0x80000000u));
}

INLINE float e2m1(float x) {  // |x| <= 6: grid 0 .5 1 1.5 2 3 4 6, ties to the even code
  float a = real(bits(x) & 0x7fffffffu);
  a = a > 6.0f ? 6.0f : a;
  float fine = ((a * 2.0f + 12582912.0f) - 12582912.0f) * 0.5f;
  float unit = (a + 12582912.0f) - 12582912.0f;
  float pair = ((a * 0.5f + 12582912.0f) - 12582912.0f) * 2.0f;
  float high = a < 4.0f ? unit : pair, y = a < 2.0f ? fine : high;
  return real(bits(y) | (bits(x) & 0x80000000u));
}

INLINE float amax(const float* x, i64 n) {
  float lanes[VW] = {};
  i64 i = 0;
  vf m = {};
  for (; i + VW <= n; i += VW) m = vmax((vf)((vu)load(x + i) & 0x7fffffffu), m);
  store(lanes, m);
  for (; i < n; i++) lanes[0] = std::max(lanes[0], std::fabs(x[i]));
  for (int j = 1; j < VW; j++) lanes[0] = std::max(lanes[0], lanes[j]);
  return lanes[0];
}

static void e4m3_groups(const float* x, float* y, i64 n, i64 group) {
  for (i64 at = 0; at < n; at += group) {
    i64 m = std::min(group, n - at);
    float scale = pow2_scale(std::max(amax(x + at, m), 1e-4f) / 448.0f), inverse = 1.0f / scale;
    for (i64 i = at; i < at + m; i++) {
      float q = x[i] * inverse;
      q = q > 448.0f ? 448.0f : q;
      q = q < -448.0f ? -448.0f : q;
      y[i] = e4m3(q) * scale;
    }
  }
}

static void e2m1_groups(float* x, i64 n, i64 group) {
  for (i64 at = 0; at < n; at += group) {
    i64 m = std::min(group, n - at);
    float scale = pow2_scale(std::max(amax(x + at, m), 7.052966104933725e-38f) / 6.0f), inverse = 1.0f / scale;
    for (i64 i = at; i < at + m; i++) x[i] = e2m1(x[i] * inverse) * scale;
  }
}

static void hadamard(float* x, i64 n) {  // n a power of two
  for (i64 h = 1; h < n; h *= 2)
    for (i64 b = 0; b < n; b += 2 * h)
      for (i64 i = b; i < b + h; i++) {
        float s = x[i] + x[i + h], d = x[i] - x[i + h];
        x[i] = s;
        x[i + h] = d;
      }
  float scale = (float)(1.0 / std::sqrt((double)n));
  for (i64 i = 0; i < n; i++) x[i] *= scale;
}

struct RoundArgs {
  float* x;  // [rows, n], in place
  i64 rows, n, group, kind;  // kind 0: e4m3, 1: e2m1, 2: Hadamard
};

EXPORT void fs_round(const RoundArgs* a) {  // the roundings by themselves, for tests
  for (i64 r = 0; r < a->rows; r++) {
    float* x = a->x + r * a->n;
    if (a->kind == 0)
      e4m3_groups(x, x, a->n, a->group);
    else if (a->kind == 1)
      e2m1_groups(x, a->n, a->group);
    else
      hadamard(x, a->n);
  }
}

static const float* quantised_rows(const float* x, i64 rows, i64 k, Place place) {
  float* q = scratch(place, rows * k);
  for (i64 r = 0; r < rows; r++) e4m3_groups(x + r * k, q + r * k, k, 128);
  return q;
}

// ---- entry points ----------------------------------------------------------------
struct LinearArgs {
  const float* x;
  i64 rows;
  const Weight* w;
  float* out;
  i64 flags;
};

EXPORT void fs_linear(const LinearArgs* a) {
  Mode m(a->flags);
  const float* x = m.official && a->w->quantised ? quantised_rows(a->x, a->rows, a->w->k, QUANT) : a->x;
  product(x, a->rows, a->w->k, a->w, a->out, a->w->n, m.official, m.threads);
}

EXPORT void fs_linear_f32(const LinearArgs* a) {
  product(a->x, a->rows, a->w->k, a->w, a->out, a->w->n, false, Mode(a->flags).threads);
}

struct OutputArgs {
  const float* o;
  i64 rows, groups;
  const Weight* const* low;
  const Weight* last;
  float* out;
  i64 flags;
};

EXPORT void fs_output(const OutputArgs* a) {
  Mode m(a->flags);
  i64 wide = a->last->k, k = a->low[0]->k, n = a->low[0]->n;
  float* mid = scratch(INNER, a->rows * wide);
  Job jobs[64];
  for (i64 g = 0; g < a->groups; g++)
    jobs[g] = Job{a->o + g * k, a->rows, a->groups * k, a->low[g], mid + g * n, wide, m.official};
  run_jobs(jobs, a->groups, m.threads);
  const float* x = m.official && a->last->quantised ? quantised_rows(mid, a->rows, wide, QUANT) : mid;
  product(x, a->rows, wide, a->last, a->out, a->last->n, m.official, m.threads);
}

// ---- packing -----------------------------------------------------------------------
EXPORT i64 fs_pack_words(i64 n, i64 k, i64 kind) { return column_words(k, kind, (n + 15) / 16 * 16); }

EXPORT i64 fs_is_bf16(const float* w, i64 count) {
  u32 low = 0;
  for (i64 i = 0; i < count; i++) low |= bits(w[i]) & 0xffffu;
  return low == 0;
}

struct PackArgs {
  const void* w;         // float32 [part, k], or FP4 bytes [part, k/2]
  const uint8_t* scale;  // E8M0 [part, k/32], FP4 only
  i64 part, column, n, k, kind;  // these rows become columns column .. column + part of n
  u32* out;
};

static void pack_fp4(const PackArgs* a, i64 row, u32* tile, i64 width, i64 at) {
  const uint8_t *codes = (const uint8_t*)a->w + row * (a->k / 2), *scale = a->scale + row * (a->k / 32);
  for (i64 g = 0; g < a->k / 32; g++) {
    u32* group = tile + g * (4 * width + width / 4);
    ((uint8_t*)group)[at] = scale[g];
    for (i64 q = 0; q < 4; q++) {
      u32 word;
      std::memcpy(&word, codes + g * 16 + q * 4, 4);
      group[width / 4 + q * width + at] = word;
    }
  }
}

EXPORT void fs_pack(const PackArgs* a) {  // `out` starts as zeros
  Weight shape{nullptr, a->n, a->k, a->kind, 0};
  for (i64 row = 0; row < a->part; row++) {
    i64 column = a->column + row, at = column % TILE, width = tile_width(shape, column / TILE);
    u32* tile = a->out + column_words(a->k, a->kind, column - at);
    const u32* w = (const u32*)a->w + row * a->k;
    if (a->kind == FP4)
      pack_fp4(a, row, tile, width, at);
    else if (a->kind == BF16)
      for (i64 i = 0; i < a->k; i++) tile[i / 2 * width + at] |= i % 2 ? w[i] & 0xffff0000u : w[i] >> 16;
    else
      for (i64 i = 0; i < a->k; i++) tile[i * width + at] = w[i];
  }
}
