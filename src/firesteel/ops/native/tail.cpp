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

static void sample_row(const SampleArgs* a, i64 r) {
  constexpr i64 CHUNK = 256;
  i64 slot = a->slots[r], best = 0;
  float heat = a->temperature[slot], top = 0.0f;
  Key key{(u32)a->seed_lo[slot], (u32)a->sample[slot], (u32)a->positions[r], (u32)a->stream, (u32)a->seed_hi[slot]};
  u32 odd = 0, words[CHUNK];
  bool any = false;
  float score[CHUNK];
  for (i64 at = 0; at < a->vocab; at += CHUNK) {
    i64 n = std::min(CHUNK, a->vocab - at);
    const float* x = a->logits + r * a->vocab + at;
    u32 bad = 0;
    for (i64 i = 0; i < n; i++) bad |= (bits(x[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    odd |= bad;
    if (heat > 0.0f) {
      philox(key, (u32)at, n, words);
      for (i64 i = 0; i < n; i++) score[i] = x[i] + heat * gumbel1(words[i]);
    } else {
      std::memcpy(score, x, n * sizeof(float));
    }
    float most = score[0];
    for (i64 i = 1; i < n; i++) most = score[i] > most ? score[i] : most;
    if (any && !(most > top)) continue;
    for (i64 i = 0; i < n; i++)
      if (!any || score[i] > top) top = score[i], best = at + i, any = true;
  }
  a->tokens[r] = best;
  a->finite[r] = !odd;
}

EXPORT void fs_sample(const SampleArgs* a) {
  parallel(a->rows, Mode(a->flags).threads, [&](i64 r) { sample_row(a, r); });
}
