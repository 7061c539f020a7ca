"""Accuracy of `drumbeat predict` on published rows that the fit did not see, each figure beside the naive rule.

    DRUMBEAT_SCALE=FOLDER .venv/bin/python bench/predict.py [--json]

FOLDER has scale.csv (and scale_resnet.csv, scale_vtrain_single.csv); the rows are other people's and not part of this repository.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
from predict_rows import Row, folder, number, read, read_resnet, read_single

from drumbeat.predict import cost, shapes
from drumbeat.predict.cost import SPREAD, Constants, fit, stack, take
from drumbeat.predict.machine import UNCALIBRATED, interval
from drumbeat.predict.search import simplest

Records = Tuple[Any, ...]
figures: List[Dict[str, Any]] = []


def records(rows: Sequence[Row]) -> Records:
    return tuple(
        stack([getattr(row, name) for row in rows]) for name in ("model", "work", "layout", "software", "machine")
    )


def seconds(found: Records, constants: Constants) -> Any:
    return cost.step(*found, constants, np)["total"]


def truth(rows: Sequence[Row]) -> Any:
    return np.array([row.seconds for row in rows])


def some(found: Records, rows: Any) -> Records:
    return tuple(take(record, rows) for record in found)


def error(predicted: Any, measured: Any) -> float:
    return float(np.abs(predicted / measured - 1).mean())


def held_out(rows: Sequence[Row], groups: Sequence[Any], noise: Any = 0.03) -> Any:
    """Predict each group with constants that were fitted to the others."""
    found, measured, labels = records(rows), truth(rows), np.array(groups)
    noise = np.broadcast_to(np.asarray(noise, dtype=float), measured.shape)
    predicted = np.zeros(len(rows))
    for label in sorted(set(groups)):
        test, train = np.where(labels == label)[0], np.where(labels != label)[0]
        fitted = some(found, train)
        constants = fit(lambda c, f=fitted: seconds(f, c), measured[train], Constants(), noise=noise[train])
        predicted[test] = seconds(some(found, test), constants)
    return predicted


def same_rate(rows: Sequence[Row], groups: Sequence[Any]) -> Any:
    """The naive rule without a smaller run: the median FLOP/s per GPU, as a share of the peak, of the rows that were seen."""
    flops = np.array([row.tokens * shapes.flops_per_token(row.model, row.work.seq) / row.machine.flops for row in rows])
    measured, labels = truth(rows), np.array(groups)
    predicted = np.zeros(len(rows))
    for label in set(groups):
        seen = labels != label
        predicted[labels == label] = flops[labels == label] / np.median(flops[seen] / measured[seen])
    return predicted


def figure(what: str, goal: str, reached: str, naive: str, met: Any) -> None:
    figures.append({"what": what, "goal": goal, "reached": reached, "naive": naive, "met": bool(met)})
    print(f"{'met   ' if met else 'missed'} {what}: {reached} (goal {goal}; naive {naive})", flush=True)


def choices(rows: Sequence[Row], predicted: Any, top: int) -> Dict[str, float]:
    """Per model: by how much the layout to use (or the best of the predicted `top`) is slower than the true best."""
    measured, found = truth(rows), {}
    for name in sorted({row.model.name for row in rows}):
        own = [i for i, row in enumerate(rows) if row.model.name == name]
        order = sorted(own, key=lambda i: predicted[i])[:top]
        if top == 1:
            order = [own[simplest([rows[i].layout for i in own], [predicted[i] for i in own])]]
        found[name] = float(measured[order].min() / measured[own].min() - 1)
    return found


def vtrain(rows: List[Row]) -> None:
    rows = [row for row in rows if "vTrain" in row.raw["source"]]
    if not rows:
        return
    measured = truth(rows)
    folds = np.random.default_rng(0).permutation(len(rows)) % 10
    names = [row.model.name for row in rows]
    ten, left = held_out(rows, list(folds)), held_out(rows, names)
    naive = same_rate(rows, list(folds))
    figure(
        "vTrain multi-node, 10-fold",
        "<= 6 %",
        f"{error(ten, measured):.1%} (median {np.median(np.abs(ten / measured - 1)):.1%})",
        f"{error(naive, measured):.1%}",
        error(ten, measured) <= 0.06,
    )
    naive = same_rate(rows, names)
    figure(
        "vTrain, one model size left out",
        "<= 9 %",
        f"{error(left, measured):.1%} (median {np.median(np.abs(left / measured - 1)):.1%})",
        f"{error(naive, measured):.1%}",
        error(left, measured) <= 0.09,
    )
    print(f"       vTrain without any calibration: {error(seconds(records(rows), Constants()), measured):.1%}")
    best, five = choices(rows, ten, 1), choices(rows, left, 5)
    typical = {
        name: float(np.median(measured[np.array(names) == name]) / measured[np.array(names) == name].min() - 1)
        for name in set(names)
    }
    figure(
        "layout to use (simplest within 3 % of the predicted best), 10-fold, slower than the true best",
        "<= 5 %",
        ", ".join(f"{value:.1%}" for value in best.values()),
        "median layout " + ", ".join(f"{typical[name]:.0%}" for name in best),
        max(best.values()) <= 0.05,
    )
    figure(
        "best of the predicted top five, that model left out",
        "<= 3 %",
        ", ".join(f"{value:.1%}" for value in five.values()),
        "",
        max(five.values()) <= 0.03,
    )


def single_node(path: Path) -> None:
    rows = read_single(path)
    if rows:
        measured, found = truth(rows), records(rows)
        picked = np.random.default_rng(1).choice(len(rows), 40, replace=False)
        rest = np.setdiff1d(np.arange(len(rows)), picked)
        fitted = some(found, picked)
        constants = fit(lambda c: seconds(fitted, c), measured[picked], Constants(), noise=0.05)
        got = seconds(some(found, rest), constants)
        print(
            f"       vTrain single node, 40 rows seen, {len(rest)} predicted: {error(got, measured[rest]):.1%} "
            f"(vTrain's simulator 8.4 %); uncalibrated {error(seconds(found, Constants()), measured):.1%}"
        )


def foundry(rows: List[Row]) -> None:
    rows = [row for row in rows if "MosaicML" in row.raw["source"] and "fp8" not in row.raw["precision"]]
    got, naive, measured = [], [], []
    for hardware in sorted({row.raw["hardware"] for row in rows}):
        own = [row for row in rows if row.raw["hardware"] == hardware]
        small = [row for row in own if number(row.raw, "gpus") <= 8]
        large = [row for row in own if number(row.raw, "gpus") > 16]
        if not small or not large:
            continue
        fitted = records(small)
        constants = fit(lambda c, f=fitted: seconds(f, c), truth(small), Constants(), noise=0.03)
        got += list(seconds(records(large), constants))
        measured += list(truth(large))
        for row in large:
            same = (
                [r for r in small if r.model.name == row.model.name and r.work.seq == row.work.seq]
                or [r for r in small if r.model.name == row.model.name]
                or small
            )
            nearest = min(same, key=lambda r: abs(math.log(r.layout.micro / row.layout.micro)))
            ratio = shapes.flops_per_token(row.model, row.work.seq) / shapes.flops_per_token(
                nearest.model, nearest.work.seq
            )
            naive.append(row.tokens / (nearest.tokens / nearest.seconds) * ratio)
    if not got:
        return
    mine = error(np.array(got), np.array(measured))
    figure(
        f"calibrated on <= 8 GPUs, predicted for > 16 up to 512 ({len(got)} llm-foundry rows)",
        "<= 5 %",
        f"{mine:.1%} (max {np.abs(np.array(got) / np.array(measured) - 1).max():.0%})",
        f"{error(np.array(naive), np.array(measured)):.1%}",
        mine <= 0.05,
    )


def series(rows: List[Row]) -> List[List[Row]]:
    """Runs that differ in GPUs but not in model, batch, length or precision, smallest first."""
    found: Dict[Any, List[Row]] = {}
    for row in rows:
        key = (
            row.raw["source"],
            row.raw["framework"],
            row.raw["hardware"],
            row.model.name,
            row.model.layers,
            row.work.seq,
            row.raw["precision"],
        )
        found.setdefault(key, []).append(row)
    kept = []
    for own in found.values():
        own.sort(key=lambda row: number(row.raw, "gpus"))
        batch = own[-1].work.batch
        near = 0.3 if "MLPerf" in own[0].raw["source"] else 0.15  # its batch grows a little with the GPUs
        own = [row for row in own if abs(row.work.batch / batch - 1) < near]
        if (
            len({row.raw["gpus"] for row in own}) > 1
            and number(own[-1].raw, "gpus") >= 2 * number(own[0].raw, "gpus") * 0.99
        ):
            smallest = number(own[0].raw, "gpus")
            kept.append([own[0]] + [row for row in own if number(row.raw, "gpus") > smallest])
    return kept


def strong(rows: List[Row]) -> None:
    found = series(
        [
            row
            for row in rows
            if "vTrain" not in row.raw["source"]
            and "MosaicML" not in row.raw["source"]
            and "BLOOM" not in row.raw["source"]
        ]
    )
    apart = [own for own in found if "MLPerf" in own[0].raw["source"]]
    for name, group in (
        ("strong scaling at constant batch", [own for own in found if own not in apart]),
        ("MLPerf GPT-3 175B (layout changes too)", apart),
    ):
        got, naive, measured = [], [], []
        for own in group:
            # What may be seen: the smallest run of this series, and other models' series with the same framework.
            others = [
                row
                for other in found
                if other is not own
                and other[0].raw["framework"] == own[0].raw["framework"]
                and other[0].raw["source"] == own[0].raw["source"]
                for row in other
            ]
            seen = [own[0]] + others
            fitted = records(seen)
            noise = np.array([0.03] + [0.08] * len(others))
            constants = fit(
                lambda c, f=fitted: seconds(f, c), truth(seen), Constants(), {**SPREAD, "nic": 1.0}, noise=noise
            )
            scale = own[0].seconds / float(seconds(records(own[:1]), constants)[0])
            part = seconds(records(own[1:]), constants) * scale
            got += list(part)
            measured += list(truth(own[1:]))
            naive += [row.tokens / (own[0].tokens / own[0].seconds) for row in own[1:]]
            print(
                f"       {own[0].raw['source'][:34]} {own[0].raw['framework'][:18]} {own[0].model.name} {own[0].raw['gpus']} -> "
                + ", ".join(f"{row.raw['gpus']}: {p / row.seconds - 1:+.0%}" for row, p in zip(own[1:], part))
            )
        if got:
            mine, simple = error(np.array(got), np.array(measured)), error(np.array(naive), np.array(measured))
            figure(
                f"{name} ({len(got)} rows)",
                "<= 15 %, 3 x better than naive",
                f"{mine:.1%}",
                f"{simple:.1%}",
                mine <= 0.15 and simple >= 3 * mine,
            )


def uncalibrated(rows: List[Row]) -> None:
    rows = [
        row
        for row in rows
        if not row.model.experts and any(word in row.raw["precision"].lower() for word in ("bf16", "fp16"))
    ]
    sources = [row.raw["source"] for row in rows]
    many = {name: sources.count(name) for name in sources}
    if len(many) < 2:
        return
    noise = [0.1 * math.sqrt(max(1, many[name] / 8)) for name in sources]
    measured = truth(rows)
    got, naive = held_out(rows, sources, noise), same_rate(rows, sources)
    mine = error(got, measured)
    figure(
        f"no calibration, one source left out at a time ({len(rows)} dense 16-bit rows, {len(many)} sources)",
        "<= 22 %",
        f"{mine:.1%} (median {np.median(np.abs(got / measured - 1)):.1%})",
        f"{error(naive, measured):.1%}",
        mine <= 0.22,
    )
    plain = seconds(records(rows), Constants())
    print(
        f"       the constants that are shipped, set by hand: {error(plain, measured):.1%} "
        f"(median {np.median(np.abs(plain / measured - 1)):.1%})"
    )
    for name in sorted(many):
        own = np.array(sources) == name
        print(
            f"         {name[:44]:44} {many[name]:4d} rows  {error(got[own], measured[own]):6.1%}  "
            f"shipped {error(plain[own], measured[own]):6.1%}  naive {error(naive[own], measured[own]):6.1%}"
        )
    low, high = zip(*(interval(value, UNCALIBRATED) for value in got))
    inside = float(((measured >= np.array(low)) & (measured <= np.array(high))).mean())
    figure(
        "truths inside the 90 % interval",
        "85 to 95 %",
        f"{inside:.1%} (-{1 - low[0] / got[0]:.0%} .. +{high[0] / got[0] - 1:.0%})",
        "",
        0.85 <= inside <= 0.95,
    )


def allocated(rows: List[Row]) -> None:
    """Memory of all rows that have it: SimuMax gives what torch allocates, BLOOM what the GPU holds, libraries too."""
    own = [row for row in rows if row.raw["mem_gib"] and not row.model.experts]
    if not own:
        return
    got, measured, simple = [], [], []
    for row in own:
        beside = 0.0 if "SimuMax" in row.raw["source"] else cost.libraries(row.model, row.layout, row.software)
        got.append((cost.peak(row.model, row.work, row.layout, row.software, row.states) + beside) / 2**30)
        measured.append(number(row.raw, "mem_gib"))
        simple.append(16 * shapes.parameters(row.model) / (row.layout.tp * row.layout.pp) / 2**30)
    off = np.array(got) / np.array(measured) - 1
    figure(
        f"memory of all {len(own)} dense rows that have it",
        "<= 4 %",
        f"{np.abs(off).mean():.1%} (median {np.median(np.abs(off)):.1%})",
        f"16 bytes per parameter {error(np.array(simple), np.array(measured)):.0%}",
        np.abs(off).mean() <= 0.04,
    )
    for name in sorted({row.raw["source"] for row in own}):
        mine = off[[row.raw["source"] == name for row in own]]
        worst = max((row for row in own if row.raw["source"] == name), key=lambda row: abs(off[own.index(row)]))
        print(
            f"         {name[:44]:44} {len(mine):4d} rows  {np.abs(mine).mean():6.1%}  median {np.median(np.abs(mine)):6.1%}  "
            f"at most {np.abs(mine).max():.0%} (row {worst.raw['id']})"
        )


def spread_words(off: Any) -> str:
    return f"{np.abs(off).mean():.1%} (median {np.median(np.abs(off)):.1%}, bias {np.median(off):+.1%})"


def others(rows: List[Row], path: Path) -> None:
    """What no goal is set for: mixtures of experts, 8-bit rows, and ResNet-50, with the constants that are shipped."""
    kinds = {
        "mixtures of experts, 16 bits": [r for r in rows if r.model.experts and "16" in r.raw["precision"]],
        "mixtures of experts, 8 bits": [r for r in rows if r.model.experts and "8" in r.raw["precision"]],
        "dense rows in 8 bits": [r for r in rows if not r.model.experts and "8" in r.raw["precision"]],
    }
    for name, own in kinds.items():
        if own:
            off = seconds(records(own), Constants()) / truth(own) - 1
            simple = error(same_rate(own, [row.raw["id"] for row in own]), truth(own))
            print(f"       {name}: {len(own)} rows, {spread_words(off)}; naive {simple:.0%}")
    pairs, refused = read_resnet(path / "scale_resnet.csv")
    if pairs:
        off = np.array([predicted / measured - 1 for _, predicted, measured in pairs])
        print(f"       ResNet-50, images/s: {len(pairs)} rows, {spread_words(off)}")
        for why in sorted(set(refused)):
            print(f"         refused: {refused.count(why)} {why}")
        for name in sorted({row["framework"] for row, _, _ in pairs}):
            mine = off[[row["framework"] == name for row, _, _ in pairs]]
            print(
                f"         {name[:44]:44} {len(mine):4d} rows  {np.abs(mine).mean():6.1%}  bias {np.median(mine):+.1%}"
            )


def searching() -> None:
    from drumbeat.predict.forecast import Case
    from drumbeat.predict.machine import FRAMEWORKS, find_cluster
    from drumbeat.predict.models import named
    from drumbeat.predict.search import grid, rank

    found, framework = named("qwen3-235b-a22b"), FRAMEWORKS["megatron"]
    layout = cost.Layout(dp=3840)
    case = Case(
        found.model, cost.Work(found.seq, 15360), layout, framework, find_cluster("b200"), "bf16", framework.constants
    )
    layouts = grid(case)
    once = len(layouts.tp)
    rows = np.tile(np.arange(once), -(-350_000 // once))  # all layouts of this job, repeated up to 350,000
    layouts = take(layouts, rows)
    times = []
    for _ in range(3):
        start = time.process_time()
        ranking = rank(case, layouts)
        times.append(time.process_time() - start)
    rate = ranking.tried / min(times)
    figure(
        "layouts per second on one core, memory included",
        ">= 350,000",
        f"{rate:,.0f} ({ranking.tried:,} in {min(times):.2f} s, {ranking.fitting:,} fit; {once:,} different ones)",
        "",
        rate >= 350_000,
    )


def main() -> None:
    path = folder()
    refused: List[str] = []
    rows = [row for row in read(path / "scale.csv", refused) if row.seconds]
    print(f"{len(rows)} rows of a known GPU and shape with a step time; refused:")
    for why in sorted(set(refused)):
        print(f"       {refused.count(why):4d} {why}")
    vtrain(rows)
    single_node(path / "scale_vtrain_single.csv")
    foundry(rows)
    strong(rows)
    uncalibrated(rows)
    allocated(rows)
    others(rows, path)
    searching()
    print(f"{sum(one['met'] for one in figures)} of {len(figures)} goals met")
    if "--json" in sys.argv:
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
