// Curves, drawn by Plotly. Only numbers are handed to it: no text of the run.
import { element } from "./words.js";

const NODE_COLOURS = ["#2f6df6", "#e8833a", "#1f9e77", "#c04bc9", "#d2344b", "#0f9fb5", "#8a6d1f", "#6a5acd"];
const MARK_COLOURS = { failed: "--bad", lost: "--bad", restart: "--warn", stop: "--warn", attempt: "--warn", finding: "--warn",
  "first step": "--good", end: "--quiet", checkpoint: "--accent", validation: "--quiet" };
const QUIET_MARKS = new Set(["validation", "checkpoint"]);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Plotly shows times without a zone: give it local ones.
const at = (t) => t * 1000 - new Date(t * 1000).getTimezoneOffset() * 60000;

export class Chart {
  constructor(place, { title, unit = "", names, band = false, log = false, format = ".4~g", range = null, compact = false }) {
    Object.assign(this, { names, band, log, unit, format, range, compact });
    this.box = element("div", "chart");
    const row = element("div", "row");
    row.append(element("h2", "", title));
    this.now = element("span", "now quiet");
    row.append(this.now);
    this.plot = element("div", "plot");
    this.box.append(row, this.plot);
    place.append(this.box);
    this.data = {};
    this.marks = [];
    this.dirty = false;
    this.seen = true;
    new ResizeObserver(() => { this.dirty = true; }).observe(this.plot);
    if (!compact) new IntersectionObserver(([entry]) => { this.seen = entry.isIntersecting; }, { rootMargin: "200px" }).observe(this.box);
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
    const few = this.names.filter(([name]) => (this.data[name] || []).length).length;
    this.names.forEach(([name, label, colour], index) => {
      const points = this.data[name] || [];
      if (!points.length) return;
      const x = points.map((point) => at(point[0]));
      const shade = colour ? css(colour) : NODE_COLOURS[index % NODE_COLOURS.length];
      if (this.band && few === 1) {
        traces.push({ x, y: points.map((point) => point[2]), mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false });
        traces.push({ x, y: points.map((point) => point[3]), mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: shade + "30", hoverinfo: "skip", showlegend: false });
      }
      traces.push({ x, y: points.map((point) => point[1]), name: label, mode: points.length < 3 ? "lines+markers" : "lines", line: { width: 2, color: shade },
        hovertemplate: `%{y:${this.format}}${this.unit ? " " + this.unit : ""}` });
    });
    return traces;
  }

  draw() {
    this.dirty = false;
    this.box.hidden = this.empty;
    if (this.empty) return;
    const traces = this.traces();
    const shapes = this.marks.map(([t, kind]) => ({ type: "line", xref: "x", yref: "paper", x0: at(t), x1: at(t), y0: 0, y1: QUIET_MARKS.has(kind) ? 0.06 : 1,
      line: { width: kind === "failed" || kind === "lost" ? 2 : 1, dash: kind === "failed" || kind === "lost" || QUIET_MARKS.has(kind) ? "solid" : "dot", color: css(MARK_COLOURS[kind] || "--quiet") } }));
    const axis = { gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), tickfont: { size: 11 }, fixedrange: false, automargin: true };
    const named = traces.filter((trace) => trace.name).length > 1;
    const spans = traces.map((trace) => trace.x[trace.x.length - 1] - trace.x[0]), span = Math.max(...spans);
    const ticks = span < 180e3 ? "%H:%M:%S" : span < 72e6 ? "%H:%M" : "%b %-d %H:%M";
    const layout = {
      width: this.plot.clientWidth, height: this.plot.clientHeight, margin: { l: 46, r: 10, t: named && !this.compact ? 22 : 6, b: 26 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", shapes,
      font: { color: css("--quiet"), family: "system-ui, sans-serif", size: 11 }, hovermode: "x unified", showlegend: named && !this.compact,
      legend: { orientation: "h", yanchor: "bottom", y: 1, xanchor: "right", x: 1, font: { size: 11 }, bgcolor: "transparent" }, uirevision: "keep", hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") } },
      xaxis: { ...axis, type: "date", tickformat: ticks, hoverformat: "%H:%M:%S", nticks: Math.max(2, Math.floor(this.plot.clientWidth / 90)), tickangle: 0, showgrid: false }, yaxis: { ...axis, nticks: 5, type: this.log ? "log" : "linear", exponentformat: "SI", rangemode: this.log ? "normal" : "tozero" },
    };
    if (this.range) layout.yaxis.range = this.range;
    Plotly.react(this.plot, traces, layout, { displayModeBar: false });
  }
}

// One chart per frame, in turns: the page stays smooth however many there are.
export class Painter {
  constructor(charts) {
    this.charts = charts;
    let turn = 0;
    const step = () => {
      const waiting = (_, index) => this.charts[(turn + index) % this.charts.length];
      const next = this.charts.map(waiting).find((chart) => chart.dirty && (chart.seen || chart.box.hidden));
      turn = next ? this.charts.indexOf(next) + 1 : turn;
      if (next && window.Plotly) next.draw();
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  restyle() { for (const chart of this.charts) chart.dirty = true; }
}
