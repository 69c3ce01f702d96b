// Window and compressed attention, compressors and the indexer, one row at a time.
//
// A key is read where it lies: rows of the pass from the pass, older ones from the
// slot's ring, entries from their page. Window keys come first by ascending
// position, then entries ascending; sums run over them in that order.

struct KeyArgs {  // where the keys of a pass lie; data [R, d], ring [S, n, d]
  const Pass* pass;
  const float* data;
  const float* ring;
  i64 ring_size, d;
};

INLINE const float* key_at(const KeyArgs& a, i64 row, i64 position) {
  i64 first = a.pass->first[row], start = a.pass->positions[first];
  if (position >= start) return a.data + (first + position - start) * a.d;
  return a.ring + (a.pass->slots[row] * a.ring_size + position % a.ring_size) * a.d;
}

// The last `ring` rows of every slot; padding writes nothing.
static void store_ring(const KeyArgs& a, float* ring) {
  const Pass& p = *a.pass;
  for (i64 r = 0; r < p.rows; r++)
    if (p.valid[r] && p.positions[p.last[r]] - p.positions[r] < a.ring_size)
      std::memcpy(ring + (p.slots[r] * a.ring_size + p.positions[r] % a.ring_size) * a.d, a.data + r * a.d,
                  a.d * sizeof(float));
}

struct StoreArgs {
  KeyArgs keys;
  float* ring;
};

EXPORT void fs_store_window(const StoreArgs* a) { store_ring(a->keys, a->ring); }

// lanes of `to` are heads: to [k][lanes], from [heads][k], missing heads zero
static void heads_last(const float* from, i64 heads, i64 k, i64 lanes, float* to) {
  std::memset(to, 0, k * lanes * sizeof(float));
  for (i64 h = 0; h < heads; h++)
    for (i64 i = 0; i < k; i++) to[i * lanes + h] = from[h * k + i];
}

INLINE i64 head_lanes(i64 heads) { return (heads + VW - 1) / VW * VW; }

// scores of N keys for VW heads: one chain over k each
template <int N>
INLINE void dots(const float* const* keys, const float* q, i64 lanes, i64 k, vf* out) {
  vf acc[N] = {};
  for (i64 i = 0; i < k; i++) {
    vf a = load(q + i * lanes);
    UNROLL
    for (int j = 0; j < N; j++) acc[j] = fma(a, all(keys[j][i]), acc[j]);
  }
  UNROLL
  for (int j = 0; j < N; j++) out[j] = acc[j];
}

// ---- attention -------------------------------------------------------------------
struct AttentionArgs {
  KeyArgs keys;
  const float* q;
  i64 heads, span;
  const float* sinks;
  Entries entries;  // data null: none
  i64 ratio;
  const i64* selection;
  i64 selected;
  const float *cos, *sin;
  i64 half;
  float* out;
  i64 block;  // 1: a draft block, whose rows all see the rows before the group and all of the group
  i64 flags;
};

// Rows from <= t < to of a slot's ring.
static i64 list_ring(const KeyArgs& k, i64 slot, i64 from, i64 to, const float** out) {
  const float* ring = k.ring + slot * k.ring_size * k.d;
  i64 n = 0, place = from % k.ring_size;
  for (i64 t = from; t < to; t++) {
    out[n++] = ring + place * k.d;
    if (++place == k.ring_size) place = 0;
  }
  return n;
}

static i64 list_block(const AttentionArgs* a, i64 r, const float** out, i64* window) {
  const Pass& p = *a->keys.pass;
  i64 first = p.first[r], start = p.positions[first];
  i64 n = list_ring(a->keys, p.slots[r], std::max<i64>(0, start - a->span), start, out);
  *window = n;
  for (i64 i = first; i <= p.last[r]; i++) out[n++] = a->keys.data + i * a->keys.d;
  return n;
}

static i64 list_keys(const AttentionArgs* a, i64 r, const float** out, i64* window) {
  const Pass& p = *a->keys.pass;
  if (a->block) return list_block(a, r, out, window);
  i64 at = p.positions[r], slot = p.slots[r], first = p.first[r], start = p.positions[first];
  i64 from = std::max<i64>(0, at - a->span + 1), n = list_ring(a->keys, slot, from, start, out);
  for (i64 t = std::max(from, start); t <= at; t++) out[n++] = a->keys.data + (first + t - start) * a->keys.d;
  *window = n;
  if (!a->entries.data) return n;
  if (!a->selection) {
    for (i64 e = 0; e < (at + 1) / a->ratio; e++) out[n++] = entry_at(p, a->entries, slot, e);
    return n;
  }
  const i64* chosen = a->selection + r * a->selected;
  for (i64 i = 0; i < a->selected; i++)
    if (chosen[i] >= 0) out[n++] = entry_at(p, a->entries, slot, chosen[i]);
  return n;
}

// Scores [n][lanes] to probabilities above the sink; total [lanes].
//
// Official numerics round each probability while it is relative to the largest score
// so far: of the `window` keys for those, then of each further ENTRY_TILE keys. Later
// maxima scale it down without rounding. float32 has nothing to round: one tile.
constexpr i64 ENTRY_TILE = 64;

struct Softmax {
  i64 n, window, lanes, heads;
  float scale;
  const float* sinks;
  float *scores, *total, *tops;  // tops [tiles][lanes]: maxima, then factors
  i64 tile_end(i64 tile) const { return std::min(n, window + tile * ENTRY_TILE); }
  i64 tiles() const { return 1 + (n - window + ENTRY_TILE - 1) / ENTRY_TILE; }
};

static void relative_scores(const Softmax& s, i64 tiles) {
  for (i64 l = 0; l < s.lanes; l += VW) {
    vf sink = load_part(s.sinks + l, std::min<i64>(VW, s.heads - l)), top = sink;
    for (i64 t = 0, i = 0; t < tiles; t++) {
      i64 end = tiles == 1 ? s.n : s.tile_end(t);
      for (i64 j = i; j < end; j++) {
        vf x = load(s.scores + j * s.lanes + l) * s.scale;
        store(s.scores + j * s.lanes + l, x);
        top = vmax(top, x);
      }
      for (; i < end; i++) store(s.scores + i * s.lanes + l, load(s.scores + i * s.lanes + l) - top);
      store(s.tops + t * s.lanes + l, top);
    }
    for (i64 t = 0; t < tiles; t++) store(s.tops + t * s.lanes + l, load(s.tops + t * s.lanes + l) - top);
    store(s.total + l, sink - top);
  }
}

template <bool O>
static void softmax(const Softmax& s) {
  i64 tiles = O ? s.tiles() : 1;
  relative_scores(s, tiles);
  for (i64 i = 0; i < s.n * s.lanes; i++) s.scores[i] = exp1(s.scores[i]);
  for (i64 i = 0; i < tiles * s.lanes; i++) s.tops[i] = exp1(s.tops[i]);
  for (i64 l = 0; l < s.lanes; l++) s.total[l] = exp1(s.total[l]);
  for (i64 l = 0; l < s.lanes; l += VW) {
    vf sum = load(s.total + l);
    for (i64 t = 0, i = 0; t < tiles; t++) {
      vf part = {}, factor = load(s.tops + t * s.lanes + l);
      for (i64 end = tiles == 1 ? s.n : s.tile_end(t); i < end; i++) {
        vf p = load(s.scores + i * s.lanes + l);
        part += p;
        if (O) store(s.scores + i * s.lanes + l, bf16_lanes(p) * factor);
      }
      sum += part * factor;
    }
    store(s.total + l, sum);
  }
}

// out [M heads][columns] of NV vectors: chains over the keys in order
template <int M, int NV>
static void weigh(const float* const* keys, i64 n, const float* p, i64 lanes, i64 at, i64 columns, float* out, i64 ldo) {
  vf acc[M][NV] = {};
  bool whole = columns >= NV * VW;
  for (i64 i = 0; i < n; i++) {
    vf b[NV];
    if (whole) {
      UNROLL
      for (int v = 0; v < NV; v++) b[v] = load(keys[i] + at + v * VW);
    } else {
      for (int v = 0; v < NV; v++)
        b[v] = load_part(keys[i] + at + v * VW, std::max<i64>(0, std::min<i64>(VW, columns - v * VW)));
    }
    UNROLL
    for (int m = 0; m < M; m++) {
      vf w = all(p[i * lanes + m]);
      UNROLL
      for (int v = 0; v < NV; v++) acc[m][v] = fma(w, b[v], acc[m][v]);
    }
  }
  UNROLL
  for (int m = 0; m < M; m++)
    UNROLL
    for (int v = 0; v < NV; v++) {
      i64 left = columns - v * VW;
      if (left >= VW)
        store(out + m * ldo + v * VW, acc[m][v]);
      else if (left > 0)
        store_part(out + m * ldo + v * VW, acc[m][v], left);
    }
}

template <int NV>
static void weigh_heads(const float* const* keys, i64 n, const float* p, i64 lanes, i64 heads, i64 at, i64 columns,
                        float* out, i64 d) {
  i64 h = 0;
  for (; h + 4 <= heads; h += 4) weigh<4, NV>(keys, n, p + h, lanes, at, columns, out + h * d + at, d);
  for (; h < heads; h++) weigh<1, NV>(keys, n, p + h, lanes, at, columns, out + h * d + at, d);
}

template <bool O>
static void attention_row(const AttentionArgs* a, i64 r) {
  i64 d = a->keys.d, heads = a->heads, lanes = head_lanes(heads);
  const Pass& p = *a->keys.pass;
  i64 most = a->span + p.last[r] - p.first[r] + 1 + (!a->entries.data ? 0 : a->selection ? a->selected : (p.positions[r] + 1) / a->ratio);
  const float** keys = scratch<const float*>(EXTRA, most + 8);
  i64 window, n = list_keys(a, r, keys, &window), tiles = n / ENTRY_TILE + 3;
  float *q = scratch(QT, d * lanes), *s = scratch(SCORES, (n + tiles + 1) * lanes), *total = s + n * lanes;
  heads_last(a->q + r * heads * d, heads, d, lanes, q);
  for (i64 l = 0; l < lanes; l += VW) {
    vf got[8];
    i64 i = 0;
    for (; i + 8 <= n; i += 8) {
      dots<8>(keys + i, q + l, lanes, d, got);
      for (int j = 0; j < 8; j++) store(s + (i + j) * lanes + l, got[j]);
    }
    for (; i < n; i++) {
      dots<1>(keys + i, q + l, lanes, d, got);
      store(s + i * lanes + l, got[0]);
    }
  }
  softmax<O>({n, window, lanes, heads, (float)(1.0 / std::sqrt((double)d)), a->sinks, s, total, total + lanes});
  float* out = a->out + r * heads * d;
  constexpr i64 STEP = VW >= 16 ? 4 : 2;
  for (i64 at = 0; at < d; at += STEP * VW) weigh_heads<STEP>(keys, n, s, lanes, heads, at, d - at, out, d);
  for (i64 h = 0; h < heads; h++) {
    for (i64 i = 0; i < d; i++) out[h * d + i] = act<O>(out[h * d + i] / total[h]);
    rotate_row<O>(out + h * d, d, a->cos + r * a->half, a->sin + r * a->half, a->half, -1.0f);
  }
}

EXPORT void fs_attention(const AttentionArgs* a) {
  Mode m(a->flags);
  BY_NUMERICS(m.official, parallel(a->keys.pass->rows, m.threads, [&](i64 r) { attention_row<O>(a, r); }));
}

// ---- compressors -------------------------------------------------------------------
struct CompressArgs {
  const Pass* pass;
  const float* x;
  const Weight* project;
  const float* ape;
  const float* norm_weight;
  double norm_eps;
  i64 ratio, dim, overlap, index;
  float* ring;
  i64 ring_size;
  Entries entries;
  const float *cos, *sin;  // of the entry a row would close
  i64 half, flags;
};

// softmax-weighted sum of the tokens that row r closes: out [dim]
static void pool(const CompressArgs* a, const KeyArgs& raw, i64 r, float* out) {
  i64 d = a->dim, width = raw.d / 2, at = raw.pass->positions[r], tokens = a->ratio * (a->overlap ? 2 : 1);
  const float** lines = scratch<const float*>(EXTRA, tokens);
  float *top = scratch(QT, 2 * d), *sum = top + d, *p = scratch(SCORES, tokens * d);
  i64 begin = std::max<i64>(0, at - tokens + 1), n = 0;
  for (i64 t = begin; t <= at; t++) {  // the window before gives its A half, this one its B half
    i64 half = a->overlap && t > at - a->ratio ? d : 0;
    lines[n++] = key_at(raw, r, t) + half;
  }
  for (i64 i = 0; i < d; i++) top[i] = lines[0][width + i], sum[i] = 0.0f, out[i] = 0.0f;
  for (i64 t = 1; t < n; t++)
    for (i64 i = 0; i < d; i++) top[i] = lines[t][width + i] > top[i] ? lines[t][width + i] : top[i];
  for (i64 t = 0; t < n; t++)
    for (i64 i = 0; i < d; i++) p[t * d + i] = exp1(lines[t][width + i] - top[i]);
  for (i64 t = 0; t < n; t++)
    for (i64 i = 0; i < d; i++) sum[i] += p[t * d + i];
  for (i64 t = 0; t < n; t++)
    for (i64 i = 0; i < d; i++) out[i] += p[t * d + i] / sum[i] * lines[t][i];
}

template <bool O>
static void index_round(float* x, i64 n) {  // indexer queries and keys: Hadamard, then FP4
  if (!O) return;
  hadamard(x, n);
  for (i64 i = 0; i < n; i++) x[i] = bf16(x[i]);
  e2m1_groups(x, n, 32);
}

template <bool O>
static void close_entry(const CompressArgs* a, const KeyArgs& raw, i64 r) {
  const Pass& p = *a->pass;
  i64 e = p.positions[r] / a->ratio, d = a->dim;
  float* y = entry_at(p, a->entries, p.slots[r], e);
  pool(a, raw, r, y);
  for (i64 i = 0; i < d; i++) y[i] = act<O>(y[i]);
  rms_row<O>(y, a->norm_weight, (float)a->norm_eps, y, d);
  rotate_row<O>(y, d, a->cos + r * a->half, a->sin + r * a->half, a->half, 1.0f);
  if (a->index)
    index_round<O>(y, d);
  else
    stored_row<O>(y, d, 2 * a->half);
}

EXPORT void fs_compress(const CompressArgs* a) {
  Mode m(a->flags);
  const Pass& p = *a->pass;
  i64 n = a->project->n, width = n / 2;
  float* raw = scratch(RAW, p.rows * n);
  product(a->x, p.rows, a->project->k, a->project, raw, n, false, m.threads);
  for (i64 r = 0; r < p.rows; r++) {
    const float* ape = a->ape + p.positions[r] % a->ratio * width;
    for (i64 i = 0; i < width; i++) raw[r * n + width + i] += ape[i];
  }
  KeyArgs keys{a->pass, raw, a->ring, a->ring_size, n};
  BY_NUMERICS(m.official, parallel(p.rows, m.threads, [&](i64 r) {
                if (p.valid[r] && (p.positions[r] + 1) % a->ratio == 0) close_entry<O>(a, keys, r);
              }));
  store_ring(keys, a->ring);
}

// ---- indexer -------------------------------------------------------------------------
struct IndexArgs {
  const Pass* pass;
  const float* q;
  i64 heads, d;
  const float* weights;
  Entries keys;
  i64 ratio, top_k, width;  // width: columns of out
  const float *cos, *sin;
  i64 half;
  i64* out;
  i64 flags;
};

INLINE u64 rank_key(float score, i64 index) {  // ascending: best score first, then lowest index
  u32 b = bits(score + 0.0f);  // -0 ties with 0
  if (score != score) b = 0x7fffffffu;  // NaN ranks first, as in a descending sort
  u32 up = b & 0x80000000u ? ~b : b | 0x80000000u;
  return (u64)~up << 32 | (u32)index;
}

template <bool O>
static void index_scores(const IndexArgs* a, i64 r, i64 visible, u64* ranks) {
  const Pass& p = *a->pass;
  i64 heads = a->heads, d = a->d, lanes = head_lanes(heads), slot = p.slots[r];
  float *mine = scratch(SCORES, heads * d + lanes), *w = mine + heads * d, *q = scratch(QT, d * lanes);
  std::memcpy(mine, a->q + r * heads * d, heads * d * sizeof(float));
  for (i64 h = 0; h < heads; h++) {
    for (i64 i = 0; i < d; i++) mine[h * d + i] = act<O>(mine[h * d + i]);
    rotate_row<O>(mine + h * d, d, a->cos + r * a->half, a->sin + r * a->half, a->half, 1.0f);
    index_round<O>(mine + h * d, d);
  }
  heads_last(mine, heads, d, lanes, q);
  for (i64 h = 0; h < lanes; h++) w[h] = h < heads ? a->weights[r * heads + h] : 0.0f;
  for (i64 e = 0; e < visible; e += 8) {
    const float* keys[8];
    i64 n = std::min<i64>(8, visible - e);
    for (i64 j = 0; j < 8; j++)  // missing lanes repeat the last key
      keys[j] = entry_at(p, a->keys, slot, e + std::min(j, n - 1));
    vf sum[8] = {}, got[8];
    for (i64 l = 0; l < lanes; l += VW) {
      dots<8>(keys, q + l, lanes, d, got);
      for (int j = 0; j < 8; j++) sum[j] += vmax(got[j], vf{}) * load(w + l);
    }
    for (i64 j = 0; j < n; j++) ranks[e + j] = rank_key(act<O>(lane_sum(sum[j])), e + j);
  }
}

template <bool O>
static void select_row(const IndexArgs* a, i64 r) {
  i64 visible = (a->pass->positions[r] + 1) / a->ratio, *out = a->out + r * a->width;
  i64 n = std::min(visible, a->width);
  if (visible <= a->top_k) {
    for (i64 i = 0; i < a->width; i++) out[i] = i < n ? i : -1;
    return;
  }
  u64* ranks = scratch<u64>(EXTRA, visible);
  index_scores<O>(a, r, visible, ranks);
  std::nth_element(ranks, ranks + a->top_k - 1, ranks + visible);
  for (i64 i = 0; i < a->top_k; i++) out[i] = (i64)(u32)ranks[i];
  std::sort(out, out + a->top_k);
}

EXPORT void fs_index_select(const IndexArgs* a) {
  Mode m(a->flags);
  BY_NUMERICS(m.official, parallel(a->pass->rows, m.threads, [&](i64 r) { select_row<O>(a, r); }));
}
