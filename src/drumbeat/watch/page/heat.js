// Every GPU or rank of every node as one cell. A column is a node; many nodes continue on the next line.
const STOPS = { light: ["#e9eef8", "#a9c7f5", "#5b93ee", "#2f5fd0", "#2a2f86"], dark: ["#1a2433", "#1d4a7a", "#1f7f9e", "#36b98f", "#c9ea6a"] };
const GAP = 2;
const SHADES = 64, EMPTY = SHADES, LOST = SHADES + 1, QUIET = SHADES + 2, NOTHING = 255; // places in the palette

function mix(stops, share) {
  const place = Math.min(0.999, Math.max(0, share)) * (stops.length - 1);
  const index = Math.floor(place), rest = place - index;
  const parts = [stops[index], stops[index + 1]].map((hex) => [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16)));
  return `rgb(${parts[0].map((low, which) => Math.round(low + (parts[1][which] - low) * rest)).join(",")})`;
}

function palette(theme) {
  const css = getComputedStyle(document.documentElement);
  const shades = Array.from({ length: SHADES }, (_, shade) => mix(STOPS[theme], shade / (SHADES - 1)));
  return [...shades, ...["--empty", "--bad", "--quiet"].map((name) => css.getPropertyValue(name).trim())];
}

// Black or white, whichever is easier to read on a colour (WCAG's relative luminance).
export function ink(hex) {
  const [r, g, b] = [1, 3, 5].map((from) => parseInt(hex.slice(from, from + 2), 16) / 255).map((v) => (v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

// Where a node's column begins.
function place(s, data, index) {
  return [Math.round(s.left + (index % s.perLine) * s.wide), Math.floor(index / s.perLine) * (data.columns * s.tall + s.between) + s.between];
}

export class Heat {
  constructor(box, scale, onNode) {
    Object.assign(this, { box, scale, onNode, canvas: box.querySelector("canvas"), tip: box.querySelector("#tip"), data: null });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => { const hit = this.hit(event); if (hit) this.onNode(this.data.nodes[hit.node]); });
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("blur", () => { this.tip.hidden = true; });
    this.at = { node: 0, cell: 0 };
    this.frame = "";
    new ResizeObserver(() => this.draw()).observe(box);
  }

  show(data) { this.data = data; this.draw(); }

  shape() {
    const { nodes, columns } = this.data, width = this.box.clientWidth - 36;
    const wide = Math.max(7, Math.min(200, width / nodes.length));
    const perLine = Math.max(1, Math.min(nodes.length, Math.floor(width / wide + 0.001)));
    const many = nodes.length > perLine || wide < 16;
    const tall = many ? (columns > 8 ? 4 : 6) : 22;
    return { wide: many ? width / perLine : wide, tall, perLine, gap: many ? 1 : GAP, lines: Math.ceil(nodes.length / perLine), left: 36, between: 14 };
  }

  draw() {
    const data = this.data;
    if (!data || !data.nodes.length || !data.columns) { this.canvas.style.height = "0"; return; }
    const s = this.shape(), ratio = window.devicePixelRatio || 1, width = this.box.clientWidth;
    const height = s.lines * (data.columns * s.tall + s.between) + 4;
    const theme = document.documentElement.dataset.theme === "dark" ? "dark" : "light";
    const frame = JSON.stringify([width, height, ratio, theme, s, data.columns, data.unit, data.low, data.high, data.nodes]);
    const pen = this.canvas.getContext("2d");
    if (frame !== this.frame) { // else only cells that have changed are painted
      this.frame = frame;
      this.painted = new Uint8Array(data.nodes.length * data.columns).fill(NOTHING);
      this.palette = palette(theme);
      this.canvas.width = width * ratio; this.canvas.height = height * ratio; this.canvas.style.height = `${height}px`;
      pen.scale(ratio, ratio); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
      this.labels(pen, s);
    }
    const span = data.high - data.low || 1, broad = Math.floor(s.wide) - s.gap, lost = new Set(data.lost), texts = s.wide >= 34 && s.tall > 12;
    data.values.forEach((row, index) => {
      const [x, top] = place(s, data, index), gone = lost.has(data.nodes[index]);
      const bad = data.bad === null || data.ranks[index] === null ? -1 : data.bad - data.ranks[index];
      for (let cell = 0; cell < data.columns; cell++) {
        const value = row[cell], y = top + cell * s.tall, which = index * data.columns + cell;
        const share = value === null || value === undefined ? null : Math.min(1, Math.max(0, (value - data.low) / span));
        const colour = gone || cell === bad ? LOST : share === null ? EMPTY : Math.round(share * (SHADES - 1));
        if (!texts && this.painted[which] === colour) continue;
        this.painted[which] = colour;
        pen.fillStyle = this.palette[colour];
        if (s.tall > 12) { pen.clearRect(x, y, broad, s.tall - s.gap); pen.beginPath(); pen.roundRect(x, y, broad, s.tall - s.gap, 4); pen.fill(); }
        else pen.fillRect(x, y, broad, s.tall - s.gap);
        if (texts && share !== null) {
          pen.fillStyle = ink(pen.fillStyle);
          pen.textAlign = "center"; pen.fillText(value >= 100 ? Math.round(value) : value, x + s.wide / 2 - 1, y + s.tall / 2 - 1);
        }
      }
    });
  }

  labels(pen, s) {
    const { data } = this, wide = s.wide >= 34, nodes = data.nodes.length;
    const every = 5 * Math.ceil(40 / s.wide / 5); // a label has room for each of these
    pen.fillStyle = this.palette[QUIET];
    data.nodes.forEach((node, index) => {
      const [x, top] = place(s, data, index), first = index % s.perLine === 0;
      pen.textAlign = wide ? "center" : "left";
      const fits = wide || x + pen.measureText(`${node}`).width < this.box.clientWidth;
      if (fits && (first || wide || (index % s.perLine) % every === 0)) pen.fillText(`${node}`, wide ? x + s.wide / 2 - 1 : x, top - 7);
      if (!first) return;
      pen.textAlign = "right";
      pen.fillText(s.tall > 12 || data.columns > 3 ? "0" : "", s.left - 6, top + s.tall / 2 - 1);
      if (data.columns > 1) pen.fillText(`${data.columns - 1}`, s.left - 6, top + (data.columns - 0.5) * s.tall - 1);
    });
    const bar = document.createElement("i");
    bar.style.background = `linear-gradient(90deg, ${this.palette.slice(0, SHADES).filter((_, shade) => shade % 7 === 0).join(",")})`;
    const shown = (value) => `${Number(value.toPrecision(3))} ${data.unit}`;
    const rows = data.show === "step" ? "rank of it" : "GPU of it", one = nodes === 1;
    document.getElementById("heatkey").textContent = `${one ? "One node" : "Each column is a node"}, each row a ${rows}${s.lines > 1 ? `; ${s.perLine} nodes per line` : ""}. Red: lost, failed first, or it hangs.`;
    this.scale.replaceChildren(shown(data.low), bar, shown(data.high));
  }

  // By keyboard: the arrows go from cell to cell, Enter opens the node.
  move(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!this.data || !this.data.nodes.length || (!step && event.key !== "Enter")) return;
    event.preventDefault();
    if (!step) { this.onNode(this.data.nodes[this.at.node]); return; }
    const clip = (value, end) => Math.max(0, Math.min(end - 1, value));
    this.at = { node: clip(this.at.node + step[0], this.data.nodes.length), cell: clip(this.at.cell + step[1], this.data.columns) };
    const s = this.shape(), [x, top] = place(s, this.data, this.at.node);
    this.tell({ ...this.at, x, y: top + this.at.cell * s.tall });
  }

  hit(event) {
    if (!this.data || !this.data.nodes.length) return null;
    const s = this.shape(), edge = this.canvas.getBoundingClientRect();
    const x = event.clientX - edge.left - s.left, y = event.clientY - edge.top, line = Math.max(0, Math.floor(y / (this.data.columns * s.tall + s.between)));
    const column = Math.floor(x / s.wide), cell = Math.floor((y - line * (this.data.columns * s.tall + s.between) - s.between) / s.tall);
    const node = line * s.perLine + column;
    if (x < 0 || column >= s.perLine || node >= this.data.nodes.length || cell < 0 || cell >= this.data.columns) return null;
    return { node, cell, x: event.clientX - edge.left, y };
  }

  point(event) {
    const hit = this.hit(event);
    this.canvas.style.cursor = hit ? "pointer" : "default";
    this.tell(hit);
  }

  tell(hit) {
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
