// Sampling: keyed Gumbel noise and argmax in one pass over the logits.

struct SampleArgs {
  const float* logits;
  i64 rows, vocab;
  const i64 *slots, *positions;
  const i64 *seed_lo, *seed_hi, *sample;
  const float* temperature;
  i64 stream;
  i64* tokens;
  uint8_t* finite;
  i64 flags;
};

struct Key {
  u32 k0, k1, position, stream, high;
};

// First word of Philox4x32-10 (Salmon et al., 2011) for ids id .. id + n - 1
static void philox(const Key& key, u32 id, i64 n, u32* out) {
  for (i64 i = 0; i < n; i++) {
    u32 c0 = id + (u32)i, c1 = key.position, c2 = key.stream, c3 = key.high, k0 = key.k0, k1 = key.k1;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
      u32 a = (u32)(p1 >> 32) ^ c1 ^ k0, b = (u32)(p0 >> 32) ^ c3 ^ k1;
      c0 = a, c1 = (u32)p1, c2 = b, c3 = (u32)p0;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[i] = c0;
  }
}

INLINE float uniform1(u32 word) {  // (word + 1/2) * 2^-32, below one
  float v = (float)(((double)word + 0.5) * 2.3283064365386963e-10);
  return v > 0.99999994f ? 0.99999994f : v;
}

INLINE float gumbel1(u32 word) { return -log1(-log1p1(-uniform1(word))); }

constexpr i64 CHUNK = 256;

static void perturb(const float* x, float heat, const Key& key, u32 id, i64 n, float* out) {  // n <= CHUNK
  u32 words[CHUNK];
  philox(key, id, n, words);
  for (i64 i = 0; i < n; i++) out[i] = x[i] + heat * gumbel1(words[i]);
}

EXPORT void fs_gumbel(const u32* words, i64 n, float* out) {  // for tests of the noise
  for (i64 i = 0; i < n; i++) out[i] = gumbel1(words[i]);
}

struct PhiloxArgs {
  Key key;
  u32 id;
  i64 n;
  u32* out;
};

EXPORT void fs_philox(const PhiloxArgs* a) { philox(a->key, a->id, a->n, a->out); }

// Largest value; NaN and +inf set `odd`.
static float largest(const float* x, i64 n, bool* odd) {
  vf top = all(-INFINITY);
  vu bad = {};
  i64 i = 0;
  for (; i + VW <= n; i += VW) {
    vf v = load(x + i);
    bad |= (vu)(((vu)v & 0x7f800000u) == 0x7f800000u) & (vu)((vu)v != 0xff800000u);
    top = vmax(v, top);
  }
  float lanes[VW], most = -INFINITY;
  u32 wrong[VW];
  store(lanes, top);
  std::memcpy(wrong, &bad, sizeof wrong);
  for (int j = 0; j < VW; j++) most = std::max(most, lanes[j]), *odd |= wrong[j] != 0;
  for (; i < n; i++) most = std::max(most, x[i]), *odd |= !(x[i] < INFINITY);
  return most;
}

INLINE Key key_of(const SampleArgs* a, i64 r) {
  i64 slot = a->slots[r];
  return {(u32)a->seed_lo[slot], (u32)a->sample[slot], (u32)a->positions[r], (u32)a->stream, (u32)a->seed_hi[slot]};
}

// Lowest id with the best score; false for NaN, +inf or nothing to choose from.
static bool sample_row(const SampleArgs* a, const float* logits, i64 r) {
  float heat = a->temperature[a->slots[r]], top = -INFINITY, highest = -INFINITY, noisy[CHUNK];
  Key key = key_of(a, r);
  i64 best = 0;
  bool odd = false;
  for (i64 at = 0; at < a->vocab; at += CHUNK) {
    i64 n = std::min(CHUNK, a->vocab - at);
    const float* score = logits + at;
    float most = largest(score, n, &odd);
    highest = std::max(highest, most);
    if (heat > 0.0f) {
      bool unused = false;
      perturb(score, heat, key, (u32)at, n, noisy);
      most = largest(score = noisy, n, &unused);
    }
    if (!(most > top)) continue;
    top = most;
    i64 i = 0;
    while (i < n - 1 && score[i] != most) i++;
    best = at + i;
  }
  a->tokens[r] = best;
  return !odd && highest > -INFINITY;
}

EXPORT void fs_sample(const SampleArgs* a) {
  parallel(a->rows, Mode(a->flags).threads,
           [&](i64 r) { a->finite[r] = sample_row(a, a->logits + r * a->vocab, r); });
}

struct HeadArgs {
  SampleArgs sample;  // logits: the head's input x [R, K]
  const Weight* head;
};

EXPORT void fs_head_sample(const HeadArgs* a) {  // blocks of rows bound the logits that exist at once
  constexpr i64 BLOCK = 4 * ROWS;
  const SampleArgs* s = &a->sample;
  int threads = Mode(s->flags).threads;
  for (i64 at = 0; at < s->rows; at += BLOCK) {
    i64 rows = std::min(BLOCK, s->rows - at);
    float* logits = scratch(PARTS, rows * s->vocab);
    product(s->logits + at * a->head->k, rows, a->head->k, a->head, logits, s->vocab, false, threads);
    parallel(rows, threads, [&](i64 r) { s->finite[at + r] = sample_row(s, logits + r * s->vocab, at + r); });
  }
}

// ---- the drafter's walk -----------------------------------------------------------------
struct WalkArgs {
  const float* w1;
  const i64* previous;
  const Weight* w2;
  const float* base;  // line g at base + g*step
  i64 step, groups;
  float *embedded, *logits;  // [G, r], [G, V]
  i64 flags;
};

EXPORT void fs_walk_logits(const WalkArgs* a) {  // base + w1[previous] w2^T
  i64 rank = a->w2->k, vocab = a->w2->n;
  for (i64 g = 0; g < a->groups; g++)
    std::memcpy(a->embedded + g * rank, a->w1 + a->previous[g] * rank, rank * sizeof(float));
  product(a->embedded, a->groups, rank, a->w2, a->logits, vocab, false, Mode(a->flags).threads);
  for (i64 g = 0; g < a->groups; g++)
    for (i64 i = 0; i < vocab; i++) a->logits[g * vocab + i] += a->base[g * a->step + i];
}

struct PickArgs {
  SampleArgs sample;  // finite unused
  const i64* streams;  // [G]
  i64 *history, length;  // [S, length]
  float* margin;
};

// Best and second best perturbed logit; the token goes into the slot's history.
static void pick_row(const PickArgs* p, i64 g) {
  const SampleArgs* a = &p->sample;
  const float* logits = a->logits + g * a->vocab;
  float heat = a->temperature[a->slots[g]], top = -INFINITY, second = -INFINITY, noisy[CHUNK];
  Key key = key_of(a, g);
  key.stream = (u32)p->streams[g];
  i64 best = 0;
  for (i64 at = 0; at < a->vocab; at += CHUNK) {
    i64 n = std::min(CHUNK, a->vocab - at);
    const float* score = logits + at;
    if (heat > 0.0f) perturb(score, heat, key, (u32)at, n, noisy), score = noisy;
    bool unused = false;
    if (!(largest(score, n, &unused) > second)) continue;
    for (i64 i = 0; i < n; i++) {
      if (score[i] > top)
        second = top, top = score[i], best = at + i;
      else if (score[i] > second)
        second = score[i];
    }
  }
  a->tokens[g] = best;
  p->margin[g] = (top - second) / (heat > 0.0f ? heat : 1.0f);
  p->history[a->slots[g] * p->length + a->positions[g]] = best;
}

EXPORT void fs_walk_pick(const PickArgs* p) {
  parallel(p->sample.rows, Mode(p->sample.flags).threads, [&](i64 g) { pick_row(p, g); });
}
