// Curves, drawn by Plotly. Only numbers are handed to it: no text of the run.
import { element } from "./words.js";

const NODE_COLOURS = ["#2f6df6", "#e8833a", "#1f9e77", "#c04bc9", "#d2344b", "#0f9fb5", "#8a6d1f", "#6a5acd"];
const MARK_COLOURS = { failed: "--bad", lost: "--bad", restart: "--warn", stop: "--warn", attempt: "--warn", finding: "--warn",
  "first step": "--good", end: "--quiet", checkpoint: "--accent", validation: "--quiet" };
const QUIET_MARKS = new Set(["validation", "checkpoint"]);
const MOST_MARKS = 20; // a mark costs Plotly about half a millisecond per drawing
const PATIENCE = 10e3; // milliseconds; the longest time that a chart waits with new points
const BUDGET = 40; // milliseconds of drawing per message; a chart takes 10 to 20
const REST = 300; // milliseconds until the next charts have their turn

let colours = new Map();
function css(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
}
// Plotly shows times without a zone: give it local ones.
const at = (t) => t * 1000 - new Date(t * 1000).getTimezoneOffset() * 60000;

// Time or step along the x axis, the same for all charts. A step belongs to a time by the curve of steps.
export const along = { what: "time", steps: [], counts: "step" };
function stepAt(t) {
  const steps = along.steps;
  let low = 0, high = steps.length - 1;
  if (high < 0) return null;
  while (low < high) { const middle = (low + high) >> 1; if (steps[middle][0] < t) low = middle + 1; else high = middle; }
  if (low === 0 || steps[low][0] <= t) return steps[low][1];
  const [before, after] = [steps[low - 1], steps[low]];
  return before[1] + ((after[1] - before[1]) * (t - before[0])) / (after[0] - before[0] || 1);
}
const place = (t) => along.what === "step" ? stepAt(t) : at(t);

export class Chart {
  constructor(place, { title, unit = "", names, band = false, log = false, format = ".4~g", range = null, zero = true, compact = false }) {
    Object.assign(this, { names, band, log, unit, format, range, zero, compact });
    this.box = element("div", "chart");
    const row = element("div", "row");
    row.append(element("h2", "", title));
    this.now = element("span", "now quiet");
    const save = element("button", "save", "SVG");
    save.title = `save ${title} as SVG`;
    save.setAttribute("aria-label", save.title);
    save.addEventListener("click", () => this.save(title));
    row.append(this.now, save);
    this.plot = element("div", "plot");
    this.box.append(row, this.plot);
    place.append(this.box);
    this.data = {};
    this.marks = [];
    this.dirty = false;
    this.drawn = 0; // when, by performance.now(); 0: never
    this.seen = true;
    this.onChange = () => {};
    new ResizeObserver(() => this.redraw()).observe(this.plot);
    if (!compact) new IntersectionObserver(([entry]) => { this.seen = entry.isIntersecting; this.onChange(); }, { rootMargin: "200px" }).observe(this.box);
  }

  save(title) {
    if (this.plot.data) Plotly.downloadImage(this.plot, { format: "svg", filename: title.toLowerCase().replaceAll(/[^a-z]+/g, "-"), width: 640, height: 320 });
  }

  redraw() { this.dirty = true; this.drawn = 0; this.onChange(); }

  // Milliseconds until it is worth drawing again: the time between two of its points, or one pixel of its axis.
  wait(now) {
    if (!this.drawn) return 0;
    let gap = Infinity; // a long curve hardly changes with one more point
    for (const [name] of this.names) {
      const points = this.data[name] || [], last = points.length - 1;
      if (last < 2) continue;
      const pixel = (points[last][0] - points[0][0]) / (this.plot.clientWidth || 300);
      const step = points[last - 1][0] - points[last - 2][0]; // the last one is still filling
      gap = Math.min(gap, Math.max(pixel, last > 40 ? 2 * step : step));
    }
    return Math.max(0, this.drawn + (gap === Infinity ? 0 : Math.min(PATIENCE, 1000 * gap)) - now);
  }

  // `piece`: {since, p}: points from before `since` are kept.
  take(name, piece) {
    const kept = piece.since === null ? [] : (this.data[name] || []).filter((point) => point[0] < piece.since);
    const joined = kept.concat(piece.p);
    const before = this.data[name] || [];
    const last = (points) => JSON.stringify(points[points.length - 1]);
    if (joined.length !== before.length || last(joined) !== last(before)) this.dirty = true;
    this.data[name] = joined;
  }

  setMarks(marks) {
    if (marks.length !== this.marks.length) this.dirty = true;
    this.marks = marks;
  }

  get empty() { return this.names.every(([name]) => !(this.data[name] || []).length); }

  traces() {
    const traces = [];
    this.names.forEach(([name, label, colour], index) => {
      const points = this.data[name] || [];
      if (!points.length) return;
      const x = points.map((point) => place(point[0]));
      const shade = colour ? css(colour) : NODE_COLOURS[index % NODE_COLOURS.length];
      if (this.band && !name.includes(":")) { // of all nodes: their range around the mean
        traces.push({ x, y: points.map((point) => point[2]), mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false });
        traces.push({ x, y: points.map((point) => point[3]), mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: shade + "30", hoverinfo: "skip", showlegend: false });
      }
      traces.push({ x, y: points.map((point) => point[1]), name: label, mode: points.length < 3 ? "lines+markers" : "lines", line: { width: 2, color: shade },
        hovertemplate: `${this.names.length > 1 ? label + " " : ""}%{y:${this.format}}${typeof this.unit === "string" && this.unit ? " " + this.unit : ""}` });
    });
    return traces;
  }

  // The latest of what went wrong; of validations and checkpoints as many as can be told apart.
  shownMarks(span) {
    const loud = this.marks.filter(([, kind]) => !QUIET_MARKS.has(kind)).slice(-MOST_MARKS);
    let before = -Infinity;
    const quiet = this.marks.filter(([t, kind]) => {
      const apart = QUIET_MARKS.has(kind) && place(t) - before >= span / MOST_MARKS;
      if (apart) before = place(t);
      return apart;
    });
    return loud.concat(quiet.slice(-MOST_MARKS));
  }

  draw() {
    this.dirty = false;
    this.drawn = performance.now();
    this.box.hidden = this.empty;
    if (this.empty) return;
    const traces = this.traces();
    const first = Math.min(...traces.map((trace) => trace.x[0])), last = Math.max(...traces.map((trace) => trace.x[trace.x.length - 1])), span = last - first;
    const shapes = this.shownMarks(span).map(([t, kind]) => ({ type: "line", xref: "x", yref: "paper", x0: place(t), x1: place(t), y0: 0, y1: QUIET_MARKS.has(kind) ? 0.06 : 1,
      line: { width: kind === "failed" || kind === "lost" ? 2 : 1, dash: kind === "failed" || kind === "lost" || QUIET_MARKS.has(kind) ? "solid" : "dot", color: css(MARK_COLOURS[kind] || "--quiet") } }));
    const axis = { gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), tickfont: { size: 11 }, fixedrange: false };
    const named = traces.filter((trace) => trace.name).length > (this.band ? 0 : 1);
    const byStep = along.what === "step", y = typeof this.unit === "function" ? this.unit() : this.unit;
    // A time that spans no second has no label of its own, and one that is divided finer has the same label twice.
    const shown = byStep || span >= 2e3 ? span : span + 4e3, most = Math.max(2, Math.floor(this.plot.clientWidth / 90));
    const whole = byStep ? 1 : 1e3, apart = shown < 5 * whole * most ? whole * Math.max(1, Math.ceil(shown / whole / most)) : undefined;
    const ticks = byStep ? "~s" : span < 180e3 ? "%H:%M:%S" : span < 72e6 ? "%H:%M" : "%b %-d %H:%M";
    const layout = {
      width: this.plot.clientWidth, height: this.plot.clientHeight, margin: { l: 58, r: 10, t: named && !this.compact ? 22 : 6, b: 40 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", shapes,
      font: { color: css("--quiet"), family: "system-ui, sans-serif", size: 11 }, hovermode: "x unified", showlegend: named && !this.compact,
      legend: { orientation: "h", yanchor: "bottom", y: 1, xanchor: "right", x: 1, font: { size: 11 }, bgcolor: "transparent" }, uirevision: "keep", hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") } },
      xaxis: { ...axis, title: { text: byStep ? along.counts : "time of day", standoff: 4 }, type: byStep ? "linear" : "date", tickformat: ticks, dtick: apart, hoverformat: byStep ? ",.0f" : "%H:%M:%S", nticks: most, tickangle: 0, showgrid: false }, yaxis: { ...axis, title: { text: y, standoff: 6 }, nticks: 5, type: this.log ? "log" : "linear", exponentformat: "SI", rangemode: this.zero && !this.log ? "tozero" : "normal" },
    };
    if (this.range) layout.yaxis.range = this.range;
    if (shown > span) layout.xaxis.range = [first - 2e3, last + 2e3];
    Plotly.react(this.plot, traces, layout, { displayModeBar: false });
  }
}

// Draws what has changed, the oldest chart first, and no longer than about BUDGET at a time, so that numbers are never late.
export class Painter {
  constructor(charts) {
    Object.assign(this, { charts, asked: false, timer: 0, began: null, paints: [] });
    for (const chart of charts) chart.onChange = () => this.wake();
  }

  // A message has come, at `began` if given: what it changed is painted from the next frame on.
  wake(began = null) {
    this.began = began === null ? this.began : began;
    if (!this.asked) requestAnimationFrame(() => this.frame());
    this.asked = true;
  }

  frame() {
    this.asked = false;
    if (!window.Plotly) { setTimeout(() => this.wake(), REST); return; }
    const begin = performance.now(), changed = this.charts.filter((chart) => chart.dirty && (chart.seen || chart.box.hidden));
    for (const chart of changed.filter((chart) => chart.wait(begin) === 0).sort((a, b) => a.drawn - b.drawn)) {
      if (performance.now() - begin < BUDGET || !chart.drawn) chart.draw();
    }
    this.rest(performance.now(), changed.filter((chart) => chart.dirty));
  }

  rest(now, changed) {
    clearTimeout(this.timer);
    if (changed.length) this.timer = setTimeout(() => this.wake(), Math.max(REST, Math.min(...changed.map((chart) => chart.wait(now)))));
    if (this.began === null) return;
    const began = this.began, channel = new MessageChannel();
    this.began = null;
    channel.port1.onmessage = () => { this.paints = [...this.paints.slice(-99), performance.now() - began]; }; // comes after the frame is painted
    channel.port2.postMessage(0);
  }

  restyle() {
    colours = new Map();
    for (const chart of this.charts) chart.redraw();
  }
}
