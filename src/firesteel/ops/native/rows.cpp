// Ops of single rows: embedding, norms, rotations, residual streams.

template <bool O>
static void rms_row(const float* x, const float* weight, float eps, float* y, i64 n) {
  float scale = 1.0f / std::sqrt(sum_squares(x, n) / (float)n + eps);
  if (weight)
    for (i64 i = 0; i < n; i++) y[i] = act<O>(x[i] * scale * weight[i]);
  else
    for (i64 i = 0; i < n; i++) y[i] = act<O>(x[i] * scale);
}

template <bool O>
static void rotate_row(float* x, i64 n, const float* cos, const float* sin, i64 half, float sign) {
  float* turn = x + n - 2 * half;  // interleaved pairs in the last dims
  for (i64 i = 0; i < half; i++) {
    float even = turn[2 * i], odd = turn[2 * i + 1], s = sin[i] * sign;
    turn[2 * i] = act<O>(even * cos[i] - odd * s);
    turn[2 * i + 1] = act<O>(even * s + odd * cos[i]);
  }
}

template <bool O>
static void stored_row(float* x, i64 n, i64 rope_dim) {  // what the cache holds of a K=V row
  if (O) e4m3_groups(x, x, n - rope_dim, 64);
}

// run f<true> or f<false>: a template lambda taking std::integral_constant would hide the loop bodies
#define BY_NUMERICS(official, ...) \
  do {                             \
    if (official) {                \
      constexpr bool O = true;     \
      __VA_ARGS__;                 \
    } else {                       \
      constexpr bool O = false;    \
      __VA_ARGS__;                 \
    }                              \
  } while (0)

struct EmbedArgs {
  const float* table;
  const i64* tokens;
  i64 rows, streams, d;
  float* out;
  i64 flags;
};

EXPORT void fs_embed(const EmbedArgs* a) {
  bool official = Mode(a->flags).official;
  for (i64 r = 0; r < a->rows; r++) {
    const float* x = a->table + a->tokens[r] * a->d;
    float* y = a->out + r * a->streams * a->d;
    for (i64 i = 0; i < a->d; i++) y[i] = official ? bf16(x[i]) : x[i];
    for (i64 s = 1; s < a->streams; s++) std::memcpy(y + s * a->d, y, a->d * sizeof(float));
  }
}

struct NormArgs {
  const float* x;
  i64 rows, n;
  const float* weight;
  double eps;
  float* out;
  i64 flags;
};

EXPORT void fs_norm(const NormArgs* a) {
  BY_NUMERICS(Mode(a->flags).official, for (i64 r = 0; r < a->rows; r++) rms_row<O>(
                  a->x + r * a->n, a->weight, (float)a->eps, a->out + r * a->n, a->n));
}

struct TurnArgs {  // query: `heads` heads a row; key_value: one, with a norm weight, stored
  const float* x;
  i64 rows, heads, d;
  const float* weight;
  double eps;
  const float *cos, *sin;  // [rows, half]
  i64 half;
  float* out;
  i64 flags;
};

EXPORT void fs_query(const TurnArgs* a) {
  Mode m(a->flags);
  BY_NUMERICS(m.official, parallel(a->rows, m.threads, [&](i64 r) {
                for (i64 h = 0; h < a->heads; h++) {
                  i64 at = (r * a->heads + h) * a->d;
                  rms_row<O>(a->x + at, nullptr, (float)a->eps, a->out + at, a->d);
                  rotate_row<O>(a->out + at, a->d, a->cos + r * a->half, a->sin + r * a->half, a->half, 1.0f);
                }
              }));
}

EXPORT void fs_key_value(const TurnArgs* a) {
  Mode m(a->flags);
  BY_NUMERICS(m.official, for (i64 r = 0; r < a->rows; r++) {
    float* y = a->out + r * a->d;
    rms_row<O>(a->x + r * a->d, a->weight, (float)a->eps, y, a->d);
    rotate_row<O>(y, a->d, a->cos + r * a->half, a->sin + r * a->half, a->half, 1.0f);
    stored_row<O>(y, a->d, 2 * a->half);
  });
}

// ---- residual streams ----------------------------------------------------------
struct HyperArgs {
  const float* h;
  i64 rows, hc, d;
  const Weight* fn;
  const float *base, *scale;
  i64 iters;
  double eps, rms_eps;
  const float* norm_weight;
  double norm_eps;
  float *x, *post, *comb;  // the head: x [R, D], post = z [R, D], no comb
  i64 flags;
};

// Sinkhorn of L rows at once, c [hc*hc][L]; lanes do not meet, so L changes no bit
template <int L>
static void sinkhorn(float* c, i64 hc, i64 iters, float eps) {
  float s[L];
  for (i64 j = 0; j < hc; j++) {  // softmax of each source stream, + eps
    float* row = c + j * hc * L;
    float top[L];
    for (int l = 0; l < L; l++) top[l] = row[l], s[l] = 0.0f;
    for (i64 k = 1; k < hc; k++)
      for (int l = 0; l < L; l++) top[l] = row[k * L + l] > top[l] ? row[k * L + l] : top[l];
    for (i64 k = 0; k < hc; k++)
      for (int l = 0; l < L; l++) row[k * L + l] = exp1(row[k * L + l] - top[l]);
    for (i64 k = 0; k < hc; k++)
      for (int l = 0; l < L; l++) s[l] += row[k * L + l];
    for (i64 k = 0; k < hc; k++)
      for (int l = 0; l < L; l++) row[k * L + l] = row[k * L + l] / s[l] + eps;
  }
  auto normalise = [&](i64 outer, i64 inner) {
    for (i64 j = 0; j < hc; j++) {
      float* line = c + j * outer * L;
      for (int l = 0; l < L; l++) s[l] = line[l];
      for (i64 k = 1; k < hc; k++)
        for (int l = 0; l < L; l++) s[l] += line[k * inner * L + l];
      for (int l = 0; l < L; l++) s[l] += eps;
      for (i64 k = 0; k < hc; k++)
        for (int l = 0; l < L; l++) line[k * inner * L + l] /= s[l];
    }
  };
  normalise(1, hc);
  for (i64 i = 1; i < iters; i++) {
    normalise(hc, 1);
    normalise(1, hc);
  }
}

template <int L>
static void comb_rows(const HyperArgs* a, const float* mix, i64 row) {  // mix [L, (2+hc)hc]
  i64 hc = a->hc, m = (2 + hc) * hc;
  float c[64 * L];
  for (int l = 0; l < L; l++)
    for (i64 j = 0; j < hc * hc; j++) c[j * L + l] = mix[l * m + 2 * hc + j] * a->scale[2] + a->base[2 * hc + j];
  sinkhorn<L>(c, hc, a->iters, (float)a->eps);
  for (int l = 0; l < L; l++)
    for (i64 j = 0; j < hc * hc; j++) a->comb[(row + l) * hc * hc + j] = c[j * L + l];
}

static float* mixes(const HyperArgs* a, int threads) {  // [R, N] coefficients before their functions
  i64 k = a->hc * a->d, n = a->fn->n;
  float* mix = scratch(MIX, a->rows * n);
  product(a->h, a->rows, k, a->fn, mix, n, false, threads);
  for (i64 r = 0; r < a->rows; r++) {
    float s = 1.0f / std::sqrt(sum_squares(a->h + r * k, k) / (float)k + (float)a->rms_eps);
    for (i64 i = 0; i < n; i++) mix[r * n + i] *= s;
  }
  return mix;
}

template <bool O>
static void collapse_row(const float* h, const float* weight, i64 hc, i64 d, float* y) {
  for (i64 i = 0; i < d; i++) y[i] = weight[0] * h[i];
  for (i64 j = 1; j < hc; j++)
    for (i64 i = 0; i < d; i++) y[i] += weight[j] * h[j * d + i];
  if (O)
    for (i64 i = 0; i < d; i++) y[i] = bf16(y[i]);
}

template <bool O>
static void pre_row(const HyperArgs* a, const float* mix, i64 r) {
  i64 hc = a->hc, d = a->d;
  float pre[8], *y = a->x + r * d;
  for (i64 j = 0; j < hc; j++) pre[j] = sigmoid1(mix[j] * a->scale[0] + a->base[j]) + (float)a->eps;
  for (i64 j = 0; j < hc; j++)
    a->post[r * hc + j] = 2.0f * sigmoid1(mix[hc + j] * a->scale[1] + a->base[hc + j]);
  collapse_row<O>(a->h + r * hc * d, pre, hc, d, y);
  rms_row<O>(y, a->norm_weight, (float)a->norm_eps, y, d);
}

EXPORT void fs_hyper_pre(const HyperArgs* a) {
  Mode m(a->flags);
  const float* mix = mixes(a, m.threads);
  i64 n = a->fn->n, lanes = a->rows / VW;
  parallel(lanes, m.threads, [&](i64 i) { comb_rows<VW>(a, mix + i * VW * n, i * VW); });
  for (i64 r = lanes * VW; r < a->rows; r++) comb_rows<1>(a, mix + r * n, r);
  BY_NUMERICS(m.official, parallel(a->rows, m.threads, [&](i64 r) { pre_row<O>(a, mix + r * n, r); }));
}

EXPORT void fs_hyper_head(const HyperArgs* a) {
  Mode m(a->flags);
  const float* mix = mixes(a, m.threads);
  i64 hc = a->hc, d = a->d;
  BY_NUMERICS(m.official, for (i64 r = 0; r < a->rows; r++) {
    float weight[8];
    for (i64 j = 0; j < hc; j++) weight[j] = sigmoid1(mix[r * hc + j] * a->scale[0] + a->base[j]) + (float)a->eps;
    collapse_row<O>(a->h + r * hc * d, weight, hc, d, a->post + r * d);
    rms_row<O>(a->post + r * d, a->norm_weight, (float)a->norm_eps, a->x + r * d, d);
  });
}

struct PostArgs {
  const float *f, *h, *post, *comb;
  i64 rows, hc, d;
  float* out;
  i64 flags;
};

template <bool O>
static void post_row(const PostArgs* a, i64 r) {
  i64 hc = a->hc, d = a->d;
  const float *f = a->f + r * d, *h = a->h + r * hc * d, *comb = a->comb + r * hc * hc;
  for (i64 k = 0; k < hc; k++) {
    float* y = a->out + (r * hc + k) * d;
    float p = a->post[r * hc + k];
    if (hc == 4) {
      float c0 = comb[k], c1 = comb[4 + k], c2 = comb[8 + k], c3 = comb[12 + k];
      for (i64 i = 0; i < d; i++)
        y[i] = act<O>(p * f[i] + c0 * h[i] + c1 * h[d + i] + c2 * h[2 * d + i] + c3 * h[3 * d + i]);
      continue;
    }
    for (i64 i = 0; i < d; i++) y[i] = p * f[i];
    for (i64 j = 0; j < hc; j++)
      for (i64 i = 0; i < d; i++) y[i] += comb[j * hc + k] * h[j * d + i];
    for (i64 i = 0; i < d; i++) y[i] = act<O>(y[i]);
  }
}

EXPORT void fs_hyper_post(const PostArgs* a) {
  Mode m(a->flags);
  BY_NUMERICS(m.official, parallel(a->rows, m.threads, [&](i64 r) { post_row<O>(a, r); }));
}

struct TapArgs {
  const float* h;
  i64 rows, hc, d;
  float* out;
  i64 flags;
};

template <bool O>
static void tap_row(const float* h, i64 hc, i64 d, float* y) {  // mean of the streams, in their order
  if (hc == 4) {
    for (i64 i = 0; i < d; i++) y[i] = act<O>((h[i] + h[d + i] + h[2 * d + i] + h[3 * d + i]) / 4.0f);
    return;
  }
  std::memcpy(y, h, d * sizeof(float));
  for (i64 j = 1; j < hc; j++)
    for (i64 i = 0; i < d; i++) y[i] += h[j * d + i];
  for (i64 i = 0; i < d; i++) y[i] = act<O>(y[i] / (float)hc);
}

EXPORT void fs_tap(const TapArgs* a) {
  i64 hc = a->hc, d = a->d;
  BY_NUMERICS(Mode(a->flags).official,
              for (i64 r = 0; r < a->rows; r++) tap_row<O>(a->h + r * hc * d, hc, d, a->out + r * d));
}
