"""drumbeat train: a built-in recipe, with any layout. Inside ranks it is the recipe; typed at a desk, one process."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from typing import Any, List

from drumbeat.base.problem import Problem
from drumbeat.cli import add_json_schema

RECIPES = {
    "llama": "Llama 3 shapes (byte-tiny, 1b, 3b, 8b, 70b) on text or tokens",
    "experts": "mixture of experts: byte-experts, 8x1b, 8x7b",
    "bert": "BERT (byte-tiny, base, large), masked tokens",
    "resnet": "ResNet-18 and -50 on image folders or random images",
    "wide-resnet": "Wide ResNet on CIFAR-100",
    "finetune": "a model of transformers on conversations or text, also with LoRA",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, RECIPES))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in RECIPES.items())
    parser.epilog = (
        f"recipes:\n{listed}\n\nMany ranks: drumbeat run -- drumbeat train llama --layout fsdp\n"
        "Weights for transformers: drumbeat train export RUN --to FOLDER"
    )
    recipe: Any = parser.add_argument("recipe", help="one of those below; or export")
    recipe.offers = (*RECIPES, "export")
    parser.add_argument("run", nargs="?", help="export: a run, or a folder with checkpoints")
    parser.add_argument("--layout", help="ddp, fsdp, hsdp, tp, pp, cp, ep, or degrees such as dp_shard=4,tp=2")
    parser.add_argument(
        "--set", nargs="+", default=[], action="extend", metavar="KEY=VALUE", help="settings of the recipe"
    )
    parser.add_argument("--settings", action="store_true", help="list the recipe's settings and exit")
    parser.add_argument(
        "--verify-resume", action="store_true", help="stop and resume half-way; state and losses must be bitwise equal"
    )
    parser.add_argument("--json", action="store_true", help="rank 0 prints the result as one JSON line at the end")
    add_json_schema(parser)
    group = parser.add_argument_group("export")
    group.add_argument("--to", metavar="FOLDER", help="where safetensors, config.json and tokenizer go")
    group.add_argument("--step", type=int, metavar="N", help="checkpoint to export. Default: the newest")
    group.add_argument("--adapter", action="store_true", help="only what LoRA has learnt, as peft reads it")
    group.add_argument("--dtype", default="", metavar="KIND", help="fp32, bf16 or fp16. Default: as trained")


def run(args: argparse.Namespace) -> int:
    if args.recipe == "export":
        return _export(args)
    if args.run:
        raise Problem(f"'{args.run}' after the recipe {args.recipe}", "settings follow --set, as KEY=VALUE")
    if args.recipe not in RECIPES:
        from drumbeat.jobfile.check import near

        raise Problem(f"no recipe '{args.recipe}'{near(args.recipe, RECIPES)}", f"known: {', '.join(RECIPES)}")
    from drumbeat.train import require_torch

    require_torch()
    from drumbeat.train.refusal import NotFinite, Refusal, Stopped

    try:
        return _train(args)
    except NotFinite as stop:
        raise Problem(f"FloatingPointError: {stop.what}", stop.fix, exit_code=1) from stop
    except Stopped as stop:
        raise Problem(stop.what, stop.fix, exit_code=1) from stop
    except Refusal as refusal:
        raise Problem(refusal.what, refusal.fix) from refusal


def _export(args: argparse.Namespace) -> int:
    from drumbeat.train import require_torch

    if not args.to:
        raise Problem("export: no folder to write to", "add --to FOLDER")
    require_torch()
    from drumbeat.train.export import export_checkpoint, newest
    from drumbeat.train.refusal import Refusal

    try:
        path, beside = newest(_checkpoints_of(args.run), args.step)
        print(f"{path}: {export_checkpoint(path, beside, args.to, args.dtype, args.adapter)}")
    except Refusal as refusal:
        raise Problem(refusal.what, refusal.fix) from refusal
    return 0


def _checkpoints_of(name: Any) -> str:
    """Return the folder of checkpoints, or the one that a run has reported."""
    from drumbeat.desk.runs import find_run

    if name and any(os.path.exists(os.path.join(name, file)) for file in ("latest", "commit.json")):
        return str(name)
    run = find_run(name, os.environ)
    paths = [metric.more["path"] for metric in run.metrics(0) if metric.kind == "checkpoint" and "path" in metric.more]
    if not paths:
        raise Problem(f"{run.path}: the run has reported no checkpoint", "name the folder that it saved to")
    return os.path.dirname(str(paths[-1]))


def _train(args: argparse.Namespace) -> int:
    from drumbeat.train.settings import fill, help_of

    recipe: Any = importlib.import_module(f"drumbeat.train.recipes.{args.recipe.replace('-', '_')}")
    if args.settings:
        print(help_of(recipe.SettingsClass))
        return 0
    texts: List[str] = list(args.set) + ([f"layout={args.layout}"] if args.layout else [])
    settings = fill(recipe.SettingsClass, texts)
    from drumbeat.train.world import join, leave

    try:
        if args.verify_resume:
            from drumbeat.train.verify_resume import verify_resume

            return 0 if verify_resume(recipe, settings) else 1
        result = recipe.run(settings)  # which joins the world itself: some set variables before CUDA starts
        lead = join().lead
    finally:
        leave()
    if args.json and lead:
        digests = [{"step": each.step, "entries": each.entries} for each in result.digests]
        print(json.dumps({**result._asdict(), "digests": digests}))
    return int(result.exit_code)
