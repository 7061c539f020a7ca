// Every GPU or rank of every node as one cell. A column is a node; many nodes continue on the next line.
const STOPS = { light: ["#e9eef8", "#a9c7f5", "#5b93ee", "#2f5fd0", "#2a2f86"], dark: ["#1a2433", "#1d4a7a", "#1f7f9e", "#36b98f", "#c9ea6a"] };
const GAP = 2;

function mix(stops, share) {
  const place = Math.min(0.999, Math.max(0, share)) * (stops.length - 1);
  const index = Math.floor(place), rest = place - index;
  const parts = [stops[index], stops[index + 1]].map((hex) => [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16)));
  return `rgb(${parts[0].map((low, which) => Math.round(low + (parts[1][which] - low) * rest)).join(",")})`;
}

export class Heat {
  constructor(box, scale, onNode) {
    Object.assign(this, { box, scale, onNode, canvas: box.querySelector("canvas"), tip: box.querySelector("#tip"), data: null });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => { const hit = this.hit(event); if (hit) this.onNode(this.data.nodes[hit.node]); });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  show(data) { this.data = data; this.draw(); }

  shape() {
    const { nodes, columns } = this.data, width = this.box.clientWidth - 36;
    const wide = Math.max(7, Math.min(150, Math.floor(width / nodes.length)));
    const perLine = Math.max(1, Math.min(nodes.length, Math.floor(width / wide)));
    const many = nodes.length > perLine || wide < 16;
    const tall = many ? (columns > 8 ? 4 : 6) : 22;
    return { wide: many ? Math.floor(width / perLine) : wide, tall, perLine, gap: many ? 1 : GAP, lines: Math.ceil(nodes.length / perLine), left: 36, between: 14 };
  }

  draw() {
    const data = this.data;
    if (!data || !data.nodes.length || !data.columns) { this.canvas.style.height = "0"; return; }
    const dark = document.documentElement.dataset.theme === "dark", stops = dark ? STOPS.dark : STOPS.light;
    const css = getComputedStyle(document.documentElement), s = this.shape(), ratio = window.devicePixelRatio || 1;
    const height = s.lines * (data.columns * s.tall + s.between) + 4;
    const width = this.box.clientWidth;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio; this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    const span = data.high - data.low || 1, empty = css.getPropertyValue("--empty"), quiet = css.getPropertyValue("--quiet"), bad = css.getPropertyValue("--bad");
    const lost = new Set(data.lost);
    data.values.forEach((row, index) => {
      const x = s.left + (index % s.perLine) * s.wide, top = Math.floor(index / s.perLine) * (data.columns * s.tall + s.between) + s.between;
      for (let cell = 0; cell < data.columns; cell++) {
        const value = row[cell], y = top + cell * s.tall;
        const share = value === null || value === undefined ? null : (value - data.low) / span;
        pen.fillStyle = lost.has(data.nodes[index]) ? bad : share === null ? empty : mix(stops, share);
        if (s.tall > 12) { pen.beginPath(); pen.roundRect(x, y, s.wide - s.gap, s.tall - s.gap, 4); pen.fill(); }
        else pen.fillRect(x, y, s.wide - s.gap, s.tall - s.gap);
        if (s.wide >= 34 && s.tall > 12 && share !== null) {
          pen.fillStyle = (share > 0.45) !== dark ? "#ffffff" : dark && share > 0.75 ? "#10202a" : dark ? "#dfe8f2" : "#17202c";
          pen.textAlign = "center"; pen.fillText(value >= 100 ? Math.round(value) : value, x + s.wide / 2 - 1, y + s.tall / 2 - 1);
        }
      }
      if (index % s.perLine === 0 || (s.wide >= 34)) {
        pen.fillStyle = quiet; pen.textAlign = s.wide >= 34 ? "center" : "left";
        pen.fillText(`${data.nodes[index]}`, s.wide >= 34 ? x + s.wide / 2 - 1 : x, top - 7);
      }
      if (index % s.perLine === 0) {
        pen.fillStyle = quiet; pen.textAlign = "right"; pen.fillText(s.tall > 12 || data.columns > 3 ? "0" : "", s.left - 6, top + s.tall / 2 - 1);
        if (data.columns > 1) pen.fillText(`${data.columns - 1}`, s.left - 6, top + (data.columns - 0.5) * s.tall - 1);
      }
    });
    const bar = document.createElement("i");
    bar.style.background = `linear-gradient(90deg, ${stops.join(",")})`;
    const shown = (value) => `${Number(value.toPrecision(3))} ${data.unit}`;
    this.scale.replaceChildren(shown(data.low), bar, shown(data.high));
  }

  hit(event) {
    if (!this.data || !this.data.nodes.length) return null;
    const s = this.shape(), edge = this.canvas.getBoundingClientRect();
    const x = event.clientX - edge.left - s.left, y = event.clientY - edge.top, line = data_line(y, this.data.columns * s.tall + s.between);
    const column = Math.floor(x / s.wide), cell = Math.floor((y - line * (this.data.columns * s.tall + s.between) - s.between) / s.tall);
    const node = line * s.perLine + column;
    if (x < 0 || column >= s.perLine || node >= this.data.nodes.length || cell < 0 || cell >= this.data.columns) return null;
    return { node, cell, x: event.clientX - edge.left, y };
  }

  point(event) {
    const hit = this.hit(event);
    this.canvas.style.cursor = hit ? "pointer" : "default";
    this.tip.hidden = !hit;
    if (!hit) return;
    const { data } = this, value = data.values[hit.node][hit.cell];
    const what = data.show === "step" ? `rank ${data.ranks[hit.node] === null ? "?" : data.ranks[hit.node] + hit.cell}` : `GPU ${hit.cell}`;
    const known = value === null || value === undefined ? "unknown" : `${value} ${data.unit}`;
    this.tip.textContent = `node ${data.nodes[hit.node]} ${data.hosts[hit.node]} · ${what}: ${known}`;
    const room = this.box.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(0, Math.min(room, hit.x + 12))}px`;
    this.tip.style.top = `${hit.y + 16}px`;
  }
}

function data_line(y, height) { return Math.max(0, Math.floor(y / height)); }
