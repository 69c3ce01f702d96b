// Small charts on canvas. A chart is a figure with a caption, a picture, a key and a sentence for when it is empty.

const WINDOW = [30, 120]; // seconds shown: at least, at most
const PAD = { left: 40, right: 8, top: 8, bottom: 18 };
const COLOURS = ["ink", "soft", "line", "fire", "fire-wash", "steel", "steel-wash", "card", "good", "bad"];
let palette = {};

/** Resolve the colours of the page's theme; call it when the theme changes. */
export function readPalette() {
  const probe = document.createElement("span");
  document.body.append(probe);
  for (const name of COLOURS) {
    probe.style.color = `var(--${name})`;
    palette[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

/** A number as short as it can be read. */
export function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(digits)} M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(digits)} k`;
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(digits));
}

const ratio = (a, b) => (b > 0 ? a / b : null);

/** The axis' end: the first round number that covers the data; a whole one has a whole half. */
function nice(top, whole = false) {
  if (!(top > 0)) return whole ? 2 : 1;
  const unit = 10 ** Math.floor(Math.log10(top));
  const steps = whole ? [2, 4, 10, 20] : [1, 2, 2.5, 5, 10];
  return unit * steps.find((step) => step * unit >= top * 0.999);
}

class Frame {
  constructor(canvas, xs, top) {
    const { width, height } = canvas.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    this.g = canvas.getContext("2d");
    this.g.setTransform(scale, 0, 0, scale, 0, 0);
    this.g.clearRect(0, 0, width, height);
    this.g.font = "10.5px system-ui, sans-serif";
    Object.assign(this, { width, height, xs, top });
  }
  x(v) { return PAD.left + ((v - this.xs[0]) / (this.xs[1] - this.xs[0] || 1)) * (this.width - PAD.left - PAD.right); }
  y(v) { return this.height - PAD.bottom - (v / this.top) * (this.height - PAD.top - PAD.bottom); }
  at(px) { return this.xs[0] + ((px - PAD.left) / (this.width - PAD.left - PAD.right)) * (this.xs[1] - this.xs[0]); }
  grid(format = short) {
    const g = this.g;
    g.textAlign = "right";
    g.textBaseline = "middle";
    for (const v of [0, this.top / 2, this.top]) {
      g.strokeStyle = palette.line;
      g.lineWidth = 1;
      g.beginPath();
      g.moveTo(PAD.left, Math.round(this.y(v)) + 0.5);
      g.lineTo(this.width - PAD.right, Math.round(this.y(v)) + 0.5);
      g.stroke();
      g.fillStyle = palette.soft;
      g.fillText(format(v), PAD.left - 6, this.y(v));
    }
  }
  label(text, px, align = "center") {
    this.g.fillStyle = palette.soft;
    this.g.textAlign = align;
    this.g.textBaseline = "alphabetic";
    this.g.fillText(text, px, this.height - 4);
  }
  /** Runs of points that have a value. */
  runs(xs, ys) {
    const out = [];
    let run = [];
    ys.forEach((y, i) => {
      if (y === null || y === undefined) { if (run.length) out.push(run); run = []; }
      else run.push([this.x(xs[i]), this.y(Math.min(y, this.top))]);
    });
    if (run.length) out.push(run);
    return out;
  }
  line(xs, ys, colour, { fill = null, base = null, width = 1.75, dash = [] } = {}) {
    const g = this.g;
    for (const run of this.runs(xs, ys)) {
      if (run.length === 1) run.push([run[0][0] + 1.5, run[0][1]]);
      if (fill) {
        g.fillStyle = fill;
        g.beginPath();
        run.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
        g.lineTo(run.at(-1)[0], this.y(base ?? 0));
        g.lineTo(run[0][0], this.y(base ?? 0));
        g.fill();
      }
      g.strokeStyle = colour;
      g.lineWidth = width;
      g.lineJoin = "round";
      g.setLineDash(dash);
      g.beginPath();
      run.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
      g.stroke();
      g.setLineDash([]);
    }
  }
  dot(x, y, radius, colour) {
    this.g.fillStyle = colour;
    this.g.beginPath();
    this.g.arc(this.x(x), this.y(y), radius, 0, 7);
    this.g.fill();
  }
}

class Chart {
  /** spec: title, key [[class, text]], empty(data) -> reason or "", now(data) -> text, draw(canvas, data, hover) */
  constructor(parent, spec) {
    this.spec = spec;
    this.hover = null;
    this.figure = document.createElement("figure");
    this.figure.className = "chart";
    this.figure.dataset.chart = spec.name;
    const caption = document.createElement("figcaption");
    const title = document.createElement("b");
    title.textContent = spec.title;
    this.value = document.createElement("span");
    caption.append(title, this.value);
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.why = document.createElement("p");
    this.why.className = "why";
    const keys = document.createElement("div");
    keys.className = "keys";
    for (const [colour, text] of spec.key) {
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = colour;
      item.append(swatch, text);
      keys.append(item);
    }
    this.figure.append(caption, this.canvas, this.why, keys);
    parent.append(this.figure);
    this.canvas.addEventListener("pointermove", (e) => { this.hover = e.offsetX; this.draw(); });
    this.canvas.addEventListener("pointerleave", () => { this.hover = null; this.draw(); });
  }
  show(data) { this.data = data; this.draw(); }
  draw() {
    const { data, spec } = this;
    if (!data || !this.canvas.clientWidth) return;
    const reason = spec.empty(data);
    this.figure.classList.toggle("empty", Boolean(reason));
    this.why.textContent = reason;
    this.value.textContent = reason ? "" : spec.now(data);
    this.canvas.setAttribute("aria-label", reason || `${spec.title}: ${spec.now(data)}`);
    if (reason) return;
    const said = spec.draw(this.canvas, data, this.hover);
    if (this.hover !== null && said) this.value.textContent = said;
  }
}

/** A chart over time; series(points) -> [{ys, colour, fill, dash, stack}], each with one value per second. */
function overTime(spec) {
  return {
    ...spec,
    draw(canvas, data, hover) {
      const t = data.points.t;
      const end = t.at(-1);
      const series = spec.series(data);
      const most = Math.max(spec.least ?? 1, ...series.flatMap((s) => s.ys.filter((v) => v !== null)));
      const top = nice(most * (spec.whole ? 1 : 1.05), spec.whole);
      const span = Math.max(WINDOW[0], Math.min(WINDOW[1], t.length - 1));
      const f = new Frame(canvas, [end - span, end], top);
      f.grid();
      f.label(span >= 120 ? `${Math.round(span / 60)} minutes ago` : `${span} s ago`, PAD.left, "left");
      f.label("now", f.width - PAD.right, "right");
      f.g.save();
      f.g.beginPath();
      f.g.rect(PAD.left, 0, f.width - PAD.left - PAD.right + 2, f.height);
      f.g.clip();
      for (const s of series) f.line(t, s.ys, palette[s.colour], { fill: s.fill ? palette[s.fill] : null, dash: s.dash ?? [] });
      let said = "";
      if (hover !== null) {
        const second = Math.round(f.at(hover));
        const i = t.indexOf(second);
        if (i >= 0) {
          f.g.strokeStyle = palette.soft;
          f.g.lineWidth = 1;
          f.g.beginPath();
          f.g.moveTo(f.x(second), PAD.top);
          f.g.lineTo(f.x(second), f.height - PAD.bottom);
          f.g.stroke();
          said = `${spec.at(data, i)}, ${end - second} s ago`;
        }
      }
      f.g.restore();
      return said;
    },
  };
}

const last = (list) => list.at(-1);
const lately = (data, name, seconds = 5) => data.points[name].slice(-seconds).reduce((a, b) => a + b, 0);
const per = (data, a, b, offset = 0) => data.points[a].map((v, i) => (data.points[b][i] ? offset + v / data.points[b][i] : null));
const ever = (data, name) => data.points[name].some((v) => v > 0);
const waits = (data) => (data.points.t.length ? "" : "waiting for the first second");
const noDrafts = (data) => {
  if (ever(data, "drafts")) return "";
  return data.speculation.reason ? `no drafts are verified: ${data.speculation.reason}` : "no step has verified drafts yet";
};

const SPECS = [
  overTime({
    name: "throughput", title: "Throughput", key: [["steel", "tokens per second"], ["soft", "prompt tokens per second"]],
    empty: waits,
    now: (d) => `${short(lately(d, "tokens") / 5)} tokens/s`,
    at: (d, i) => `${short(d.points.tokens[i])} tokens/s`,
    least: 10,
    series: (d) => [
      { ys: d.points.prompt_tokens, colour: "soft", dash: [3, 3] },
      { ys: d.points.tokens, colour: "steel", fill: "steel-wash" },
    ],
  }),
  overTime({
    name: "length", title: "Accepted length", key: [["fire", "tokens per request and step"], ["soft", "no drafts"]],
    empty: (d) => waits(d) || noDrafts(d),
    now: (d) => `${(1 + (ratio(lately(d, "accepted", 30), lately(d, "groups", 30)) ?? 0)).toFixed(2)} of at most ${d.speculation.gamma + 1}`,
    at: (d, i) => `${short(per(d, "accepted", "groups", 1)[i])} tokens`,
    least: 2,
    series: (d) => [
      { ys: per(d, "accepted", "groups", 1), colour: "fire", fill: "fire-wash" },
      { ys: d.points.t.map(() => 1), colour: "soft", dash: [3, 3] },
    ],
  }),
  overTime({
    name: "budget", title: "Budget", key: [["fire-wash", "drafts verified per step"], ["fire", "of them accepted"]],
    empty: (d) => waits(d) || noDrafts(d),
    now: (d) => {
      const came = ratio(lately(d, "emitted", 30), lately(d, "expected", 30));
      return `${short(ratio(lately(d, "verified", 30), lately(d, "decoding_steps", 30)), 2)} a step` +
        (d.speculation.adaptive && came ? `, tokens ${short(came, 2)}× expected` : "");
    },
    at: (d, i) => `${short(per(d, "verified", "decoding_steps")[i])} verified, ${short(per(d, "accepted", "decoding_steps")[i])} accepted`,
    series: (d) => [
      { ys: per(d, "verified", "decoding_steps"), colour: "fire", fill: "fire-wash", dash: [2, 2] },
      { ys: per(d, "accepted", "decoding_steps"), colour: "fire", fill: "fire" },
    ],
  }),
  {
    name: "depth", title: "Accepted by place", key: [["fire", "share of the drafts verified there"]],
    empty: (d) => (d.depth.verified_at.some((n) => n > 0) ? "" : noDrafts(d) || "no draft has been verified yet"),
    now: (d) => `${short(d.depth.verified_at.reduce((a, b) => a + b, 0))} drafts`,
    draw(canvas, d, hover) {
      const n = d.depth.verified_at.length;
      const f = new Frame(canvas, [0, n], 1);
      f.grid((v) => `${Math.round(v * 100)} %`);
      const step = f.x(1) - f.x(0);
      let said = "";
      d.depth.verified_at.forEach((verified, i) => {
        const share = ratio(d.depth.accepted_at[i] ?? 0, verified) ?? 0;
        const over = hover !== null && Math.floor(f.at(hover)) === i;
        f.g.fillStyle = palette.fire;
        f.g.globalAlpha = over ? 1 : 0.85;
        f.g.beginPath();
        f.g.roundRect(f.x(i) + step * 0.18, f.y(share), step * 0.64, f.y(0) - f.y(share), [3, 3, 0, 0]);
        f.g.fill();
        f.g.globalAlpha = 1;
        f.label(String(i + 1), f.x(i) + step / 2);
        if (over) said = `draft ${i + 1}: ${Math.round(share * 100)} % of ${short(verified)}`;
      });
      return said;
    },
  },
  {
    name: "reliability", title: "Reliability", key: [["fire", "share accepted, by predicted survival"], ["soft", "perfect"]],
    empty(d) {
      if (!d.speculation.gamma) return `survival is not predicted: ${d.speculation.reason}`;
      if (d.reliability.length) return "";
      return d.speculation.adaptive ? "no prediction has been checked yet"
        : "widths are fixed, so survival is not predicted: set enable_adaptive_verification";
    },
    now(d) {
      const all = d.quality.reduce((a, q) => a + q.samples, 0);
      return `error ${short(d.quality.reduce((a, q) => a + q.ece * q.samples, 0) / all, 2)} (ECE)`;
    },
    draw(canvas, d, hover) {
      const f = new Frame(canvas, [0, 1], 1);
      f.grid((v) => `${Math.round(v * 100)} %`);
      f.line([0, 1], [0, 1], palette.soft, { dash: [3, 3], width: 1 });
      const most = Math.max(...d.reliability.map(([, , n]) => n));
      let said = "";
      f.line(d.reliability.map(([p]) => p), d.reliability.map(([, a]) => a), palette.fire, { width: 1 });
      for (const [p, a, n] of d.reliability) {
        f.dot(p, a, 2 + 4 * Math.sqrt(n / most), palette.fire);
        if (hover !== null && Math.abs(f.x(p) - hover) < 12) said = `predicted ${Math.round(p * 100)} %, came ${Math.round(a * 100)} % of ${short(n)}`;
      }
      f.label("0 %", PAD.left, "left");
      f.label("predicted survival 100 %", f.width - PAD.right, "right");
      return said;
    },
  },
  {
    name: "cost", title: "Cost of a step", key: [["steel", "milliseconds measured"], ["fire", "predicted"]],
    empty: (d) => (d.cost.steps.length ? "" : "no step has been measured yet"),
    now(d) {
      const off = ratio(d.points.predicted_measured_ms.slice(-30).reduce((a, b) => a + b, 0), lately(d, "predicted_ms", 30));
      if (off) return `${off.toFixed(2)}× the prediction`;
      return d.cost.steps.some((s) => s[3] !== null) ? "" : "not predicted";
    },
    draw(canvas, d, hover) {
      const xs = d.cost.steps.map(([rows]) => rows);
      const right = Math.max(8, ...xs);
      const curve = d.cost.curve.filter(([rows]) => rows <= right);
      const top = nice(Math.max(...d.cost.steps.map((s) => Math.max(s[2], s[3] ?? 0)), ...curve.map(([, ms]) => ms)));
      const f = new Frame(canvas, [0, right], top);
      f.grid();
      f.line(curve.map(([rows]) => rows), curve.map(([, ms]) => ms), palette.fire, { width: 1, dash: [3, 3] });
      const told = d.cost.steps.filter((s) => s[3] !== null);
      f.line(told.map((s) => s[0]), told.map((s) => s[3]), palette.fire);
      let said = "";
      for (const [rows, steps, measured, predicted] of d.cost.steps) {
        f.dot(rows, measured, 1.8 + Math.min(2.2, Math.log10(1 + steps) * 0.8), palette.steel);
        if (hover !== null && Math.abs(f.x(rows) - hover) < 5) {
          said = `${rows} rows: ${short(measured)} ms` + (predicted === null ? "" : `, predicted ${short(predicted)}`);
        }
      }
      f.label("0", PAD.left, "left");
      f.label(`rows of the step ${right}`, f.width - PAD.right, "right");
      return said;
    },
  },
  overTime({
    name: "queue", title: "Queue", key: [["steel", "running"], ["fire", "waiting for a slot"]],
    empty: waits,
    now: (d) => `${d.now.running} of ${d.engine?.slots ?? 0} slots, ${d.now.waiting} wait`,
    at: (d, i) => `${d.points.running[i]} run, ${d.points.waiting[i]} wait`,
    least: 2, whole: true,
    series: (d) => [
      { ys: d.points.running, colour: "steel", fill: "steel-wash" },
      { ys: d.points.waiting, colour: "fire" },
    ],
  }),
  overTime({
    name: "memory", title: "Memory", key: [["steel", "pages of running requests"], ["steel-wash", "and of the prefix cache"]],
    empty: (d) => waits(d) || (d.engine ? "" : "the engine is not ready"),
    now: (d) => `${short(d.now.pages_held)} held, ${short(d.now.pages_cached)} cached of ${short(d.engine.pages)} pages`,
    at: (d, i) => `${d.points.pages_held[i]} held, ${d.points.pages_cached[i]} cached`,
    least: 4, whole: true,
    series: (d) => [
      { ys: d.points.pages_held.map((v, i) => v + d.points.pages_cached[i]), colour: "steel", fill: "steel-wash", dash: [2, 2] },
      { ys: d.points.pages_held, colour: "steel", fill: "steel" },
    ],
  }),
];

/** All charts inside ``parent``; the result's show(data) draws a snapshot. */
export function makeCharts(parent) {
  readPalette();
  const charts = SPECS.map((spec) => new Chart(parent, spec));
  const redraw = () => charts.forEach((c) => c.draw());
  new ResizeObserver(redraw).observe(parent);
  return { show: (data) => charts.forEach((c) => c.show(data)), redraw };
}

/** One column per step of an answer: accepted drafts, the sampled token, and drafts that were refused. */
export function drawStrip(canvas, steps) {
  const width = canvas.clientWidth;
  if (!width || !steps.length) return;
  const scale = window.devicePixelRatio || 1;
  const height = 30;
  canvas.width = Math.round(width * scale);
  canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  const most = Math.max(2, ...steps.map((s) => 1 + s.verified));
  const column = Math.min(9, width / steps.length);
  const gap = column > 3 ? 1 : 0;
  const unit = height / most;
  steps.forEach((s, i) => {
    let y = height;
    const stack = (count, colour, alpha = 1) => {
      if (!count) return;
      y -= count * unit;
      g.globalAlpha = alpha;
      g.fillStyle = palette[colour];
      g.fillRect(i * column, y + 0.5, column - gap, count * unit - 0.5);
      g.globalAlpha = 1;
    };
    stack(s.drafted, "fire");
    stack(s.sampled, "steel");
    stack(Math.max(s.verified - s.drafted, 0), "soft", 0.22);
  });
}

export { last };
