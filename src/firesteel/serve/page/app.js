// The page: polls the engine's numbers once a second, runs the chat, and listens to the keyboard.

import { Chat } from "./chat.js";
import { makeCharts, readPalette, short } from "./charts.js";

const $ = (id) => document.getElementById(id);
const KEPT = 300; // seconds of the past
const IDEAS = [
  "James is 15 years old. In 10 years his sister Jennifer will be 5 times as old as James is now. How old is Jennifer right now?",
  "Maya packs 12 boxes with 7 books each and gives 15 books away. How many books are left?",
  "Write a Python function that checks whether a word is a palindrome.",
];

let key = sessionStorage.getItem("firesteel-key") ?? "";
let snapshot = null;
let asking = false;
const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

// ---- numbers ---------------------------------------------------------------------
const charts = makeCharts($("charts"));

let polling = false;
async function poll() {
  if (document.hidden || polling || asking) return;
  polling = true;
  try { await fetchStats(); } finally { polling = false; }
}

async function fetchStats() {
  const since = snapshot?.points.t.at(-1) ?? 0;
  let fresh;
  try {
    const reply = await fetch(`/firesteel/stats?since=${since}`, { headers: headers() });
    if (reply.status === 401) { locked(); return; } // no more of it until there is another key
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    fresh = await reply.json();
  } catch (err) {
    say("lost", `no connection (${err.message})`);
    return;
  }
  if (snapshot) for (const name of Object.keys(fresh.points)) {
    fresh.points[name] = [...snapshot.points[name], ...fresh.points[name]].slice(-KEPT);
  }
  snapshot = fresh;
  show(fresh);
}

function say(state, text) {
  $("state").dataset.state = state;
  const line = $("state").querySelector("span");
  if (line.textContent !== text) line.textContent = text;
  $("state").title = text;
}

const sum = (name, seconds) => snapshot.points[name].slice(-seconds).reduce((a, b) => a + b, 0);
const ratio = (a, b) => (b > 0 ? a / b : null);

function show(data) {
  $("model").textContent = data.model;
  document.title = data.model === "firesteel" ? "Firesteel" : `${data.model} · Firesteel`;
  const running = data.now.running + data.now.waiting;
  say(data.state, data.state === "ready" ? (running ? `${data.now.running} running` : "ready") : `${data.state}: ${data.reason}`);
  $("f-rate").textContent = short(sum("tokens", 5) / 5);
  const drafted = sum("verified", 60) > 0;
  const groups = sum("groups", 60);
  $("f-length").textContent = groups ? (1 + sum("accepted", 60) / groups).toFixed(2) : "–";
  $("f-accepted").textContent = drafted ? `${Math.round((100 * sum("accepted", 60)) / sum("verified", 60))} %` : "–";
  $("f-step").textContent = short(ratio(sum("measured_ms", 60), sum("steps", 60)));
  notices(data);
  about(data);
  charts.show(data);
}

function notices(data) {
  const lines = data.alarms.map((text) => ["alarm", text]);
  if (data.restarts && data.state === "ready") lines.push(["alarm", `the engine has died and was started again (${data.restarts}×)`]);
  if (data.state !== "ready" && data.reason) lines.push([data.state === "starting" ? "" : "alarm", data.reason]);
  if (data.state === "ready" && !data.speculation.gamma) {
    lines.push(["", "Speculation is off, so every token is sampled: the server was started without a speculative " +
      'configuration. With a checkpoint that has a drafter, add --speculative-config \'{"method":"dspark","num_speculative_tokens":5}\'.']);
  } else if (data.state === "ready" && data.now.running && data.speculation.reason) {
    lines.push(["", `The newest step verified no drafts: ${data.speculation.reason}.`]);
  }
  const told = JSON.stringify(lines);
  if ($("notices").dataset.told === told) return;
  $("notices").dataset.told = told;
  $("notices").replaceChildren(...lines.map(([kind, text]) => Object.assign(document.createElement("p"), { className: kind, textContent: text })));
}

function about(data) {
  const e = data.engine;
  const lines = e ? [
    `Firesteel ${data.version}, ${e.path}`,
    `${e.slots} slots, ${e.pages} pages of ${e.page_size} tokens, at most ${e.max_model_len} tokens per request`,
    ...e.notes,
  ] : ["the engine is not ready"];
  if ($("notes").childElementCount === lines.length) return;
  $("notes").replaceChildren(...lines.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}

// ---- the key -----------------------------------------------------------------------
function locked() {
  say("lost", "this server asks for an API key (button Key)");
  asking = true;
  if ($("key-dialog").open) return;
  $("key-why").textContent = key ? "That key was refused." : "This server asks for a key. It is kept in this tab only.";
  $("key").value = key;
  $("key-dialog").showModal();
}
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "ok") return; // asked again when the button is pressed
  asking = false;
  key = $("key").value.trim();
  sessionStorage.setItem("firesteel-key", key);
  poll();
});
$("key-button").addEventListener("click", () => { $("key").value = key; $("key-dialog").showModal(); });

// ---- the chat ----------------------------------------------------------------------
const chat = new Chat($("log"), {
  headers,
  onLocked: locked,
  onRun(running) {
    $("send").hidden = running;
    $("stop").hidden = !running;
    if (running) poll();
  },
});

function options() {
  const out = { temperature: +$("temperature").value };
  const effort = $("effort").value;
  out.reasoning_effort = effort;
  if ($("seed").value.trim()) out.seed = +$("seed").value;
  if ($("max-tokens").value) out.max_tokens = +$("max-tokens").value;
  if ($("drafts").value !== "") {
    if (+$("drafts").value === 0) out.speculative = false;
    else out.max_draft_tokens = +$("drafts").value;
  }
  return out;
}

function chosen() {
  const t = +$("temperature").value;
  $("temperature-shown").textContent = t === 0 ? "greedy" : t.toFixed(2);
  const words = [t === 0 ? "greedy" : `temperature ${t.toFixed(2)}`, $("effort").value === "none" ? "no thinking" : `thinking: ${$("effort").value}`];
  if ($("seed").value.trim()) words.push(`seed ${$("seed").value.trim()}`);
  if ($("drafts").value !== "") words.push(`${$("drafts").value} drafts at most`);
  $("chosen").textContent = words.join(", ");
}

async function send(text) {
  if (chat.busy || !text.trim()) return;
  const wrong = [...$("settings").querySelectorAll("input")].find((i) => !i.checkValidity());
  if (wrong) { toggleSettings(true); wrong.reportValidity(); return; }
  $("welcome").hidden = true;
  $("prompt").value = "";
  grow();
  await chat.send(text.trim(), options());
  $("prompt").focus({ preventScroll: true });
}

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function toggleSettings(open = $("settings").hidden) {
  $("settings").hidden = !open;
  $("settings-button").setAttribute("aria-expanded", String(open));
}

function toggleColours() { $("colours").click(); }

function fresh() {
  chat.clear();
  $("welcome").hidden = false;
  $("prompt").focus();
}

$("composer").addEventListener("submit", (e) => { e.preventDefault(); send($("prompt").value); });
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send($("prompt").value); }
});
$("stop").addEventListener("click", () => chat.stop());
$("new").addEventListener("click", fresh);
$("settings-button").addEventListener("click", () => toggleSettings());
$("settings").addEventListener("input", chosen);
$("colours").addEventListener("change", () => document.body.classList.toggle("colours", $("colours").checked));
for (const text of IDEAS) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => send(text));
  $("ideas").append(button);
}

// ---- tokens under the pointer, or under the arrow keys ---------------------------------
let marked = [];
function mark(span) {
  marked.forEach((s) => s.classList.remove("same", "here"));
  marked = [];
  const answer = span && chat.answers.get(span.closest(".answer"));
  if (!answer) { $("tip").hidden = true; return; }
  const n = +span.dataset.n;
  const step = answer.tokens[n].step;
  marked = answer.spans.filter((s) => answer.tokens[+s.dataset.n].step === step);
  marked.forEach((s) => s.classList.add("same"));
  const tip = $("tip");
  tip.textContent = answer.tell(n);
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const top = box.top - size.height - 6;
  tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - size.width - 6))}px`;
  tip.style.top = `${top > 4 ? top : box.bottom + 6}px`;
}
$("log").addEventListener("pointerover", (e) => {
  const span = e.target.closest?.(".k");
  if (document.body.classList.contains("colours")) mark(span);
});
$("log").addEventListener("pointerleave", () => mark(null));
$("log").addEventListener("scroll", () => { $("tip").hidden = true; });
$("log").addEventListener("keydown", (e) => {
  const text = e.target.closest?.(".text");
  if (!text || !["ArrowLeft", "ArrowRight"].includes(e.key)) return;
  const spans = [...text.querySelectorAll(".k")];
  const here = spans.findIndex((s) => s.classList.contains("here"));
  const next = spans[Math.max(0, Math.min(spans.length - 1, here + (e.key === "ArrowRight" ? 1 : -1)))];
  if (!next) return;
  e.preventDefault();
  mark(next);
  next.classList.add("here");
  if (!marked.includes(next)) marked.push(next);
});
$("log").addEventListener("focusout", () => mark(null));

// ---- looks and keys ------------------------------------------------------------------
function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  readPalette();
  charts.redraw();
  chat.answers.forEach((a) => a.draw());
}
function otherTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem("firesteel-theme", dark ? "light" : "dark");
  theme(dark ? "light" : "dark");
}
$("theme").addEventListener("click", otherTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(""));

function view(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.show === name));
  }
  charts.redraw();
}
for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => view(button.dataset.show));
$("help-button").addEventListener("click", () => $("help").showModal());

const KEYS = {
  "/": () => $("prompt").focus(), t: toggleColours, s: () => toggleSettings(), n: fresh, d: otherTheme,
  e: () => view(document.body.dataset.view === "chat" ? "board" : "chat"), "?": () => $("help").showModal(),
};
document.addEventListener("keydown", (e) => {
  if (e.key === "Escape" && chat.busy && !document.querySelector("dialog[open]")) { chat.stop(); return; }
  const typing = e.target.matches?.("input:not([type=checkbox], [type=range]), textarea, select");
  if (typing || e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]") || !KEYS[e.key]) return;
  e.preventDefault();
  KEYS[e.key]();
});

document.body.classList.add("colours");
theme(localStorage.getItem("firesteel-theme") ?? "");
chosen();
poll();
setInterval(poll, 1000);
document.addEventListener("visibilitychange", poll);
$("prompt").focus({ preventScroll: true });
