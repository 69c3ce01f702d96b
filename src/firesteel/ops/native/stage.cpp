// A draft stage as one call: the same ops in the same order, results in between in scratch.

struct NormWeight {
  const float* weight;
  double eps;
};

struct HyperWeight {
  const Weight* fn;
  const float *base, *scale;
  i64 iters;
  double eps, rms_eps;
  NormWeight norm;
};

struct StageWeight {
  HyperWeight attn, ffn;
  const Weight *wq_a, *wq_b, *wkv;
  NormWeight q_norm, kv_norm;
  const float* sinks;
  i64 heads, dim, span, groups;  // dim: of a head
  double eps;                    // of the queries' norm
  const Weight* const* low;
  const Weight* last;
  const Weight* gate;
  const float* bias;
  const i64* table;
  i64 top_k;
  double route_scale;
  const Weight *w13, *w2;
  i64 experts, shared;
  const Weight* const* shared_w;
  double limit;
};

struct StageArgs {
  const StageWeight* w;
  const Pass* pass;
  const float* h;  // [R, hc, d]
  i64 hc, d;
  const i64* tokens;
  const float* ring;
  i64 ring_size;
  const float *cos, *sin;
  i64 half;
  float* out;  // [R, hc, d]
  i64 flags;
};

struct Shelf {  // parts of one scratch buffer, on cache lines
  char* next;
  template <class T = float>
  T* take(i64 count) {
    T* part = (T*)next;
    next += (count * sizeof(T) + 63) / 64 * 64;
    return part;
  }
};

struct Between {  // what a stage's ops hand on
  float *x, *post, *comb, *qa, *q, *kv, *o, *f, *h, *weights;
  i64* ids;
  Between(const StageArgs* a, Shelf s) {
    const StageWeight& w = *a->w;
    i64 R = a->pass->rows, wide = w.heads * w.dim;
    x = s.take(R * a->d), post = s.take(R * a->hc), comb = s.take(R * a->hc * a->hc);
    qa = s.take(R * w.wq_a->n), q = s.take(R * wide), kv = s.take(R * w.dim), o = s.take(R * wide);
    f = s.take(R * a->d), h = s.take(R * a->hc * a->d), weights = s.take(R * w.top_k);
    ids = s.take<i64>(R * w.top_k);
    size = s.next - (char*)nullptr;
  }
  i64 size;  // bytes, if the shelf began at null
};

static void enter(const StageArgs* a, const HyperWeight& w, const float* h, const Between& b) {
  HyperArgs pre{h, a->pass->rows, a->hc, a->d, w.fn, w.base, w.scale, w.iters, w.eps, w.rms_eps, w.norm.weight,
                w.norm.eps, b.x, b.post, b.comb, a->flags};
  fs_hyper_pre(&pre);
}

static void leave(const StageArgs* a, const float* h, const Between& b, float* out) {
  PostArgs post{b.f, h, b.post, b.comb, a->pass->rows, a->hc, a->d, out, a->flags};
  fs_hyper_post(&post);
}

static void apply(const float* x, i64 rows, const Weight* w, float* out, i64 flags) {
  LinearArgs args{x, rows, w, out, flags};
  fs_linear(&args);
}

static void stage_attention(const StageArgs* a, const Between& b) {
  const StageWeight& w = *a->w;
  i64 R = a->pass->rows, rank = w.wq_a->n;
  apply(b.x, R, w.wq_a, b.qa, a->flags);
  NormArgs norm{b.qa, R, rank, w.q_norm.weight, w.q_norm.eps, b.qa, a->flags};
  fs_norm(&norm);
  apply(b.qa, R, w.wq_b, b.q, a->flags);
  TurnArgs query{b.q, R, w.heads, w.dim, nullptr, w.eps, a->cos, a->sin, a->half, b.q, a->flags};
  fs_query(&query);
  apply(b.x, R, w.wkv, b.kv, a->flags);
  TurnArgs key{b.kv, R, 1, w.dim, w.kv_norm.weight, w.kv_norm.eps, a->cos, a->sin, a->half, b.kv, a->flags};
  fs_key_value(&key);
  AttentionArgs attention{KeyArgs{a->pass, b.kv, a->ring, a->ring_size, w.dim}, b.q, w.heads, w.span, w.sinks,
                          Entries{nullptr, 0, 1, 0}, 1, nullptr, 0, a->cos, a->sin, a->half, b.o, 1, a->flags};
  fs_attention(&attention);
  OutputArgs output{b.o, R, w.groups, w.low, w.last, b.f, a->flags};
  fs_output(&output);
}

static void stage_experts(const StageArgs* a, const Between& b) {
  const StageWeight& w = *a->w;
  i64 R = a->pass->rows;
  RouteArgs route{b.x, R, w.gate, w.bias, w.table, a->tokens, w.top_k, w.route_scale, b.ids, b.weights, a->flags};
  fs_route(&route);
  MoeArgs moe{b.x, R, a->d, w.top_k, b.ids, b.weights, w.w13, w.w2, w.experts, w.shared, w.shared_w, w.limit, b.f,
              a->flags};
  fs_moe(&moe);
}

EXPORT void fs_draft_stage(const StageArgs* a) {
  i64 bytes = Between(a, Shelf{nullptr}).size;
  Between b(a, Shelf{scratch<char>(STAGE, bytes)});
  enter(a, a->w->attn, a->h, b);
  stage_attention(a, b);
  leave(a, a->h, b, b.h);
  enter(a, a->w->ffn, b.h, b);
  stage_experts(a, b);
  leave(a, b.h, b, a->out);
}
