// The figures above the curves. `data-value` holds the number itself, unrounded.
import { duration, element, number, scaled, setText, stepTime } from "./words.js";

const STEADY = 0.02; // a change of speed below this is none

function trend(head) {
  if (!head.rate || head.recent_rate === null) return [`since the first ${head.step_is || "step"}`, ""];
  const change = head.recent_rate / head.rate - 1;
  const now = `last minute ${scaled(head.recent_rate, "")[0]}${scaled(head.recent_rate, "")[1]}`;
  if (Math.abs(change) < STEADY) return [`${now}, steady`, ""];
  return [`${now}, ${change > 0 ? "up" : "down"} ${Math.round(Math.abs(change) * 100)} %`, change > 0 ? "up" : "down"];
}

// A loss that is not finite comes in words: "nan since step 41".
function lossOf(head) {
  const validation = head.validation_not_finite || (head.validation_loss === null ? "" : number(head.validation_loss));
  const [shown, ...since] = head.loss_not_finite ? head.loss_not_finite.split(" ") : [number(head.loss)];
  const at = head.loss_not_finite || head.loss_step === null ? "" : `of ${head.step_is || "step"} ${number(head.loss_step)}`;
  const note = [since.join(" "), at, validation && `validation ${validation}`].filter(Boolean).join(", ");
  return ["loss", "loss", head.loss_not_finite || head.loss, [shown, ""], note, head.loss_not_finite || head.validation_not_finite ? "warn" : ""];
}

// Name, label, raw value, [shown, unit], note, class of the note; null leaves it out.
function figuresOf(head) {
  const slow = head.slowest, gpus = head.gpus;
  const done = head.steps_of ? `of this ${head.steps_of}` : head.steps && head.step !== null ? `${Math.floor((100 * head.step) / head.steps)} % of ${number(head.steps)}` : "";
  const ended = head.ranks_ended ? `${number(head.ranks_ended)} ended` : "";
  const away = head.nodes - head.nodes_here;
  return [
    ["step", head.step_is || "step", head.step, [number(head.step), ""], done],
    lossOf(head),
    ["rate", head.rate_rough ? "throughput, about" : "throughput", head.rate, scaled(head.rate, head.rate === null ? "" : ` ${head.rate_unit}`), ...trend(head)],
    ["step_seconds", `time per ${head.step_is || "step"}, mean`, head.mean_step_seconds, stepTime(head.mean_step_seconds), head.step_seconds === null ? "" : `latest ${stepTime(head.step_seconds).join(" ")}`],
    head.seconds_left !== null ? ["left", "time left", head.seconds_left, [duration(head.seconds_left), ""], `after ${duration(head.elapsed)}`]
      : ["elapsed", { queued: "waiting", running: "elapsed" }[head.state] || "took", head.elapsed, [duration(head.elapsed), ""],
        [head.quiet === null ? "" : `no step for ${duration(head.quiet)}`, head.attempt ? `attempt ${head.attempt + 1}` : ""].filter(Boolean).join(", "), head.quiet === null ? "" : "warn"],
    slow && slow.stands_out ? ["slowest", "slowest rank", slow.rank, [`rank ${slow.rank}`, ""], `node ${slow.node}, +${Math.round(slow.spread * 100)} %` + (slow.behind > 1 ? `, ${slow.behind} steps behind` : ""), slow.spread > 0.1 || slow.behind > 1 ? "warn" : ""] : null,
    ["nodes", "nodes", head.nodes_here, [`${number(head.nodes_here)}`, head.nodes ? ` of ${number(head.nodes)}` : ""], [head.world ? `${number(head.world)} ranks` : "", ended].filter(Boolean).join(", "), head.state === "running" && away > 0 ? "warn" : ""],
    gpus ? ["gpu_use", "GPU use", head.gpu_use, [head.gpu_use === null ? "–" : head.gpu_use.toFixed(0), " %"], `${number(gpus)} GPUs` + (head.throttled ? `, ${number(head.throttled)} slowed down` : ""), head.throttled ? "warn" : ""] : null,
    gpus && head.gpu_memory !== null ? ["gpu_memory", "GPU memory", head.gpu_memory, [head.gpu_memory.toFixed(0), " %"], ""] : null,
    head.power !== null ? ["power", "GPU power", head.power, scaled(head.power, "W"), head.energy ? `${scaled(head.energy / 3600, "Wh").join(" ")} ${head.state === "running" ? "so far" : "in all"}` : ""] : null,
    head.received !== null || head.sent !== null ? ["received", "network in", head.received, scaled(head.received, "B/s"), `out ${scaled(head.sent, "B/s").join(" ")}`]
      : head.network_why ? ["received", "network", null, ["not used", ""], head.network_why.split(": ")[1]] : null,
  ].filter(Boolean);
}

// A hang is red where one looks for the step.
function hanging(figures, head) {
  if (head.word !== "hanging") return figures;
  const notes = { step: [head.quiet === null ? "hangs" : `no step for ${duration(head.quiet)}`, "bad"], elapsed: ["", ""] };
  return figures.map((figure) => [...figure.slice(0, 4), ...(notes[figure[0]] || figure.slice(4))]);
}

export function showFigures(place, head) {
  const kept = new Map([...place.children].map((box) => [box.dataset.name, box]));
  const boxes = hanging(figuresOf(head), head).map(([name, label, value, [shown, unit], note, noteClass]) => {
    let box = kept.get(name);
    if (!box) {
      box = element("div", "figure");
      box.dataset.name = name;
      const amount = element("div", "value");
      amount.append(element("span"), element("small"));
      box.append(element("div", "label"), amount, element("div", "note"));
    }
    box.dataset.value = value === null ? "" : value;
    const [labelBox, valueBox, noteBox] = box.children;
    setText(labelBox, label);
    setText(valueBox.firstChild, shown);
    setText(valueBox.lastChild, unit.startsWith(" ") || !unit ? unit : ` ${unit}`);
    setText(noteBox, note || "");
    noteBox.className = `note ${noteClass || ""}`;
    box.className = `figure ${noteClass === "bad" || noteClass === "warn" ? noteClass : ""}`;
    return box;
  });
  if (boxes.length !== place.children.length || boxes.some((box, index) => box !== place.children[index])) place.replaceChildren(...boxes);
}
