// Numbers, vectors and threads shared by all ops.
//
// Compiled with -ffp-contract=off: a multiply-add is fused only where `fma` says
// so. Every other float operation is IEEE per element, hence a loop that the
// compiler vectorises gives the bits of its scalar tail, and a row's result does
// not depend on where the row stands.
#ifndef FIRESTEEL_VEC
#define FIRESTEEL_VEC
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

using i64 = int64_t;
using u32 = uint32_t;
using u64 = uint64_t;

// ---- vectors of VW floats ---------------------------------------------------
#if defined(__AVX512F__)
constexpr int VW = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int VW = 8;
#else
constexpr int VW = 4;
#endif
typedef float vf __attribute__((vector_size(VW * 4)));
typedef u32 vu __attribute__((vector_size(VW * 4)));
typedef float vf_any __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef u32 vu_any __attribute__((vector_size(VW * 4), aligned(4), may_alias));

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE vu load_bits(const u32* p) { return *(const vu_any*)p; }
INLINE void store(float* p, vf v) { *(vf_any*)p = v; }
INLINE vf all(float x) { return x - vf{}; }  // x - 0 is x for every x, -0 and NaN included

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

INLINE vf load_part(const float* p, i64 n) {  // first n lanes, the others zero
  float t[VW] = {};
  std::memcpy(t, p, n * sizeof(float));
  return load(t);
}

INLINE void store_part(float* p, vf v, i64 n) {
  float t[VW];
  store(t, v);
  std::memcpy(p, t, n * sizeof(float));
}

INLINE float lane_sum(vf v) {  // one fixed tree
  float t[VW];
  store(t, v);
  for (int half = VW / 2; half; half /= 2)
    for (int i = 0; i < half; i++) t[i] += t[i + half];
  return t[0];
}

INLINE float sum_squares(const float* x, i64 n) {  // four chains of VW lanes, then a tree
  vf a[4] = {};
  i64 i = 0;
  for (; i + 4 * VW <= n; i += 4 * VW)
    for (int j = 0; j < 4; j++) {
      vf v = load(x + i + j * VW);
      a[j] = fma(v, v, a[j]);
    }
  for (; i < n; i += VW) {
    vf v = n - i >= VW ? load(x + i) : load_part(x + i, n - i);
    a[0] = fma(v, v, a[0]);
  }
  return lane_sum((a[0] + a[1]) + (a[2] + a[3]));
}

// ---- scalar functions; loops over them vectorise -------------------------------
INLINE u32 bits(float x) { return __builtin_bit_cast(u32, x); }
INLINE float real(u32 b) { return __builtin_bit_cast(float, b); }

INLINE float bf16(float x) {  // to the bf16 grid, nearest even, NaN stays NaN
  u32 b = bits(x);
  u32 r = (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
  return x != x ? x : real(r);
}

template <bool O>
INLINE float act(float x) {
  return O ? bf16(x) : x;
}

INLINE vf bf16_lanes(vf x) {
  vu b = (vu)x;
  vu r = (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
  return (vf)(x != x ? b : r);
}

INLINE float exp1(float x) {  // below the normal range the result is 0
  float low = x < -87.336f ? -87.336f : x;
  float c = low > 89.0f ? 89.0f : low;
  float t = fma1(c, 1.44269504f, 12582912.0f);
  int32_t n = (int32_t)(bits(t) - 0x4b400000u);
  float k = t - 12582912.0f;
  float r = fma1(k, -1.42860677e-6f, fma1(k, -0.693145752f, c));
  float p = 1.98412698e-4f;
  p = fma1(p, r, 1.38888889e-3f);
  p = fma1(p, r, 8.33333333e-3f);
  p = fma1(p, r, 4.16666667e-2f);
  p = fma1(p, r, 1.66666667e-1f);
  p = fma1(p, r, 0.5f);
  p = fma1(p, r, 1.0f);
  p = fma1(p, r, 1.0f);
  int32_t a = n >> 1, b = n - a;  // two factors: 2^128 is no float
  float y = p * real((u32)(a + 127) << 23) * real((u32)(b + 127) << 23);
  return x < -87.336f ? 0.0f : y;
}

INLINE float log1(float x) {  // natural logarithm of a positive normal number
  u32 b = bits(x) - 0x3f3504f3u;
  int32_t e = (int32_t)b >> 23;
  float k = (float)e;
  float f = real(bits(x) - ((u32)e << 23)) - 1.0f;  // in [sqrt(1/2)-1, sqrt(2)-1)
  float s = f / (2.0f + f), z = s * s;
  float r = z * fma1(z, fma1(z, fma1(z, 0.222222222f, 0.285714286f), 0.4f), 0.666666667f);
  float h = 0.5f * f * f;
  float tail = fma1(s, h + r, k * 1.42860677e-6f);
  return k * 0.693145752f - ((h - tail) - f);
}

INLINE float log1p1(float x) {  // x > -1; the rounding of 1 + x is put back
  float u = 1.0f + x;
  return log1(u) + (x - (u - 1.0f)) / u;
}

INLINE float sigmoid1(float x) { return 1.0f / (1.0f + exp1(-x)); }

// ---- threads and scratch -------------------------------------------------------
struct Mode {
  bool official;
  int threads;
  explicit Mode(i64 flags) : official(flags & 1), threads((int)(flags >> 8)) {}
};

template <class F>
static void parallel(i64 n, int threads, F&& f) {  // f(i); no OpenMP at all with one thread
#ifdef _OPENMP
  if (threads > 1 && n > 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 i = 0; i < n; i++) f(i);
    return;
  }
#endif
  for (i64 i = 0; i < n; i++) f(i);
}

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

enum Place { QUANT, GATHER, INNER, PARTS, SHARED, RAW, MIX, QT, SCORES, EXTRA, STAGE, PLACES };

template <class T = float>
static T* scratch(Place place, i64 count) {  // this thread's buffer, 64-byte aligned, grows only
  static thread_local Buffer buffers[PLACES];
  Buffer& b = buffers[place];
  size_t need = (size_t)count * sizeof(T) + 64;
  if (b.size < need) {
    std::free(b.data);
    b.size = (need + need / 2 + 63) & ~(size_t)63;
    b.data = std::aligned_alloc(64, b.size);
    if (!b.data) std::abort();
  }
  return (T*)b.data;
}

// ---- one pass --------------------------------------------------------------------
struct Pass {
  const i64 *positions, *slots, *first, *last;
  const uint8_t* valid;
  const i64* pages;  // [S, columns]
  i64 rows, columns, page_size;
};

struct Entries {  // pages of per_page entries [dim]; page p begins at data + p*stride
  float* data;
  i64 stride, per_page, dim;
};

INLINE float* entry_at(const Pass& p, const Entries& e, i64 slot, i64 entry) {
  u32 page = (u32)entry / (u32)e.per_page, place = (u32)entry % (u32)e.per_page;  // 32-bit division is fast
  i64 column = std::min<i64>(page, p.columns - 1);
  return e.data + p.pages[slot * p.columns + column] * e.stride + place * e.dim;
}

#endif
