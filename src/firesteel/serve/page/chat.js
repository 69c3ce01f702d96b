// A conversation whose answers are made of tokens that know where they come from.

import { drawStrip, short } from "./charts.js";

const el = (tag, name = "", text = "") => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
};

/** Server-sent events of a response, as parsed JSON, until "[DONE]". */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
      const data = buffer.slice(0, end).replace(/^data: /, "");
      buffer = buffer.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Raised for what the server answers instead of an answer. */
export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(body, headers, signal) {
  const reply = await fetch("/v1/chat/completions", {
    method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(body), signal,
  });
  if (!reply.ok) {
    const told = await reply.json().catch(() => ({}));
    throw new Refused(reply.status, told.error?.message ?? `the server answered ${reply.status}`);
  }
  return reply;
}

/** The text of one part of an answer, token by token. */
class Tokens {
  constructor(parent) { this.parent = parent; this.last = null; }
  add(text, token, first) {
    if (this.last?.token === token) { this.last.span.append(text); return null; }
    const span = el("span", `k ${token.drafted ? "d" : "s"}${first ? " b" : ""}`, text);
    span.dataset.n = token.n;
    this.parent.append(span);
    this.last = { span, token };
    return span;
  }
}

export class Answer {
  constructor(log, body) {
    this.body = body;
    this.node = el("article", "answer running");
    this.node.setAttribute("aria-busy", "true");
    this.thought = null;
    this.textNode = el("div", "text current");
    this.textNode.tabIndex = 0;
    this.textNode.setAttribute("aria-label", "Answer; arrow keys go from token to token");
    this.parts = { content: new Tokens(this.textNode) };
    this.strip = el("canvas", "strip");
    this.strip.setAttribute("role", "img");
    this.strip.hidden = true;
    this.facts = el("p", "facts");
    this.node.append(this.textNode, this.strip, this.facts);
    log.append(this.node);
    this.tokens = [];
    this.pending = [];
    this.steps = [];
    this.spans = [];
    this.content = this.reasoning = "";
    this.end = null;
    this.started = performance.now();
    this.first = null;
    this.drawn = 0;
  }

  take(chunk) {
    if (chunk.error) throw new Refused(500, chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      for (const token of choice.firesteel?.tokens ?? []) this.note(token);
      const { reasoning, content, tool_calls: calls } = choice.delta ?? {};
      if (reasoning) this.write("reasoning", reasoning);
      if (content) this.write("content", content);
      for (const call of calls ?? []) {
        const name = call.function?.name ? `\n${call.function.name} ` : "";
        this.write("content", name + (call.function?.arguments ?? ""));
      }
      if (choice.finish_reason) this.end = { reason: choice.finish_reason, seed: choice.seed, stats: choice.stats };
    }
  }

  note(token) {
    this.first ??= performance.now();
    token.n = this.tokens.length;
    this.tokens.push(token);
    this.pending.push(token);
    let step = this.steps.at(-1);
    if (step?.step !== token.step) {
      step = { step: token.step, verified: token.verified, drafted: 0, sampled: 0, first: token.n };
      this.steps.push(step);
    }
    step[token.drafted ? "drafted" : "sampled"] += 1;
    token.at = step;
    const now = performance.now();
    if (now - this.drawn > 80) { this.drawn = now; this.draw(); }
  }

  /** Give a piece of text to the tokens it comes from; text that no token claims belongs to the newest. */
  write(kind, text) {
    this[kind] += text;
    const part = this.part(kind);
    while (text) {
      const at = this.pending.findIndex((t) => t.text && (text.startsWith(t.text) || t.text.endsWith(text) || t.text.startsWith(text)));
      const token = at >= 0 ? this.pending[at] : this.pending.at(-1) ?? this.tokens.at(-1);
      if (!token) { part.parent.append(text); return; }
      const piece = at >= 0 && text.startsWith(token.text) ? token.text : text;
      if (at >= 0) this.pending.splice(0, at + 1);
      const span = part.add(piece, token, token.at.first === token.n);
      if (span) this.spans.push(span);
      text = text.slice(piece.length);
    }
  }

  part(kind) {
    if (kind === "reasoning" && !this.thought) {
      this.thought = el("details", "thought");
      this.thought.open = true;
      this.thoughtTitle = el("summary", "", "Thinking");
      const text = el("div", "text current");
      this.textNode.classList.remove("current");
      this.textNode.hidden = true;
      this.thought.append(this.thoughtTitle, text);
      this.node.prepend(this.thought);
      this.parts.reasoning = new Tokens(text);
    }
    if (kind === "content" && this.textNode.hidden) {
      this.textNode.hidden = false;
      this.parts.reasoning.parent.classList.remove("current");
      this.textNode.classList.add("current");
    }
    return this.parts[kind];
  }

  draw() {
    this.strip.hidden = this.tokens.length < 2;
    if (this.thought) {
      const count = this.parts.reasoning.parent.childElementCount;
      this.thoughtTitle.textContent = `Thinking, ${count} tokens`;
    }
    const drafted = this.tokens.filter((t) => t.drafted).length;
    this.strip.setAttribute("aria-label", `${this.steps.length} steps, ${drafted} accepted drafts of ${this.tokens.length} tokens`);
    drawStrip(this.strip, this.steps);
  }

  /** The last line: what it took. ``again`` runs it without drafts. */
  finish(problem, again) {
    this.node.classList.remove("running");
    this.node.setAttribute("aria-busy", "false");
    this.seconds = (performance.now() - this.started) / 1000;
    this.draw();
    if (problem) {
      const line = el("p", "problem", problem);
      line.setAttribute("role", "alert");
      this.node.append(line);
    }
    if (!this.tokens.length) { if (!this.content) this.textNode.hidden = true; return; }
    if (!this.content && this.thought) this.textNode.hidden = true;
    const drafted = this.tokens.filter((t) => t.drafted).length;
    const writing = (performance.now() - this.first) / 1000;
    this.fact(this.tokens.length, "tokens");
    this.fact(this.steps.length, "steps");
    this.fact(short(this.tokens.length / this.steps.length, 3), "tokens per step");
    if (drafted) this.fact(`${Math.round((100 * drafted) / this.tokens.length)} %`, "drafted");
    if (this.tokens.length > 1 && writing > 0) this.fact(short((this.tokens.length - 1) / writing), "tokens/s");
    this.fact(`${short((this.first - this.started) / 1000, 2)} s`, "to the first");
    if (this.end) this.fact(this.end.seed, "seed");
    if (this.end?.reason === "length") this.facts.append(el("span", "", "cut at the longest answer"));
    if (again && this.end && drafted) {
      const button = el("button", "", "Again without drafts");
      button.type = "button";
      button.title = "The same request and seed, one token per step: the text must be the same";
      button.addEventListener("click", () => { button.remove(); again(this); });
      this.facts.append(button);
    }
  }

  fact(value, name) {
    const item = el("span");
    item.append(el("b", "", String(value)), ` ${name}`);
    this.facts.append(item);
  }

  /** What a token says of itself. */
  tell(n) {
    const t = this.tokens[n];
    const place = n - t.at.first + 1;
    const shown = t.text === null ? "" : `${JSON.stringify(t.text)}  `;
    const how = t.drafted
      ? `drafted and accepted: number ${place} of ${t.verified} drafts that the step verified`
      : t.verified === 0 ? "sampled by the model; the step verified no drafts of it"
        : t.at.drafted < t.verified ? `sampled by the model: draft ${t.at.drafted + 1} was refused`
          : "sampled by the model: a bonus behind accepted drafts";
    return `${shown}token ${t.id}\nstep ${t.step}, ${how}`;
  }
}

export class Chat {
  /** log: where answers go; headers(): of every request; onRun(bool): an answer runs; onLocked(): a key is needed. */
  constructor(log, { headers, onRun, onLocked }) {
    Object.assign(this, { log, headers, onRun, onLocked });
    this.messages = [];
    this.answers = new Map();
    this.abort = null;
  }

  get busy() { return this.abort !== null; }

  clear() {
    this.stop();
    this.messages = [];
    this.answers.clear();
    this.log.querySelectorAll(".asked, .answer").forEach((n) => n.remove());
  }

  stop() { this.abort?.abort(); }

  async send(text, options) {
    this.log.append(el("div", "asked", text));
    const messages = [...this.messages, { role: "user", content: text }];
    const body = {
      messages, stream: true, firesteel: { tokens: true }, return_stats: true,
      stream_options: { include_usage: true }, ...options,
    };
    const answer = new Answer(this.log, body);
    this.answers.set(answer.node, answer);
    this.log.scrollTop = this.log.scrollHeight;
    const problem = await this.run(answer, body);
    answer.finish(problem, (a) => this.compare(a));
    if (!problem && answer.tokens.length) {
      this.messages = [...messages, { role: "assistant", content: answer.content }];
    }
    this.follow();
    return answer;
  }

  async run(answer, body) {
    this.abort = new AbortController();
    this.onRun(true);
    try {
      const reply = await ask(body, this.headers(), this.abort.signal);
      for await (const chunk of events(reply)) {
        answer.take(chunk);
        this.follow();
      }
      return answer.end ? "" : "the answer broke off";
    } catch (err) {
      if (err.name === "AbortError") return "stopped";
      if (err.status === 401) this.onLocked();
      return err instanceof Refused ? err.message : `no connection to the server (${err.message})`;
    } finally {
      this.abort = null;
      this.onRun(false);
    }
  }

  /** Scroll along unless the reader has scrolled away. */
  follow() {
    const { log } = this;
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
  }

  /** The proof: the same request and seed without drafts gives the same tokens. */
  async compare(answer) {
    const line = el("p", "note", "running it again, one token per step …");
    answer.node.append(line);
    this.follow();
    const shadow = new Answer(document.createDocumentFragment(), answer.body);
    const problem = await this.run(shadow, { ...answer.body, seed: answer.end.seed, speculative: false });
    if (problem) { line.textContent = `not compared: ${problem}`; return; }
    const seconds = (performance.now() - shadow.started) / 1000;
    const differs = shadow.tokens.findIndex((t, i) => t.id !== answer.tokens[i]?.id);
    const same = differs < 0 && shadow.tokens.length === answer.tokens.length;
    line.classList.add(same ? "good" : "bad");
    line.textContent = same
      ? `Identical: the same ${answer.tokens.length} tokens, in ${shadow.steps.length} steps instead of ` +
        `${answer.steps.length} (${short(seconds, 2)} s instead of ${short(answer.seconds, 2)} s).`
      : `The tokens differ from number ${Math.max(differs, 0) + 1} on. This must not happen: please report it.`;
    this.follow();
  }
}
