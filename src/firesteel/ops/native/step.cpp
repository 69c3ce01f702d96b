// Rows of a step and what becomes of them: integer work around the model.

struct BuildArgs {
  const i64 *prompt_tokens, *prompt_positions, *prompt_slots, *prompt_first, *prompt_last, *sampling;
  i64 prompt_rows, finals;
  const i64 *decodes, *widths;
  i64 groups, decode_rows, scratch;
  const i64 *cursor, *anchor, *drafts;
  i64 drafts_wide;
  i64 *history, length;
  i64 *tokens, *positions, *slots, *first, *last;  // [R]
  uint8_t* valid;
  i64 *rows, *group;                   // [S]
  i64 *offset, *width, *sample_slots;  // [G]
};

static void decode_row(const BuildArgs* a, i64 row, i64 g, i64 start) {
  i64 at = a->prompt_rows + row, slot = a->decodes[g], depth = row - start;
  i64 draft = std::min(std::max<i64>(depth - 1, 0), a->drafts_wide - 1);
  a->tokens[at] = depth ? a->drafts[slot * a->drafts_wide + draft] : a->anchor[slot];
  a->positions[at] = a->cursor[slot] + depth;
  a->slots[at] = slot;
  a->first[at] = a->prompt_rows + start;
  a->last[at] = a->prompt_rows + start + a->widths[g] - 1;
  a->valid[at] = 1;
}

EXPORT void fs_build_rows(const BuildArgs* a) {
  size_t prompt = a->prompt_rows * sizeof(i64);
  std::memcpy(a->tokens, a->prompt_tokens, prompt);
  std::memcpy(a->positions, a->prompt_positions, prompt);
  std::memcpy(a->slots, a->prompt_slots, prompt);
  std::memcpy(a->first, a->prompt_first, prompt);
  std::memcpy(a->last, a->prompt_last, prompt);
  std::memset(a->valid, 1, a->prompt_rows);
  for (i64 f = 0; f < a->finals; f++) {
    a->rows[f] = a->sampling[f], a->group[f] = a->offset[f] = f, a->width[f] = 1;
    a->sample_slots[f] = a->prompt_slots[a->sampling[f]];
  }
  i64 g = 0, start = 0;  // group of the row and its first row
  for (i64 row = 0; row < a->decode_rows; row++) {
    while (g < a->groups && row >= start + a->widths[g]) start += a->widths[g++];
    i64 at = a->prompt_rows + row;
    if (g < a->groups) {
      decode_row(a, row, g, start);
    } else {  // padding: alone in the scratch slot at position 0
      a->tokens[at] = a->positions[at] = a->valid[at] = 0;
      a->slots[at] = a->scratch;
      a->first[at] = a->last[at] = at;
    }
    a->rows[a->finals + row] = at;
    a->group[a->finals + row] = a->finals + g;
  }
  for (i64 i = 0, begin = a->finals; i < a->groups; begin += a->widths[i++]) {
    i64 at = a->finals + i;
    a->offset[at] = begin, a->width[at] = a->widths[i], a->sample_slots[at] = a->decodes[i];
  }
  for (i64 r = 0; r < a->prompt_rows + a->decode_rows; r++)
    if (a->positions[r] < a->length) a->history[a->slots[r] * a->length + a->positions[r]] = a->tokens[r];
}

struct CommitArgs {
  const i64* tokens;
  const uint8_t* finite;
  i64 samples;
  const i64 *positions, *rows, *offset, *width, *slots;
  i64 groups, widest;
  i64 *cursor, *anchor, *alive;
  const i64 *max_len, *stop_ids;
  i64 stops;
  const i64* drafts;
  i64 drafts_wide;
  i64 *out, *count, *accepted, *verified, *finished;  // out [G, widest]
};

enum Finish { RUNS = 0, STOP = 1, LENGTH = 2, BROKEN = 3 };

static bool is_stop(const CommitArgs* a, i64 slot, i64 token) {
  const i64* ids = a->stop_ids + slot * a->stops;
  return std::find(ids, ids + a->stops, token) != ids + a->stops;
}

static void commit_group(const CommitArgs* a, i64 g) {
  i64 slot = a->slots[g], width = a->width[g], offset = a->offset[g], end = a->samples - 1;
  i64 *token = a->out + g * a->widest, accepted = 0, finish = RUNS;
  for (i64 w = 0; w < a->widest; w++) token[w] = a->tokens[std::min(offset + w, end)];
  while (accepted < a->widest - 1 && accepted + 1 < width &&
         token[accepted] == a->drafts[slot * a->drafts_wide + accepted])
    accepted++;
  i64 count = width > 0 ? accepted + 1 : 0;
  for (i64 w = 0; w < count; w++) {  // up to the first broken row or stop id
    if (!a->finite[std::min(offset + w, end)])
      count = w, finish = BROKEN;
    else if (is_stop(a, slot, token[w]))
      count = w + 1, finish = STOP;
  }
  i64 base = a->positions[a->rows[std::min(offset, end)]] + 1, room = a->max_len[slot] - base;
  if (room < count || (room == count && finish == RUNS)) finish = LENGTH;
  count = std::min(count, std::max<i64>(room, 0));
  if (width > 0) {
    if (count > 0) a->cursor[slot] = base + count - 1, a->anchor[slot] = token[count - 1];
    a->alive[slot] = finish == RUNS;
  }
  a->count[g] = count;
  a->accepted[g] = std::min(accepted, count);
  a->verified[g] = std::max<i64>(width - 1, 0);
  a->finished[g] = width > 0 ? finish : RUNS;
}

EXPORT void fs_commit(const CommitArgs* a) {
  for (i64 g = 0; g < a->groups; g++) commit_group(a, g);
}
