// The drafter's part around its layers: rows of a block, the walk, survival, admission.

struct BlockArgs {
  const i64 *slots, *cursor, *anchor;
  i64 groups, width, noise;
  i64 *tokens, *positions, *row_slots, *first, *last;  // [G*width]
  uint8_t* valid;
};

EXPORT void fs_block_rows(const BlockArgs* a) {
  for (i64 g = 0, at = 0; g < a->groups; g++)
    for (i64 j = 0; j < a->width; j++, at++) {
      a->tokens[at] = j ? a->noise : a->anchor[a->slots[g]];
      a->positions[at] = a->cursor[a->slots[g]] + j;
      a->row_slots[at] = a->slots[g];
      a->first[at] = g * a->width;
      a->last[at] = g * a->width + a->width - 1;
      a->valid[at] = 1;
    }
}

// ---- the walk ------------------------------------------------------------------------
struct MarkovArgs {
  const float *base, *z;  // [G, K, V], [G, K, d]
  i64 groups, depth, d;
  const float* w1;
  const Weight *w2, *head;  // head null: no confidence
  const i64 *slots, *cursor, *anchor, *passes, *seed_lo, *seed_hi, *sample;
  const float* temperature;
  i64 *history, length;
  i64 stream, shift;  // of the noise; shift >= 0: the drafting pass stands above the stream
  i64* tokens;        // [G, K]
  float *margin, *confidence, *kept;  // [G, K], [G, K] or null, [G, K, V] or null
  i64 flags;
};

// One position of every group: logits [G, V] of the draft behind `previous`, which it replaces
static void walk_step(const MarkovArgs* a, i64 j, float* logits, float* embedded, i64* lines, float* margin) {
  i64 rank = a->w2->k, vocab = a->w2->n, G = a->groups, *previous = lines, *places = lines + G;
  int threads = Mode(a->flags).threads;
  WalkArgs walk{a->w1, previous, a->w2, a->base + j * vocab, a->depth * vocab, G, embedded, logits, a->flags};
  fs_walk_logits(&walk);
  for (i64 g = 0; g < G; g++) places[g] = std::min(a->cursor[a->slots[g]] + 1 + j, a->length - 1);
  SampleArgs sample{logits,    G,         vocab,          a->slots, places,   a->seed_lo, a->seed_hi,
                    a->sample, a->temperature, 0,         previous, nullptr,  a->flags};
  PickArgs pick{sample, lines + 2 * G, a->history, a->length, margin};
  parallel(G, threads, [&](i64 g) { pick_row(&pick, g); });
  for (i64 g = 0; g < G; g++) {
    i64 at = g * a->depth + j;
    a->tokens[at] = previous[g], a->margin[at] = margin[g];
    if (a->kept) std::memcpy(a->kept + at * vocab, logits + g * vocab, vocab * sizeof(float));
  }
}

EXPORT void fs_markov_walk(const MarkovArgs* a) {
  i64 rank = a->w2->k, G = a->groups, wide = a->d + rank;
  i64* lines = scratch<i64>(EXTRA, 3 * G);  // previous tokens, places, streams
  float *logits = scratch(PARTS, G * a->w2->n), *embedded = scratch(INNER, G * (rank + 1)), *margin = embedded + G * rank;
  float* joined = a->head ? scratch(RAW, G * a->depth * wide) : nullptr;
  for (i64 g = 0; g < G; g++) {
    i64 slot = a->slots[g];
    lines[g] = a->anchor[slot];
    lines[2 * G + g] = a->stream + (a->shift >= 0 ? a->passes[slot] << a->shift : 0);
    a->history[slot * a->length + std::min(a->cursor[slot], a->length - 1)] = lines[g];
  }
  for (i64 j = 0; j < a->depth; j++) {
    walk_step(a, j, logits, embedded, lines, margin);
    for (i64 g = 0; joined && g < G; g++) {
      float* line = joined + (g * a->depth + j) * wide;
      std::memcpy(line, a->z + (g * a->depth + j) * a->d, a->d * sizeof(float));
      std::memcpy(line + a->d, embedded + g * rank, rank * sizeof(float));
    }
  }
  if (joined) product(joined, G * a->depth, wide, a->head, a->confidence, 1, false, Mode(a->flags).threads);
}

// ---- survival and admission ------------------------------------------------------------
struct SurvivalArgs {
  const float *margin, *confidence;  // [G, K]; confidence may be null
  const i64* slots;
  i64 groups, depth;
  const float *temperature, *depths, *head, *margins;  // depths [2, table], head and margins [2]; null: survival 1
  i64 table;
  float* out;  // [G, K]
};

constexpr float MAX_MARGIN = 50.0f;  // of speculation/survival.py

INLINE float finite1(float x) {  // NaN to 0, infinities to the largest number
  x = x != x ? 0.0f : x;
  return std::min(std::max(x, -3.4028234663852886e38f), 3.4028234663852886e38f);
}

static void survive(const SurvivalArgs* a, i64 g) {
  i64 kind = a->temperature[a->slots[g]] > 0.0f;
  float alive = 1.0f;
  for (i64 j = 0; j < a->depth; j++) {
    i64 at = g * a->depth + j;
    if (a->depths) {
      float margin = std::min(std::max(finite1(a->margin[at]), 0.0f), MAX_MARGIN);
      float logit = a->depths[kind * a->table + j] + a->margins[kind] * log1p1(margin);
      if (a->confidence) logit += a->head[kind] * finite1(a->confidence[at]);
      alive *= sigmoid1(logit);
    }
    a->out[at] = alive;
  }
}

EXPORT void fs_survival(const SurvivalArgs* a) {
  for (i64 g = 0; g < a->groups; g++) survive(a, g);
}

struct NoteArgs {
  SurvivalArgs survival;
  const i64* tokens;  // [G, K]
  i64 *passes, *draft_len, *drafts;
  float *margin, *confidence, *survived;  // [S, wide], as drafts
  i64 wide;
};

EXPORT void fs_note_drafts(const NoteArgs* a) {
  const SurvivalArgs* s = &a->survival;
  size_t row = s->depth * sizeof(float);
  for (i64 g = 0; g < s->groups; g++) {
    i64 slot = s->slots[g], at = slot * a->wide, from = g * s->depth;
    survive(s, g);
    a->passes[slot]++;
    a->draft_len[slot] = s->depth;
    std::memcpy(a->drafts + at, a->tokens + from, s->depth * sizeof(i64));
    std::memcpy(a->margin + at, s->margin + from, row);
    if (s->confidence) std::memcpy(a->confidence + at, s->confidence + from, row);
    std::memcpy(a->survived + at, s->out + from, row);
  }
}

struct AdmitArgs {
  const i64* decodes;
  i64 groups, drafts;
  const i64 *alive, *cursor, *max_len, *draft_len, *draft_cap;
  const float* survival;  // [S, wide]
  i64 wide;
  i64* widths;  // [G]
};

EXPORT void fs_admit(const AdmitArgs* a) {
  i64 *order = scratch<i64>(EXTRA, 2 * a->groups * a->wide), n = 0;
  float* score = (float*)(order + a->groups * a->wide);
  for (i64 g = 0; g < a->groups; g++) a->widths[g] = a->alive[a->decodes[g]];
  if (!a->drafts) return;
  for (i64 k = 0; k < a->wide; k++)  // depth first, so ties go to shallow drafts
    for (i64 g = 0; g < a->groups; g++) {
      i64 slot = a->decodes[g], room = std::max<i64>(a->max_len[slot] - a->cursor[slot] - 2, 0);
      i64 most = std::min(std::min(a->draft_len[slot], a->draft_cap[slot]), room) * a->alive[slot];
      if (k >= most) continue;
      float s = a->survival[slot * a->wide + k];
      score[k * a->groups + g] = s != s ? INFINITY : s;  // as in a descending sort
      order[n++] = k * a->groups + g;
    }
  auto before = [&](i64 i, i64 j) { return score[i] > score[j] || (score[i] == score[j] && i < j); };
  i64 taken = std::min(n, a->drafts);
  if (taken < n) std::nth_element(order, order + taken, order + n, before);
  for (i64 i = 0; i < taken; i++) a->widths[order[i] % a->groups]++;
}

// ---- rotations of a pass -----------------------------------------------------------------
struct AngleArgs {
  const i64* positions;
  i64 rows;
  const float* turns;  // [T, half]
  const i64* ratios;   // [T]: of the entry that a row would close; 1 for the row itself
  i64 tables, half;
  float* out;  // [T, R, half]
};

EXPORT void fs_angles(const AngleArgs* a) {
  float* y = a->out;
  for (i64 t = 0; t < a->tables; t++)
    for (i64 r = 0; r < a->rows; r++, y += a->half) {
      float at = (float)(a->positions[r] / a->ratios[t] * a->ratios[t]);
      for (i64 i = 0; i < a->half; i++) y[i] = at * a->turns[t * a->half + i];
    }
}
