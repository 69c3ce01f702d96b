// Register kernels of one kind of weight (-DKIND, -DTASK): each output element is one
// FMA chain over K in ascending k. Kernels vectorise over columns, so rows never meet.
// An FP4 kernel keeps its sums in units of the group's scale: powers of two, so the bits
// are those of the plain chain. Weights are read once per few rows, so a product of few
// rows waits for memory: kernels ask for lines well ahead of their use.
#include "weight.cpp"

constexpr int WIDE = TILE / VW;                    // vectors of a whole tile
constexpr int MANY = VW >= 16 || VW == 4 ? 2 : 1;  // vectors of a kernel of 7 to 12 rows
constexpr int SOME = VW >= 16 || VW == 4 ? 4 : 2;  // of 3 to 6 rows
constexpr i64 AHEAD = 48 * TILE;                   // words between a line's use and its request

// ---- FP4: table look-up by code ----------------------------------------------------
INLINE vf fp4_table() {
#if defined(__AVX512F__)
  return vf{0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
#elif defined(__AVX2__) && defined(__FMA__)
  return vf{0, .5f, 1, 1.5f, 2, 3, 4, 6};
#else
  return vf{} + 8.507059173023462e37f;  // 2^126
#endif
}

template <int J>
INLINE vf fp4_values(vu word, vf table) {  // code J of each word
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)(word >> (4 * J)), (__m512)table);
#elif defined(__AVX2__) && defined(__FMA__)
  vf mag = (vf)_mm256_permutevar8x32_ps((__m256)table, (__m256i)(word >> (4 * J)));
  return (vf)((vu)mag | ((word << (28 - 4 * J)) & 0x80000000u));
#else
  vu code = word >> (4 * J);
  return (vf)((code & 7u) << 22 | (code & 8u) << 28) * table;
#endif
}

INLINE vu exponent_bytes(const u32* p) {  // VW bytes widened
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  const uint8_t* b = (const uint8_t*)p;
  u32 t[VW];
  for (int i = 0; i < VW; i++) t[i] = b[i];
  return load_bits(t);
#endif
}

// ---- kernels -----------------------------------------------------------------------
template <int MR, int NV>
struct Sums {
  vf acc[MR][NV] = {};
  const float* row[4];
  inline __attribute__((always_inline)) void add(const vf* b, i64 ld, int k) {
    UNROLL
    for (int r = 0; r < MR; r++) {
      vf a = all(row[r / 3][(r % 3) * ld + k]);
      UNROLL
      for (int v = 0; v < NV; v++) acc[r][v] = fma(a, b[v], acc[r][v]);
    }
  }
  inline __attribute__((always_inline)) void step(int k) {
    for (int j = 0; j < (MR + 2) / 3; j++) row[j] += k;
  }
};

template <int NV>
INLINE void request(const u32* w) {  // into the second level; past a weight's end it does no harm
  UNROLL
  for (int v = 0; v < NV * VW; v += 16) __builtin_prefetch(w + AHEAD + v, 0, 2);
}

template <int J, int MR, int NV>
INLINE void fp4_step(Sums<MR, NV>& s, const u32* w, i64 ld, vf table) {
  vf b[NV];
  UNROLL
  for (int v = 0; v < NV; v++) b[v] = fp4_values<J>(load_bits(w + v * VW), table);
  s.add(b, ld, J);
}

template <int MR, int NV>
INLINE void fp4_chain(Sums<MR, NV>& s, i64 ld, i64 k, const u32* w, i64 at, i64 width) {
  vf table = fp4_table();
  vu old[NV] = {};
  for (i64 g = 0; g < k / 32; g++, w += 4 * width + width / 4) {
    UNROLL
    for (int v = 0; v < NV; v++) {
      vu now = exponent_bytes((const u32*)((const uint8_t*)w + at) + v * VW / 4);
      vf ratio = (vf)((g ? old[v] - now + 127u : now * 0u + 127u) << 23);
      old[v] = now;
      UNROLL
      for (int r = 0; r < MR; r++) s.acc[r][v] *= ratio;
    }
    const u32* p = w + width / 4 + at;
    __builtin_prefetch(w + AHEAD, 0, 2);
    for (int q = 0; q < 4; q++, p += width) {
      request<NV>(p);
      fp4_step<0>(s, p, ld, table);
      fp4_step<1>(s, p, ld, table);
      fp4_step<2>(s, p, ld, table);
      fp4_step<3>(s, p, ld, table);
      fp4_step<4>(s, p, ld, table);
      fp4_step<5>(s, p, ld, table);
      fp4_step<6>(s, p, ld, table);
      fp4_step<7>(s, p, ld, table);
      s.step(8);
    }
  }
  UNROLL
  for (int v = 0; v < NV; v++)
    UNROLL
    for (int r = 0; r < MR; r++) s.acc[r][v] *= (vf)(old[v] << 23);
}

template <int MR, int NV>
INLINE void bf16_chain(Sums<MR, NV>& s, i64 ld, i64 k, const u32* w, i64 width) {
  vf b[NV];
  for (i64 i = 0; i < k / 2; i++, w += width) {
    request<NV>(w);
    UNROLL
    for (int v = 0; v < NV; v++) b[v] = (vf)(load_bits(w + v * VW) << 16);
    s.add(b, ld, 0);
    UNROLL
    for (int v = 0; v < NV; v++) b[v] = (vf)(load_bits(w + v * VW) & 0xffff0000u);
    s.add(b, ld, 1);
    s.step(2);
  }
  if (k % 2) {  // the last k stands alone in its word
    UNROLL
    for (int v = 0; v < NV; v++) b[v] = (vf)(load_bits(w + v * VW) << 16);
    s.add(b, ld, 0);
  }
}

template <int MR, int NV>
INLINE void f32_chain(Sums<MR, NV>& s, i64 ld, i64 k, const u32* w, i64 width) {
  vf b[NV];
  for (i64 i = 0; i < k; i++, w += width) {
    request<NV>(w);
    UNROLL
    for (int v = 0; v < NV; v++) b[v] = (vf)load_bits(w + v * VW);
    s.add(b, ld, 0);
    s.step(1);
  }
}

static void put(const float* sums, int rows, int wide, float* out, i64 ldo, i64 columns, bool round) {
  i64 n = std::max<i64>(0, std::min<i64>(wide, columns));
  for (int r = 0; r < rows; r++)
    if (round)
      for (i64 i = 0; i < n; i++) out[r * ldo + i] = bf16(sums[r * wide + i]);
    else
      std::memcpy(out + r * ldo, sums + r * wide, n * sizeof(float));
}

// x [MR, k] by ld, w one tile, columns at .. at + NV*VW of it
template <int MR, int NV>
static void kernel(const float* x, i64 ld, i64 k, const u32* w, i64 at, i64 width, float* sums) {
  Sums<MR, NV> s;
  for (int j = 0; j < (MR + 2) / 3; j++) s.row[j] = x + 3 * j * ld;
  if constexpr (KIND == FP4)
    fp4_chain(s, ld, k, w, at, width);
  else if constexpr (KIND == BF16)
    bf16_chain(s, ld, k, w + at, width);
  else
    f32_chain(s, ld, k, w + at, width);
  UNROLL
  for (int r = 0; r < MR; r++)
    UNROLL
    for (int v = 0; v < NV; v++) store(sums + (r * NV + v) * VW, s.acc[r][v]);
}

template <int MR>
static void tile_columns(const Job& j, const float* x, float* out, const u32* w, i64 width, i64 columns) {
  constexpr int NV = MR <= 2 ? WIDE : MR <= 6 ? SOME : MANY;
  constexpr int ONE = 16 / VW < NV ? 16 / VW : NV;
  alignas(64) float sums[MR * NV * VW];
  i64 at = 0;
  for (; at + NV * VW <= width; at += NV * VW) {
    kernel<MR, NV>(x, j.ld, j.w->k, w, at, width, sums);
    put(sums, MR, NV * VW, out + at, j.ldo, columns - at, j.round);
  }
  constexpr int TWO = 2 * ONE < NV ? 2 * ONE : ONE;
  for (; at + TWO * VW <= width; at += TWO * VW) {  // two chains hide half the latency of one
    kernel<MR, TWO>(x, j.ld, j.w->k, w, at, width, sums);
    put(sums, MR, TWO * VW, out + at, j.ldo, columns - at, j.round);
  }
  for (; at < width; at += ONE * VW) {
    kernel<MR, ONE>(x, j.ld, j.w->k, w, at, width, sums);
    put(sums, MR, ONE * VW, out + at, j.ldo, columns - at, j.round);
  }
}

void TASK(const Job& j, i64 task) {
  i64 tile = task / j.blocks(), block = task % j.blocks();
  i64 each = j.rows / j.blocks(), extra = j.rows % j.blocks();
  i64 begin = block * each + std::min(block, extra), rows = each + (block < extra);
  const u32* w = (const u32*)j.w->data + column_words(j.w->k, KIND, tile * TILE);
  const float* x = j.x + begin * j.ld;
  float* out = j.out + begin * j.ldo + tile * TILE;
  i64 width = tile_width(*j.w, tile), columns = j.w->n - tile * TILE;
#define ROW_CASE(M) \
  case M: return tile_columns<M>(j, x, out, w, width, columns);
  switch (rows) {
    ROW_CASE(1) ROW_CASE(2) ROW_CASE(3) ROW_CASE(4) ROW_CASE(5) ROW_CASE(6)
    ROW_CASE(7) ROW_CASE(8) ROW_CASE(9) ROW_CASE(10) ROW_CASE(11) ROW_CASE(12)
  }
#undef ROW_CASE
}
