// The page: reads the stream of messages and shows it. The token stands behind the # of the address and goes into a header.
import { Chart, Painter, along } from "./charts.js";
import { Drawer } from "./drawer.js";
import { showFigures } from "./figures.js";
import { Heat } from "./heat.js";
import { clock, duration, element, fillTable, scaled, setText } from "./words.js";

const $ = (id) => document.getElementById(id);
const token = decodeURIComponent(location.hash.slice(1));
const SLOW = 5000; // milliseconds between two looks at nodes: they are sampled every 5 s
const SHOWS = [["use", "GPU use"], ["memory", "memory"], ["power", "power"], ["temperature", "temperature"], ["clock", "clock"], ["step", "step time"]];
const MARK_DOTS = { failed: "bad", lost: "bad", restart: "warn", stop: "warn", attempt: "warn", finding: "warn", "first step": "good", checkpoint: "plain" };

let latest = null, shown = 0, show = null, shownMarks = "", shownChecks = "", heard = 0;
const charts = {};

async function get(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  return answer.ok ? answer.json() : null;
}

function notice(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

function makeCharts() {
  const place = $("charts");
  const plain = (name, title, more) => { charts[name] = new Chart(place, { title, names: [[name, title, "--accent"]], ...more }); };
  charts.loss = new Chart(place, { title: "Loss", unit: "loss", zero: false, names: [["loss", "training", "--accent"], ["validation", "validation", "--warn"]] });
  charts.loss.box.classList.add("wide");
  plain("rate", "Throughput", { unit: () => latest ? latest.rate_unit : "", format: ".4~s" });
  plain("step_seconds", "Time per step", { unit: "s", format: ".3~s" });
  plain("gpu_use", "GPU use", { unit: "%", band: true, range: [0, 104] });
  plain("power", "GPU power per node", { unit: "W", band: true, format: ".3~s" });
  plain("memory", "GPU memory", { unit: "%", band: true, range: [0, 104] });
  plain("network", "Network per node, in and out", { unit: "B/s", band: true, format: ".3~s" });
}

// Few nodes have a line each; of many, the mean with its range is shown, and the nodes that stand out from it.
function nameNodes(curves, nodes) {
  for (const name of ["gpu_use", "power", "memory", "network"]) {
    const own = Object.keys(curves).filter((key) => key.startsWith(`${name}:`)).sort((a, b) => a.split(":")[1] - b.split(":")[1]);
    const lines = own.map((key) => [key, `node ${key.split(":")[1]}`, ""]);
    charts[name].names = own.length > 1 && own.length >= nodes ? lines : [[name, nodes > 1 ? "mean and range of all nodes" : "", "--accent"], ...(nodes > 1 ? lines : [])];
  }
}

function take(message) {
  const began = performance.now();
  latest = message.head;
  nameNodes(message.curves, latest.nodes_here || latest.nodes);
  const kept = message.curves.steps;
  along.steps = (kept.since === null ? [] : along.steps.filter((point) => point[0] < kept.since)).concat(kept.p);
  along.counts = latest.step_is || "step";
  setText($("along").lastElementChild, `by ${along.counts}`);
  $("along").hidden = along.steps.length < 2;
  for (const chart of Object.values(charts)) {
    for (const [name] of chart.names) if (message.curves[name]) chart.take(name, message.curves[name]);
    chart.setMarks(message.marks);
  }
  const head = latest;
  if (head.step_is) { // what the script counts: epochs
    setText(charts.step_seconds.box.querySelector("h2"), `Time per ${head.step_is}`);
    setText($("shows").querySelector("[data-show=step]"), `${head.step_is} time`);
  }
  setText(charts.loss.now, head.loss_not_finite ? head.loss_not_finite : head.loss === null ? "" : String(Number(head.loss.toPrecision(4))));
  setText(charts.rate.now, head.rate === null ? "" : scaled(head.rate, ` ${head.rate_unit}`).join(" "));
  showHead(head);
  showFigures($("figures"), head);
  layOut();
  showChecks(head);
  showEvents(message.marks);
  setText($("heattitle"), head.gpus ? "Every GPU and rank" : "Every rank");
  if (show === null && (head.gpus || head.step !== null)) choose(head.gpus ? "use" : "step");
  for (const button of $("shows").children) button.hidden = !head.gpus && button.dataset.show !== "step";
  if (head.state === "running" && !calm.matches) beat.animate({ opacity: [0.25, 1], transform: ["scale(1.5)", "scale(1)"] }, 500);
  heard = began;
  showAge();
  painter.wake(began);
}

function showHead(head) {
  setText($("run"), head.run_id);
  const title = head.step === null ? `${head.run_id} · ${head.word}` : `${head.step}${head.steps ? "/" + head.steps : ""} · ${head.run_id}`;
  if (document.title !== title) document.title = title;
  setText($("state"), head.word);
  $("state").className = `chip ${head.severity}`;
  document.body.dataset.state = head.severity;
  document.body.classList.toggle("live", head.state === "running");
  const share = head.steps && head.step !== null ? Math.min(100, (100 * head.step) / head.steps) : 0;
  $("bar").firstElementChild.style.transform = `scaleX(${share / 100})`;
  $("bar").setAttribute("aria-valuenow", Math.round(share));
  const failure = head.failure || (head.word === "hanging" && head.findings.findLast((finding) => finding.title === head.detail)) || null;
  setText($("detail"), failure && failure.title === head.detail ? "" : head.detail); // the box below says it
  $("failure").hidden = !failure;
  if (failure) {
    const where = failure.rank !== null && !failure.title.startsWith(`rank ${failure.rank}`) ? `Rank ${failure.rank}${failure.host ? ` on ${failure.host}` : ""}: ` : "";
    $("failure").querySelector("h2").textContent = where + failure.title;
    $("failure").querySelector(".cause").textContent = failure.cause;
    $("failure").querySelector(".fix").textContent = failure.fix;
    $("failure").querySelector(".fix").hidden = !failure.fix;
  }
}

function item(dot, text, when) {
  const line = element("li");
  line.append(element("span", `dot ${dot}`), element("span", "what", text));
  if (when) line.append(element("span", "grow"), element("span", "when", when));
  return line;
}

function showChecks(head) {
  const key = JSON.stringify([head.checks, head.findings]);
  if (key === shownChecks) return;
  shownChecks = key;
  const dots = { mismatch: "bad", unknown: "", "as planned": "good", "separate copies": "warn", "no exchange": "warn" };
  const lines = head.checks.map((check) => {
    const where = check.judged > 1 ? `${check.nodes} of ${check.judged} nodes` : "";
    const dot = check.answer in dots ? dots[check.answer] : "plain";
    return item(dot, `${check.check}: ${check.words}`, where);
  });
  for (const finding of head.findings.slice(-8).reverse()) {
    lines.push(item({ error: "bad", warning: "warn" }[finding.severity] || "plain", finding.fix ? `${finding.title}. Fix: ${finding.fix}` : finding.title, ""));
  }
  if (!lines.length) lines.push(item("", head.state === "running" ? "nothing was judged yet" : "nothing was judged", ""));
  $("checks").replaceChildren(...lines);
}

function showEvents(marks) {
  const key = JSON.stringify(marks);
  if (key === shownMarks) return;
  shownMarks = key;
  const lines = marks.slice(-40).reverse().map(([t, kind, text]) => item(kind === "end" && !text.startsWith("finished") ? "bad" : MARK_DOTS[kind] || "", text, clock(t)));
  $("events").replaceChildren(...(lines.length ? lines : [item("", "nothing yet", "")]));
}

const beat = document.querySelector(".beat"), calm = matchMedia("(prefers-reduced-motion: reduce)");
const drawer = new Drawer($("drawer"), get);
const heat = new Heat($("heat"), $("scale"), (node) => drawer.open(node));

// Time or step along the charts.
function chooseAlong(what) {
  along.what = what;
  localStorage.setItem("along", what);
  for (const button of $("along").children) button.setAttribute("aria-pressed", button.dataset.along === what);
  for (const chart of Object.values(charts)) chart.redraw();
}
for (const button of $("along").children) button.addEventListener("click", () => chooseAlong(button.dataset.along));

// As many in a row as fit, but alike in all rows: a row that is not full is stretched, so that there are no holes.
function fillRows(box, least) {
  const own = [...box.children].filter((child) => !child.hidden), width = box.clientWidth;
  const fit = Math.max(1, Math.floor((width + 12) / (least + 12)));
  const size = (child) => (fit > 1 && child.classList.contains("wide") ? 2 : 1);
  const units = own.reduce((sum, child) => sum + size(child), 0), columns = Math.min(units, Math.ceil(units / Math.ceil(units / fit)));
  const each = (width + 12) / Math.max(1, columns) - 12;
  for (const child of own) {
    const basis = `${Math.floor(size(child) * (each + 12) - 12)}px`;
    if (child.style.flexBasis !== basis) child.style.flexBasis = basis;
  }
}
const layOut = () => { const phone = innerWidth <= 720; fillRows($("figures"), phone ? 150 : 190); fillRows($("charts"), 320); };
new ResizeObserver(layOut).observe($("figures"));
new MutationObserver(layOut).observe($("charts"), { subtree: true, attributeFilter: ["hidden"] });

async function choose(name) {
  show = name;
  for (const button of $("shows").children) button.setAttribute("aria-selected", button.dataset.show === name);
  await refreshHeat();
}

async function refreshHeat() {
  const data = show === null ? null : await get(`/api/heat?show=${show}`);
  $("heatcard").hidden = !data || !data.columns;
  if (data && data.show === show) heat.show(data);
}

async function refreshNodes() {
  const data = await get(`/api/nodes?filter=${encodeURIComponent($("filter").value)}`);
  if (!data) return;
  fillTable($("nodes"), data.columns, data.rows, (row) => drawer.open(Number(row[0])));
  const more = data.matching > data.rows.length ? `, the first ${data.rows.length} shown` : "";
  $("count").textContent = data.matching === data.nodes ? `${data.nodes}${more}` : `${data.matching} of ${data.nodes}${more}`;
}

async function listen() {
  const answer = await fetch("/api/stream", { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  notice("");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      take(JSON.parse(part.slice(6)));
      shown += 1;
    }
  }
}

async function stayConnected() {
  for (;;) {
    try {
      await listen();
    } catch (error) {
      const refused = error.message.includes("token") || error.message.includes("refused");
      notice(refused ? error.message : "The connection to drumbeat watch is gone; trying again. Is it still running, and the tunnel open?");
      document.body.classList.remove("live");
      if (refused) return;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  painter.restyle();
  heat.draw();
}

for (const [name, label] of SHOWS) {
  const button = element("button", "", label);
  button.dataset.show = name;
  button.setAttribute("role", "tab");
  button.addEventListener("click", () => choose(name));
  $("shows").append(button);
}
makeCharts();
const painter = new Painter(Object.values(charts));
chooseAlong(localStorage.getItem("along") === "step" ? "step" : "time");
const dark = matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem("theme") || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!localStorage.getItem("theme")) setTheme(dark.matches ? "dark" : "light"); });
$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", next);
  setTheme(next);
});
$("filter").addEventListener("input", refreshNodes);
setInterval(() => { if (latest && document.visibilityState === "visible") { refreshHeat(); refreshNodes(); drawer.refresh(); } }, SLOW);
function showAge() {
  const known = latest && latest.updated !== null && latest.state === "running";
  setText($("age"), known ? `data ${duration(Math.max(0, Math.round(Date.now() / 1000 - latest.updated)))} old` : "");
}
setInterval(() => { if (performance.now() - heard > 3000) showAge(); }, 1000);
window.drumbeat = { charts, heat, painter, get shown() { return shown; } }; // for tests and bench
stayConnected();
setTimeout(refreshNodes, 700);
