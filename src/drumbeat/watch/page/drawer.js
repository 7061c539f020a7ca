// One node in full: its GPUs, ranks, curves, and the last lines of a rank.
import { Chart } from "./charts.js";
import { element, fillTable } from "./words.js";

const CURVES = [["gpu_use", "GPU use", "%"], ["power", "GPU power", "W"], ["memory", "GPU memory", "%"], ["network", "network", "B/s"]];

export class Drawer {
  constructor(box, get) {
    Object.assign(this, { box, get, node: null, rank: null, charts: {} });
    box.querySelector("#close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.close(); });
  }

  async open(node) {
    this.node = node;
    this.rank = null;
    this.before = document.activeElement;
    this.box.hidden = false;
    this.box.querySelector("#close").focus();
    await this.refresh();
  }

  close() {
    if (!this.box.hidden && this.before) this.before.focus();
    this.box.hidden = true;
    this.node = null;
  }

  async refresh() {
    if (this.node === null) return;
    const data = await this.get(`/api/node?node=${this.node}`);
    if (!data || data.node !== this.node) return;
    const titles = [`Node ${data.node}`, data.host, data.lost ? `lost: ${data.lost}` : ""];
    this.box.querySelector("h2").textContent = titles.filter(Boolean).join(" · ");
    fillTable(this.box.querySelector("#gpus"), data.gpu_columns, data.gpus);
    fillTable(this.box.querySelector("#ranks"), data.rank_columns, data.ranks, (row) => { this.rank = Number(row[0]); this.refreshLines(); });
    for (const [name, title, unit] of CURVES) {
      if (!this.charts[name]) this.charts[name] = new Chart(this.box.querySelector("#nodecharts"), { title, unit, names: [[name, title, "--accent"]], compact: true, format: ".3~s" });
      this.charts[name].take(name, { since: null, p: data.curves[name].p });
      this.charts[name].draw();
    }
    if (this.rank === null && data.ranks.length) this.rank = Number(data.ranks[0][0]);
    await this.refreshLines();
  }

  async refreshLines() {
    const place = this.box.querySelector("#lines");
    const wanted = this.rank === null ? "" : `&rank=${this.rank}`;
    const lines = await this.get(`/api/lines?node=${this.node}${wanted}`) || [];
    this.box.querySelector("#linesof").textContent = this.rank === null ? "Last lines" : `Last lines of rank ${this.rank}`;
    const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    place.replaceChildren(...lines.map((line) => element("div", line.stream === "err" ? "err" : "", line.text)));
    if (!lines.length) place.textContent = "it has printed nothing";
    if (atEnd) place.scrollTop = place.scrollHeight;
  }
}
