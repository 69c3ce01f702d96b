// The drafter's context rows: taps of the target to a K=V row of every draft stage.
//
// Only rows that a ring keeps are computed: neither padding nor what a long chunk or a later pass
// overwrites.

struct ContextStage {
  const Weight* wkv;
  const float* norm_weight;
  double norm_eps;
  float* ring;  // [S, ring_size, dim]
  i64 ring_size;
  i64 dim() const { return wkv->n; }
};

struct ContextPass {  // behind it: streams [taps] of [R, hc, d]
  const Pass* pass;
  const float *cos, *sin;  // [R, half]
  const float* stream(i64 tap) const { return ((const float* const*)(this + 1))[tap]; }
};

struct ContextArgs {  // behind it: the stages, then the passes
  i64 taps, hc, d;
  const Weight* project;
  const float* norm_weight;
  double norm_eps;
  i64 stages, passes, half, flags;
  i64 slots;         // lines of a ring
  const i64* first;  // [slots] pass from which on a slot's rows are wanted; null: all
  const ContextStage* stage() const { return (const ContextStage*)(this + 1); }
  const ContextPass* pass(i64 i) const {
    return (const ContextPass*)((const i64*)(stage() + stages) + i * (sizeof(ContextPass) / sizeof(i64) + taps));
  }
};

constexpr i64 MAX_STAGES = 16;

struct ContextRow {
  const ContextPass* of;
  i64 row;
};

INLINE bool kept(const Pass& p, i64 r, i64 ring_size) {
  return p.valid[r] && p.positions[p.last[r]] - p.positions[r] < ring_size;
}

// x [n, project->n]: what every stage's wkv reads
template <bool O>
static float* main_rows(const ContextArgs* a, const ContextRow* pick, i64 n, int threads) {
  i64 wide = a->taps * a->d, out = a->project->n;
  float *taps = scratch(RAW, n * wide), *x = scratch(INNER, n * out);
  parallel(n, threads, [&](i64 i) {
    float* row = taps + i * wide;
    for (i64 t = 0; t < a->taps; t++)
      tap_row<O>(pick[i].of->stream(t) + pick[i].row * a->hc * a->d, a->hc, a->d, row + t * a->d);
    if (O && a->project->quantised) e4m3_groups(row, row, wide, 128);
  });
  product(taps, n, wide, a->project, x, out, O, threads);
  parallel(n, threads, [&](i64 i) { rms_row<O>(x + i * out, a->norm_weight, (float)a->norm_eps, x + i * out, out); });
  return x;
}

// K=V rows of every stage, at[s] [n, dim]
template <bool O>
static void stage_rows(const ContextArgs* a, const ContextRow* pick, i64 n, int threads, float** at) {
  i64 d = a->project->n, dims = 0;
  const float *x = main_rows<O>(a, pick, n, threads), *quantised = nullptr;
  Job jobs[MAX_STAGES];
  for (i64 s = 0; s < a->stages; s++) dims += a->stage()[s].dim();
  float* rows = scratch(PARTS, n * dims);
  for (i64 s = 0; s < a->stages; rows += n * a->stage()[s++].dim()) {
    const Weight* w = a->stage()[s].wkv;
    bool grid = O && w->quantised;
    if (grid && !quantised) quantised = quantised_rows(x, n, d, QUANT);
    jobs[s] = Job{grid ? quantised : x, n, d, w, at[s] = rows, w->n, O};
  }
  run_jobs(jobs, a->stages, threads);
  parallel(n, threads, [&](i64 i) {
    const float *cos = pick[i].of->cos + pick[i].row * a->half, *sin = pick[i].of->sin + pick[i].row * a->half;
    for (i64 s = 0; s < a->stages; s++) {
      const ContextStage& c = a->stage()[s];
      float* y = at[s] + i * c.dim();
      rms_row<O>(y, c.norm_weight, (float)c.norm_eps, y, c.dim());
      rotate_row<O>(y, c.dim(), cos, sin, a->half, 1.0f);
      stored_row<O>(y, c.dim(), 2 * a->half);
    }
  });
}

static void store_rows(const ContextArgs* a, const ContextRow* pick, i64 n, float* const* at) {
  for (i64 i = 0; i < n; i++) {  // in order: a later pass may run a position again
    const Pass& p = *pick[i].of->pass;
    i64 r = pick[i].row;
    for (i64 s = 0; s < a->stages; s++) {
      const ContextStage& c = a->stage()[s];
      float* line = c.ring + (p.slots[r] * c.ring_size + p.positions[r] % c.ring_size) * c.dim();
      if (kept(p, r, c.ring_size)) std::memcpy(line, at[s] + i * c.dim(), c.dim() * sizeof(float));
    }
  }
}

// Rows to be computed, ascending; the last of those that share a line, if all rings have one size.
static i64 wanted_rows(const ContextArgs* a, ContextRow* pick) {
  i64 widest = 0, least = a->stage()[0].ring_size, n = 0;
  for (i64 s = 0; s < a->stages; s++) {
    widest = std::max(widest, a->stage()[s].ring_size);
    least = std::min(least, a->stage()[s].ring_size);
  }
  std::vector<char> taken(widest == least && a->passes > 1 ? a->slots * widest : 0, 0);
  for (i64 i = a->passes; i-- > 0;) {
    const Pass& p = *a->pass(i)->pass;
    for (i64 r = p.rows; r-- > 0;) {
      i64 slot = p.slots[r];
      if (!kept(p, r, widest) || (a->first && i < a->first[slot])) continue;
      if (!taken.empty()) {
        char& mine = taken[slot * widest + p.positions[r] % widest];
        if (mine) continue;
        mine = 1;
      }
      pick[n++] = {a->pass(i), r};
    }
  }
  std::reverse(pick, pick + n);
  return n;
}

EXPORT void fs_context_rows(const ContextArgs* a) {
  Mode m(a->flags);
  i64 all = 0;
  for (i64 i = 0; i < a->passes; i++) all += a->pass(i)->pass->rows;
  ContextRow* pick = scratch<ContextRow>(EXTRA, all);
  i64 n = wanted_rows(a, pick);
  if (!n) return;
  float* at[MAX_STAGES];
  BY_NUMERICS(m.official, stage_rows<O>(a, pick, n, m.threads, at));
  store_rows(a, pick, n, at);
}
