"""Arguments of training frameworks: read from a job's command, or written for a layout."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from drumbeat.base.problem import Problem
from drumbeat.predict.cost import SCHEDULES, Layout, schedule_name
from drumbeat.predict.forecast import Case
from drumbeat.predict.models import Described, named
from drumbeat.predict.shapes import ConvNet, Model, check

RECOMPUTE = {0: "none", 1: "selective", 2: "full"}
_LARGEST = 10**12


def from_command(argv: List[str]) -> Optional[Described]:
    """Read the model and layout from a training command; None for an unknown framework."""
    words = [str(word) for word in argv]
    joined = " ".join(words)
    if "--num-layers" in joined and "--hidden-size" in joined:
        return _megatron(Options(words))
    if "torchtitan" in joined or "--model.flavor" in joined or "--job.config_file" in joined:
        return _torchtitan(Options(words))
    if "maxtext" in joined.lower() or any(word.startswith("model_name=") for word in words):
        return _maxtext(Options(words))
    at = words.index("train") if "train" in words else 0
    if any(os.path.basename(word) in ("drumbeat", "drumbeat.pyz") for word in words[:at]):
        return _recipe(words[at + 1 :])
    return None


class Options:
    """Command-line options: `--name value`, `--name=value`, `name=value`; a name alone is "yes". Names are compared with - for
    _."""

    def __init__(self, words: List[str]) -> None:
        self.found: Dict[str, str] = {}
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                following = words[i + 1] if i + 1 < len(words) else "--"
                self.set(name[2:], value if equals else (following if not following.startswith("--") else "yes"))
            elif equals:
                self.set(name, value)

    def set(self, name: str, value: str) -> None:
        self.found[name.replace("_", "-")] = value

    def __contains__(self, name: str) -> bool:
        return name in self.found and self.found[name].lower() not in ("false", "no")

    def text(self, name: str, default: str = "") -> str:
        return self.found.get(name, default)

    def count(self, name: str, default: Optional[int] = None, least: int = 0) -> int:
        text = self.found.get(name)
        if text is None:
            if default is None:
                raise Problem(f"{name} is missing in the command", "the model's size follows from it")
            return default
        try:
            value = float(text.replace("_", ""))
        except ValueError:
            value = math.nan
        if not least <= value <= _LARGEST or value != int(value):
            raise Problem(f"{name} {text[:40]}: a whole number from {least} is needed", "check the command")
        return int(value)

    def first(self, names: Mapping[str, str], default: int = 0) -> Dict[str, int]:
        """Return the counts of several options, keyed by our names for them."""
        return {ours: self.count(theirs, default, 1 if default else 0) for ours, theirs in names.items()}


# --- Megatron-LM ----------------------------------------------------------------------------------------------------------

_MEGATRON = {
    "tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size", "micro": "micro-batch-size",
}  # fmt: skip


def _megatron(found: Options) -> Described:
    hidden, heads = found.count("hidden-size", least=1), found.count("num-attention-heads", least=1)
    layers = found.count("num-layers", least=1)
    gated = "swiglu" in found
    modern = found.text("normalization") == "RMSNorm" or gated
    experts = found.count("num-experts", 0)
    ffn = found.count("ffn-hidden-size", 4 * hidden if not gated else int(4 * hidden * 2 / 3) // 64 * 64)
    vocab = found.count("padded-vocab-size", 0) or found.count("vocab-size", 0)
    assumed = "" if vocab else "a vocabulary of 51,200, as --vocab-size is not in the command"
    dense = _dense_layers(found.text("moe-layer-freq", "1"), layers) if experts else 0
    latent = "multi-latent-attention" in found
    channels = found.count("kv-channels", hidden // heads, 1)
    head_dim = found.count("qk-head-dim", 128) if latent else channels
    groups = found.count("num-query-groups", heads, 1) if "group-query-attention" in found else heads
    model = Model(
        f"megatron {hidden} x {layers}", layers, hidden, heads, heads if latent else groups, head_dim,
        0 if experts and not dense else ffn, vocab or 51200, gated=int(gated),
        tied=int("untie-embeddings-and-output-weights" not in found), classic=int(not modern), experts=experts,
        topk=found.count("moe-router-topk", 2) if experts else 0,
        expert_ffn=found.count("moe-ffn-hidden-size", ffn) if experts else 0,
        shared_ffn=found.count("moe-shared-expert-intermediate-size", 0) if experts else 0, dense_layers=dense,
        q_rank=found.count("q-lora-rank", 0) if latent else 0, kv_rank=found.count("kv-lora-rank", 32) if latent else 0,
        rope_dim=found.count("qk-pos-emb-head-dim", 64) if latent else 0,
        value_dim=found.count("v-head-dim", 128) if latent else 0,
        positions=0 if found.text("position-embedding-type") in ("rope", "none") else found.count("max-position-embeddings", 0),
    )  # fmt: skip
    degrees = found.first(_MEGATRON, 1)
    pp, tp = degrees["pp"], degrees["tp"]
    vp = found.count("num-virtual-stages-per-pipeline-rank", 1, 1)
    if found.count("num-layers-per-virtual-pipeline-stage", 0):
        vp = max(1, layers // pp // found.count("num-layers-per-virtual-pipeline-stage"))
    recompute = 2 if found.text("recompute-granularity") == "full" or "checkpoint-activations" in found else 0
    if found.text("recompute-granularity") == "selective" or "recompute-activations" in found:
        recompute = 1
    some = found.count("recompute-num-layers", 0) if found.text("recompute-method") == "block" else 0
    if recompute == 2 and some and some < layers // pp:
        assumed += "; " if assumed else ""
        assumed += f"all layers are recomputed, though the command says {some} per stage"
    zero = 1 if "use-distributed-optimizer" in found else found.count("zero-stage", 0)
    if "use-torch-fsdp2" in found or found.text("data-parallel-sharding-strategy") == "optim_grads_params":
        zero = 3
    layout = Layout(
        **degrees, dp=0, vp=vp, zero=zero, recompute=recompute, sp=int("sequence-parallel" in found and tp > 1)
    )
    flash = found.text("attention-backend") == "flash" or "use-flash-attn" in found or "transformer-impl" in found
    precision = "fp8" if "fp8-format" in found else next((name for name in ("bf16", "fp16") if name in found), "fp32")
    batch = found.count("global-batch-size", 0) or None
    steps = found.count("train-iters", 0) or (found.count("train-samples", 0) // batch if batch else 0)
    return Described(
        check(model), found.count("seq-length", 2048, 1), "megatron" if flash or modern else "megatron-classic", layout,
        batch, steps or None, precision, assumed,
    )  # fmt: skip


def _dense_layers(text: str, layers: int) -> int:
    """Return the dense layers of Megatron's --moe-layer-freq: 1, 2, ..., or a list such as ([0]*3+[1]*58)."""
    if text.isdigit() and int(text):
        return layers - len(range(0, layers, int(text)))
    parts = re.findall(r"\[([01, ]*)\](?:\*(\d{1,6}))?", text)
    total: int = sum(kinds.count("0") * int(times or 1) for kinds, times in parts)
    if not re.fullmatch(r"[\[\]()01, *+\d]+", text) or total > layers:
        raise Problem(f"--moe-layer-freq {text[:40]} is not read", "a number, or a list such as ([0]*3+[1]*58)")
    return total


def _write_megatron(case: Case) -> str:
    a, classic = case.layout, case.framework.name == "megatron-classic"
    degrees = {name: int(getattr(a, name)) for name in _MEGATRON}
    words = [f"--{_MEGATRON[name]} {value}" for name, value in degrees.items() if value > 1 or name == "micro"]
    words.append(f"--global-batch-size {int(case.work.batch)}")
    if a.vp > 1 and not isinstance(case.model, ConvNet):
        words.append(f"--num-layers-per-virtual-pipeline-stage {max(1, int(case.model.layers // (a.pp * a.vp)))}")
    if a.zero:
        words.append(f"--zero-stage {int(a.zero)}" if classic else "--use-distributed-optimizer")
    words += ["--sequence-parallel"] if a.sp else []
    if a.recompute:
        full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        words.append(full if a.recompute == 2 else "--recompute-granularity selective")
    return " ".join(words)


# --- torchtitan -----------------------------------------------------------------------------------------------------------

_TITAN = {
    "tp": "parallelism.tensor-parallel-degree", "pp": "parallelism.pipeline-parallel-degree",
    "cp": "parallelism.context-parallel-degree", "ep": "parallelism.expert-parallel-degree",
}  # fmt: skip
_TITAN_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip


def _torchtitan(found: Options) -> Described:
    config = found.text("job.config-file") or found.text("config")
    if config.endswith(".toml") and os.path.exists(config):
        for name, value in read_toml(config).items():
            if name.replace("_", "-") not in found.found:
                found.set(name, value)
    module, flavor = found.text("model.name") or found.text("module", "llama3"), found.text("model.flavor")
    if flavor:
        described = named(f"{module}-{flavor}".replace("_", "-"))
    elif config:  # llama3_8b.toml, or llama3_8b of the registry of newer versions
        try:
            described = named(os.path.basename(config).rsplit(".", 1)[0])
        except Problem:
            there = "has no model.flavor" if os.path.exists(config) else "is not here"
            raise Problem(f"torchtitan: {config} {there}, and its name is no known model's", "add --model") from None
    else:
        raise Problem("torchtitan: no --model.flavor and no --job.config_file", "the model's size follows from them")
    schedule = found.text("parallelism.pipeline-parallel-schedule", "1F1B")
    ours = next((name for name, theirs in _TITAN_SCHEDULES.items() if theirs.lower() == schedule.lower()), None)
    if ours is None:
        raise Problem(f"torchtitan: the schedule {schedule} is not modelled", f"modelled: {', '.join(SCHEDULES)}")
    degrees = found.first(_TITAN, 1)
    shard = found.text("parallelism.data-parallel-shard-degree", "-1")
    mode = found.text("activation-checkpoint.mode", "selective")
    if mode not in RECOMPUTE.values() and mode != "memory_budget":
        raise Problem(f"torchtitan: activation checkpointing {mode!r} is unknown", "none, selective or full")
    eight = any("float8" in name for name in found.found if name in found) or "float8" in found.text("model.converters")
    local = found.count("training.local-batch-size", found.count("training.batch-size", 1, 1), 1)
    layout = Layout(
        **degrees, dp=0, zero=3 if shard != "1" else 0, sp=int(degrees["tp"] > 1),
        shard=max(0, int(shard)) if shard != "1" and re.fullmatch(r"-?\d{1,6}", shard) else 0,
        micro=found.count("parallelism.pipeline-parallel-microbatch-size", 1, 1) if degrees["pp"] > 1 else local,
        recompute={"full": 2, "none": 0}.get(mode, 1),
    )  # fmt: skip
    layout = scheduled(layout, ours)
    per_stage = found.count("parallelism.pipeline-parallel-layers-per-stage", 0)
    if per_stage and layout.vp > 1:
        layout = dataclasses.replace(layout, vp=max(2, described.model.layers // int(layout.pp) // per_stage))
    return Described(
        described.model, found.count("training.seq-len", described.seq, 1), "torchtitan", layout,
        found.count("training.global-batch-size", 0) or None, found.count("training.steps", 0) or None,
        "fp8" if eight else "bf16", per_replica=local,
    )  # fmt: skip


def read_toml(path: str) -> Dict[str, str]:
    """Return `section.key` and its value of a flat TOML file, as torchtitan's are."""
    try:
        with open(path, encoding="utf-8") as stream:
            lines = stream.read(1 << 20).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{path} cannot be read: {error}", "check --job.config_file") from None
    section, found = "", {}
    for number, line in enumerate(lines, 1):
        text = re.sub(r"""("[^"]*"|'[^']*')|#.*""", lambda match: match.group(1) or "", line).strip()
        title = re.fullmatch(r"\[+([\w.\-]+)\]+", text)
        pair = re.fullmatch(r"""([\w.\-"]+)\s*=\s*(.+)""", text)
        if title:
            section = title.group(1)
        elif pair:
            found[f"{section}.{pair.group(1)}".strip(".")] = pair.group(2).strip().strip("\"'")
        elif text and not text.startswith(("]", '"', "'", "}")):
            raise Problem(f"{path}, line {number}: {text[:60]!r} is not TOML", "check --job.config_file")
    return found


def _write_torchtitan(case: Case) -> str:
    a = case.layout
    shard = (int(a.shard) or int(a.dp)) if a.zero else 1
    if a.zero not in (0, 3):
        return ""
    degrees = {name: int(getattr(a, name)) for name in _TITAN}
    words = [f"--{_TITAN[name].replace('-', '_')} {value}" for name, value in degrees.items() if value > 1]
    words.append(f"--parallelism.data_parallel_replicate_degree {int(a.dp) // shard}")
    words.append(f"--parallelism.data_parallel_shard_degree {shard}")
    local, micro = int(case.work.batch // a.dp), int(a.micro)
    if a.pp > 1:
        words.append(f"--parallelism.pipeline_parallel_schedule {_TITAN_SCHEDULES[schedule_name(a)]}")
        words.append(f"--parallelism.pipeline_parallel_microbatch_size {micro}")
    if a.vp > 1:
        layers = max(1, int(case.model.layers // (a.pp * a.vp)))
        words.append(f"--parallelism.pipeline_parallel_layers_per_stage {layers}")
    words.append(f"--training.local_batch_size {local if a.pp > 1 else micro}")
    words.append(f"--training.global_batch_size {int(case.work.batch)}")
    return " ".join([*words, f"--activation_checkpoint.mode {RECOMPUTE[int(a.recompute)]}"])


# --- MaxText --------------------------------------------------------------------------------------------------------------

_MAXTEXT = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_MAXTEXT_SIZES = {
    "layers": "base-num-decoder-layers", "hidden": "base-emb-dim", "heads": "base-num-query-heads",
    "kv_heads": "base-num-kv-heads", "ffn": "base-mlp-dim", "head_dim": "head-dim", "vocab": "vocab-size",
}  # fmt: skip


def _maxtext(found: Options) -> Described:
    name = found.text("model-name")
    if not name or name == "default":
        missing = [theirs.replace("-", "_") for theirs in _MAXTEXT_SIZES.values() if theirs not in found.found]
        if missing:
            raise Problem(f"MaxText: model_name= or {missing[0]}= is missing", "the model's size follows from it")
        described = Described(check(Model("maxtext", **found.first(_MAXTEXT_SIZES, 1))), 2048)
    else:
        described = named(name)
    degrees = {
        ours: found.count(f"ici-{theirs}-parallelism", 1, 1) * found.count(f"dcn-{theirs}-parallelism", 1, 1)
        for ours, theirs in _MAXTEXT.items()
    }
    try:
        each = float(found.text("per-device-batch-size", "12"))
    except ValueError:
        each = math.nan
    micro = each * degrees["tp"] * degrees["pp"] * degrees["cp"]
    if not 0 < micro < 1e6 or micro != int(micro):
        size = f"per_device_batch_size={found.text('per-device-batch-size', '12')[:20]}"
        raise Problem(f"MaxText: {size} is {micro:g} samples per replica", "a whole number above 0 is needed")
    policy, parts = found.text("remat-policy", "full"), found.count("gradient-accumulation-steps", 1, 1)
    layout = Layout(
        **degrees, dp=0, zero=3, micro=max(1, int(micro) // parts), sp=int(degrees["tp"] > 1),
        recompute=2 if policy == "full" else (0 if policy in ("none", "save_all", "minimal") else 1),
    )  # fmt: skip
    eight = "fp8" in found.text("quantization") or "float8" in found.text("quantization")
    return Described(
        described.model, found.count("max-target-length", described.seq, 1), "maxtext", layout, None,
        found.count("steps", 0) or None, "fp8" if eight else "bf16", per_replica=int(micro),
    )  # fmt: skip


def _write_maxtext(case: Case) -> str:
    a = case.layout
    if a.zero != 3 or (a.shard and a.shard < a.dp):
        return ""
    words = [f"ici_{theirs}_parallelism={int(getattr(a, ours))}" for ours, theirs in _MAXTEXT.items()]
    words += [f"ici_fsdp_parallelism={int(a.dp)}", f"per_device_batch_size={case.work.batch / case.gpus:g}"]
    words.append(f"gradient_accumulation_steps={int(case.work.batch // (a.dp * a.micro))}")
    return " ".join([*words, f"remat_policy={('minimal', 'save_qkv_proj', 'full')[int(a.recompute)]}"])


# --- drumbeat train, DeepSpeed ----------------------------------------------------------------------------------------------


def _recipe(words: List[str]) -> Described:
    """Read `drumbeat train NAME --layout LAYOUT --set key=value...`."""
    if not words or words[0].startswith("-"):
        raise Problem("drumbeat train: no recipe is named", "llama, bert, resnet or wide-resnet")
    recipe, found = words[0], Options(words[1:])
    if recipe == "llama":
        shape = found.text("model", "byte-tiny")
        tiny = Described(Model("byte-tiny", 2, 64, 4, 2, 16, 192, 256), 64)
        described = tiny if shape == "byte-tiny" else named(shape)
    elif recipe == "bert":
        described = named("bert-base")
    elif recipe == "resnet":
        described = named(f"resnet-{found.text('depth', '50')}")
    elif recipe == "wide-resnet":
        raise Problem("drumbeat train wide-resnet: images of 32 x 32 are not modelled", "predict resnet, llama or bert")
    else:
        whole = "--model FOLDER predicts training all of its weights, the most that LoRA can need"
        fix = whole if recipe == "finetune" else "predict llama, bert or resnet"
        raise Problem(f"drumbeat train {recipe}: not modelled", fix)
    degrees = parse_layout(found.text("layout", "ddp"))
    shard = degrees.get("dp_shard", 1)
    layout = Layout(
        tp=degrees.get("tp", 1), pp=degrees.get("pp", 1), cp=degrees.get("cp", 1), dp=0, zero=3 if shard != 1 else 0,
        shard=max(0, shard) if shard != 1 else 0, micro=-found.count("accumulate", 0), sp=int(degrees.get("tp", 1) != 1),
        recompute=next((level for level, name in RECOMPUTE.items() if name == found.text("recompute", "auto")), -1),
    )  # fmt: skip
    precision = found.text("precision", "auto")
    if precision == "auto":
        precision = "bf16" if layout.zero or recipe == "resnet" else "bf16-master"
    return Described(
        described.model, found.count("length", described.seq) or described.seq, "drumbeat", layout,
        found.count("batch", 256 if recipe == "resnet" else 32, 1), found.count("steps", 600 if recipe == "llama" else 100),
        precision,
    )  # fmt: skip


def _write_drumbeat(case: Case) -> str:
    a = case.layout
    if a.zero not in (0, 3) or a.ep > 1 or a.vp > 1:
        return ""
    dp = int(a.dp)
    shard = (int(a.shard) or dp) if a.zero else 1
    found = {"dp_replicate": dp // shard, "dp_shard": shard, "tp": int(a.tp), "pp": int(a.pp), "cp": int(a.cp)}
    degrees = ",".join(f"{name}={value}" for name, value in found.items() if value > 1) or "ddp"
    batch = int(case.work.batch)
    recompute = RECOMPUTE[int(a.recompute)]
    return f"--layout {degrees} --set batch={batch} accumulate={batch // int(a.dp * a.micro)} recompute={recompute}"


def _write_deepspeed(case: Case) -> str:
    a = case.layout
    if a.tp * a.pp * a.cp * a.ep > 1:
        return ""
    parts = int(case.work.batch // (a.dp * a.micro))
    return (
        f'ds_config.json: {{"train_micro_batch_size_per_gpu": {int(a.micro)}, "gradient_accumulation_steps": {parts}, '
        f'"zero_optimization": {{"stage": {int(a.zero)}}}}}; activation checkpointing {RECOMPUTE[int(a.recompute)]}'
    )


_WRITERS: Dict[str, Callable[[Case], str]] = {
    "megatron": _write_megatron, "megatron-classic": _write_megatron, "torchtitan": _write_torchtitan,
    "maxtext": _write_maxtext, "drumbeat": _write_drumbeat, "deepspeed": _write_deepspeed,
}  # fmt: skip


def arguments_of(case: Case) -> Optional[str]:
    """Return a layout as the arguments of its framework; None if it has none for it."""
    writer = _WRITERS.get(case.framework.name)
    return (writer(case) or None) if writer else None


# Arguments to remove if a layout does not use them.
_SWITCHES = (
    "--sequence-parallel", "--use-distributed-optimizer", "--checkpoint-activations", "--recompute-activations",
)  # fmt: skip
_VALUED = (
    "--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--zero-stage", "--parallelism.pipeline-parallel-layers-per-stage",
    "--parallelism.pipeline-parallel-schedule", "--parallelism.pipeline-parallel-microbatch-size",
    *(f"--{name}" for name in (*_MEGATRON.values(), *_TITAN.values())),
)  # fmt: skip


def with_arguments(command: Sequence[str], case: Case) -> List[str]:
    """Return a training command with the arguments of a case's layout in place of its own."""
    arguments = arguments_of(case)
    if arguments is None or case.framework.name == "deepspeed":
        what = f"{case.framework.name} takes this layout from no argument of its command"
        raise Problem(what, f"set it in the program: {arguments or 'degrees as printed'}")
    new = shlex.split(arguments)
    flags = {_flag(word) for word in new if word.startswith("--") and word != "--set"}
    flags |= {*_VALUED, "--layout"} if case.framework.name != "maxtext" else set()
    keys = {word.partition("=")[0] for word in new if "=" in word and not word.startswith("-")}
    kept: List[str] = []
    skip = False
    for i, word in enumerate(command):
        if skip:
            skip = False
        elif _flag(word) in _SWITCHES:
            pass
        elif _flag(word) in flags:
            skip = "=" not in word and i + 1 < len(command) and not command[i + 1].startswith("--")
        elif "=" not in word or word.startswith("-") or word.partition("=")[0] not in keys | {"layout"}:
            kept.append(word)
    if "--set" in kept and "--set" in new:
        at, place = new.index("--set"), kept.index("--set") + 1
        return [*kept[:place], *new[at + 1 :], *kept[place:], *new[:at]]
    return [*kept, *new]


def _flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def scheduled(layout: Layout, schedule: str) -> Layout:
    """Return a layout with a pipeline schedule by its name."""
    if schedule not in SCHEDULES:
        raise Problem(f"schedule {schedule[:40]!r} is unknown", f"known: {', '.join(SCHEDULES)}")
    chunks, bubble, flight = SCHEDULES[schedule]
    vp = max(int(layout.vp), chunks) if layout.pp > 1 else 1
    return dataclasses.replace(layout, bubble=bubble, flight=flight, vp=vp)


def parse_layout(text: str, per_node: int = 8) -> Dict[str, int]:
    """Parse `ddp`, `fsdp`, ... or `dp_shard=4,tp=2`; -1 is the rest. `per_node`: GPUs per node, the number of shards of
    `hsdp`."""
    words = {"ddp": ("dp_replicate", -1), "fsdp": ("dp_shard", -1), "hsdp": ("dp_shard", per_node)}
    words.update({name: (name, -1) for name in ("tp", "pp", "cp")})
    if text in words:
        return dict([words[text]])
    known = ("dp", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "vp")
    found: Dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in known or not re.fullmatch(r"-?\d{1,9}", value.strip()):
            fix = f"write degrees such as dp_shard=4,tp=2 ({', '.join(known)})"
            raise Problem(f"layout {text[:60]!r}: {part[:40]!r} is not a degree", fix)
        found[key.strip()] = int(value)
    return found
