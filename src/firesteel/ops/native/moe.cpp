// Routing and experts.

struct RouteArgs {
  const float* x;
  i64 rows;
  const Weight* gate;
  const float* bias;
  const i64 *table, *tokens;
  i64 top_k;
  double scale;
  i64* ids;
  float* weights;
  i64 flags;
};

static void choose(const RouteArgs* a, const float* scores, i64 r, i64* ids) {  // best k, then ascending
  i64 experts = a->gate->n, k = a->top_k;
  if (a->table) {
    std::memcpy(ids, a->table + a->tokens[r] * k, k * sizeof(i64));
  } else {
    u64* ranks = scratch<u64>(EXTRA, experts);
    for (i64 e = 0; e < experts; e++) ranks[e] = rank_key(scores[e] + a->bias[e], e);
    std::nth_element(ranks, ranks + k - 1, ranks + experts);
    for (i64 i = 0; i < k; i++) ids[i] = (i64)(u32)ranks[i];
  }
  std::sort(ids, ids + k);
}

EXPORT void fs_route(const RouteArgs* a) {
  Mode m(a->flags);
  i64 experts = a->gate->n, k = a->top_k;
  float* scores = scratch(MIX, a->rows * experts);
  product(a->x, a->rows, a->gate->k, a->gate, scores, experts, false, m.threads);
  for (i64 i = 0; i < a->rows * experts; i++) {  // sqrt(softplus)
    float x = scores[i], capped = x > 20.0f ? 20.0f : x;
    float soft = log1p1(exp1(capped));
    scores[i] = std::sqrt(x > 20.0f ? x : soft);
  }
  for (i64 r = 0; r < a->rows; r++) {
    const float* s = scores + r * experts;
    i64* ids = a->ids + r * k;
    choose(a, s, r, ids);
    float sum = s[ids[0]];
    for (i64 i = 1; i < k; i++) sum += s[ids[i]];
    for (i64 i = 0; i < k; i++) a->weights[r * k + i] = s[ids[i]] / (sum + 1e-20f) * (float)a->scale;
  }
}

struct MoeArgs {
  const float* x;
  i64 rows, d, top_k;
  const i64* ids;
  const float* weights;
  const Weight *w13, *w2;  // [experts]
  i64 experts, shared;
  const Weight* const* shared_w;  // w13, w2 of each shared expert
  double limit;
  float* out;
  i64 flags;
};

// gate | up [2n] to the activation in front of w2, in place of the gate
template <bool O>
static void swiglu(float* g, i64 n, float limit, float weight, bool quantised) {
  const float* up = g + n;
  for (i64 i = 0; i < n; i++) {
    float gate = g[i] > limit ? limit : g[i], u = up[i] > limit ? limit : up[i];
    u = u < -limit ? -limit : u;
    g[i] = gate / (1.0f + exp1(-gate)) * u * weight;
  }
  for (i64 i = 0; i < n; i++) g[i] = act<O>(g[i]);
  if (O && quantised) e4m3_groups(g, g, n, 128);
}

struct Groups {  // assignments (row, place) sorted by expert
  i64 *begin, *from;  // begin [experts + 1], from [R*k] = row*k + place
};

static Groups group(const MoeArgs* a) {
  i64 n = a->rows * a->top_k;
  i64* begin = scratch<i64>(EXTRA, a->experts + 2 + n);
  Groups g{begin, begin + a->experts + 2};
  std::memset(begin, 0, (a->experts + 2) * sizeof(i64));
  for (i64 i = 0; i < n; i++) begin[a->ids[i] + 2]++;
  for (i64 e = 2; e <= a->experts + 1; e++) begin[e] += begin[e - 1];
  for (i64 i = 0; i < n; i++) g.from[begin[a->ids[i] + 1]++] = i;
  return g;
}

// Routed experts: parts [R*k, D] in (row, place) order, D the row length
template <bool O>
static void routed(const MoeArgs* a, const float* x, float* parts, int threads) {
  i64 n = a->rows * a->top_k, d = a->d, wide = a->w13[0].n, half = wide / 2, jobs = 0;
  Groups g = group(a);
  float *in = scratch(GATHER, n * d), *inner = scratch(INNER, n * wide), *sorted = in;  // rows in, then results
  Job* job = scratch<Job>(QT, a->experts);
  bool direct = a->rows == 1;  // every expert has the one row
  if (!direct)
    for (i64 i = 0; i < n; i++) std::memcpy(in + i * d, x + g.from[i] / a->top_k * d, d * sizeof(float));
  for (i64 e = 0; e < a->experts; e++) {
    i64 at = g.begin[e], rows = g.begin[e + 1] - at;
    if (rows) job[jobs++] = Job{direct ? x : in + at * d, rows, d, a->w13 + e, inner + at * wide, wide, O};
  }
  run_jobs(job, jobs, threads);
  parallel(n, threads, [&](i64 i) {
    swiglu<O>(inner + i * wide, half, (float)a->limit, a->weights[g.from[i]], a->w2[0].quantised);
  });
  jobs = 0;
  for (i64 e = 0; e < a->experts; e++) {
    i64 at = g.begin[e], rows = g.begin[e + 1] - at;
    if (rows) job[jobs++] = Job{inner + at * wide, rows, wide, a->w2 + e, sorted + at * d, d, O};
  }
  run_jobs(job, jobs, threads);
  for (i64 i = 0; i < n; i++) std::memcpy(parts + g.from[i] * d, sorted + i * d, d * sizeof(float));
}

template <bool O>
static void shared_expert(const MoeArgs* a, const float* x, const Weight* w13, const Weight* w2, float* y, int threads) {
  i64 wide = w13->n;
  float* inner = scratch(INNER, a->rows * wide);
  product(x, a->rows, a->d, w13, inner, wide, O, threads);
  parallel(a->rows, threads, [&](i64 r) {
    swiglu<O>(inner + r * wide, wide / 2, (float)a->limit, 1.0f, w2->quantised);
  });
  product(inner, a->rows, wide, w2, y, a->d, O, threads);
}

template <bool O>
static void moe(const MoeArgs* a, int threads) {
  i64 d = a->d, k = a->top_k, size = a->rows * d;
  const float* rounded = O ? quantised_rows(a->x, a->rows, d, QUANT) : a->x;
  float *parts = scratch(PARTS, size * k), *one = scratch(SHARED, size);
  routed<O>(a, a->w13[0].quantised ? rounded : a->x, parts, threads);
  for (i64 r = 0; r < a->rows; r++) {  // ids ascend, so experts are added in ascending id
    float *y = a->out + r * d, *p = parts + r * k * d;
    std::memcpy(y, p, d * sizeof(float));
    for (i64 j = 1; j < k; j++)
      for (i64 i = 0; i < d; i++) y[i] += p[j * d + i];
  }
  for (i64 s = 0; s < a->shared; s++) {
    const Weight *w13 = a->shared_w[2 * s], *w2 = a->shared_w[2 * s + 1];
    shared_expert<O>(a, w13->quantised ? rounded : a->x, w13, w2, one, threads);
    for (i64 i = 0; i < size; i++) a->out[i] += one[i];
  }
  for (i64 i = 0; i < size; i++) a->out[i] = act<O>(a->out[i]);
}

EXPORT void fs_moe(const MoeArgs* a) {
  Mode m(a->flags);
  BY_NUMERICS(m.official, moe<O>(a, m.threads));
}
