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

// Each 64-bit lane is one counter; what stands in its upper half never reaches a lower one.
typedef u64 vq __attribute__((vector_size(VW * 4)));

INLINE vq times(vq a, vq b) {  // of the lower halves
#if defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

INLINE vq upper(vq a) {  // the upper halves, lowered; a shuffle leaves the multiplier's port alone
#if defined(__AVX512F__)
  return (vq)_mm512_shuffle_epi32((__m512i)a, (_MM_PERM_ENUM)0xF5);
#else
  return a >> 32;
#endif
}

INLINE vq pair(vq low, vq high) { return (low & 0xffffffffu) | (high << 32); }

// Lanes of a and b in turn into 2 * VW words
INLINE void store_turns(u32* out, vq a, vq b) {
#if defined(__AVX512F__)
  const __m512i lower = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), higher = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64((__m512i)a, lower, (__m512i)b));
  _mm512_storeu_si512(out + VW, _mm512_permutex2var_epi64((__m512i)a, higher, (__m512i)b));
#elif defined(__AVX2__)
  __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b), odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
  _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256((__m256i*)(out + VW), _mm256_permute2x128_si256(even, odd, 0x31));
#else
  for (int l = 0; l < VW / 2; l++) {
    u64 two[2] = {a[l], b[l]};
    std::memcpy(out + 4 * l, two, sizeof two);
  }
#endif
}

constexpr i64 CALLS = VW / 2, DRAWN = 4 * CALLS;  // calls of a vector, ids that they serve

// Words of ids 4 * call .. 4 * call + n - 1: id v has word v % 4 of Philox4x32-10 (Salmon et al., 2011) with
// v / 4 in its counter; `out` has room for whole vectors
static void philox(const Key& key, u32 call, i64 n, u32* out) {
  vq lane, zero = {}, k0[10], k1[10];
  for (int l = 0; l < CALLS; l++) lane[l] = (u64)l;
  for (u32 i = 0; i < 10; i++) {
    k0[i] = zero + (u32)(key.k0 + i * 0x9E3779B9u);
    k1[i] = zero + (u32)(key.k1 + i * 0xBB67AE85u);
  }
  vq m0 = zero + 0xD2511F53u, m1 = zero + 0xCD9E8D57u;
  for (i64 i = 0; i < n; i += DRAWN) {
    vq c0 = lane + (u64)(u32)(call + (u32)(i / 4));
    vq c1 = zero + key.position, c2 = zero + key.stream, c3 = zero + key.high;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
      vq p0 = times(c0, m0), p1 = times(c2, m1);
      c0 = upper(p1) ^ c1 ^ k0[round], c2 = upper(p0) ^ c3 ^ k1[round];
      c1 = p1, c3 = p0;
    }
    store_turns(out + i, pair(c0, c1), pair(c2, c3));
  }
}

INLINE float uniform1(u32 word) {  // (word + 1/2) * 2^-32, below one
  float v = (float)(((double)word + 0.5) * 2.3283064365386963e-10);
  return v > 0.99999994f ? 0.99999994f : v;
}

INLINE float gumbel1(u32 word) { return -log1(-log1p1(-uniform1(word))); }

constexpr i64 CHUNK = 256;  // ids
static_assert(CHUNK % DRAWN == 0, "chunks begin with a call");

EXPORT void fs_gumbel(const u32* words, i64 n, float* out) {  // for tests of the noise
  for (i64 i = 0; i < n; i++) out[i] = gumbel1(words[i]);
}

struct PhiloxArgs {
  Key key;
  u32 id;
  i64 n;
  u32* out;
};

EXPORT void fs_philox(const PhiloxArgs* a) {  // any first id
  const i64 skip = a->id % 4, end = skip + a->n;
  for (i64 at = 0; at < end; at += CHUNK) {
    u32 words[CHUNK];
    i64 n = std::min(CHUNK, end - at), from = at ? 0 : skip;
    philox(a->key, a->id / 4 + (u32)(at / 4), n, words);
    std::memcpy(a->out + at + from - skip, words + from, (n - from) * sizeof(u32));
  }
}

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

// Largest noise word that can lift a logit of at most `most` above `bar`. The margins cover
// the rounding of scores; a score grows with its logit, so `most` stands for all.
static u32 word_bound(float most, float bar, float heat) {
  double need = ((double)bar - most - 1e-5 * (std::fabs((double)bar) + std::fabs((double)most))) / heat - 1e-3;
  double share = -std::expm1(-std::exp(-need));  // of the words whose noise is that large
  return share < 0.999 ? (u32)(share * 4294967296.0) + 1 : 0xffffffffu;  // NaN: all
}

struct Contenders {  // tokens of a chunk that may beat a score, ascending
  i64 count;
  u32 place[CHUNK + VW];
  float score[CHUNK];
};

// `id`, the first, is a multiple of 4
static void contend(const float* x, i64 n, u32 bound, float heat, const Key& key, u32 id, Contenders* c) {
  alignas(64) u32 words[CHUNK];
  philox(key, id / 4, n, words);
  i64 m = 0, i = 0;
#if defined(__AVX512F__)
  __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n; i += 16) {
    __m512i w = _mm512_loadu_si512(words + i);
    __mmask16 low = _mm512_cmple_epu32_mask(w, _mm512_set1_epi32((int)bound));
    if (!low) continue;
    _mm512_storeu_si512(c->place + m, _mm512_maskz_compress_epi32(low, _mm512_add_epi32(lane, _mm512_set1_epi32((int)i))));
    m += __builtin_popcount(low);
  }
#endif
  for (; i < n; i++) {
    c->place[m] = (u32)i;
    m += words[i] <= bound;
  }
  for (i = 0; i < m; i++) c->score[i] = x[c->place[i]] + heat * gumbel1(words[c->place[i]]);
  c->count = m;
}

// Lowest id with the best score; false for NaN, +inf or nothing to choose from.
static bool sample_row(const SampleArgs* a, const float* logits, i64 r) {
  float heat = a->temperature[a->slots[r]], top = -INFINITY, highest = -INFINITY;
  Key key = key_of(a, r);
  i64 best = 0;
  bool odd = false;
  Contenders c;
  for (i64 at = 0; at < a->vocab; at += CHUNK) {
    i64 n = std::min(CHUNK, a->vocab - at);
    const float* x = logits + at;
    float most = largest(x, n, &odd);
    highest = std::max(highest, most);
    if (heat > 0.0f) {
      if (!(most > -INFINITY)) continue;
      contend(x, n, word_bound(most, top, heat), heat, key, (u32)at, &c);
      for (i64 i = 0; i < c.count; i++)
        if (c.score[i] > top) top = c.score[i], best = at + c.place[i];
    } else if (most > top) {
      top = most;
      i64 i = 0;
      while (i < n - 1 && x[i] != most) i++;
      best = at + i;
    }
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

struct Best {
  float top = -INFINITY, second = -INFINITY;
  i64 id = 0;
  void see(float score, i64 token) {
    if (score > top)
      second = top, top = score, id = token;
    else if (score > second)
      second = score;
  }
};

// Best and second best perturbed logit; the token goes into the slot's history.
static void pick_row(const PickArgs* p, i64 g) {
  const SampleArgs* a = &p->sample;
  const float* logits = a->logits + g * a->vocab;
  float heat = a->temperature[a->slots[g]];
  Key key = key_of(a, g);
  key.stream = (u32)p->streams[g];
  Best best;
  Contenders c;
  for (i64 at = 0; at < a->vocab; at += CHUNK) {
    i64 n = std::min(CHUNK, a->vocab - at);
    const float* x = logits + at;
    bool unused = false;
    float most = largest(x, n, &unused);
    if (heat > 0.0f) {
      if (!(most > -INFINITY)) continue;
      contend(x, n, word_bound(most, best.second, heat), heat, key, (u32)at, &c);
      for (i64 i = 0; i < c.count; i++) best.see(c.score[i], at + c.place[i]);
    } else if (most > best.second) {
      for (i64 i = 0; i < n; i++) best.see(x[i], at + i);
    }
  }
  a->tokens[g] = best.id;
  p->margin[g] = (best.top - best.second) / (heat > 0.0f ? heat : 1.0f);
  p->history[a->slots[g] * p->length + a->positions[g]] = best.id;
}

EXPORT void fs_walk_pick(const PickArgs* p) {
  parallel(p->sample.rows, Mode(p->sample.flags).threads, [&](i64 g) { pick_row(p, g); });
}
