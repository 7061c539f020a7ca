"""Whatever is typed: a prediction, or one clear line and exit code 2; never a traceback, never a number that is none."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumbeat.cli import main

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "intermediate_size": 1024, "vocab_size": 32000, "max_position_embeddings": 2048, "head_dim": 64,
    "tie_word_embeddings": False, "sliding_window": 512, "attention_bias": False,
}  # fmt: skip
MOE = {
    **LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_layer_freq": 1,
}  # fmt: skip
GPT = {
    "model_type": "gpt2",
    "n_embd": 512,
    "n_head": 8,
    "n_layer": 4,
    "vocab_size": 32000,
    "n_positions": 1024,
    "n_inner": 2048,
}
MEGATRON = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --vocab-size 32000 "
    "--num-experts 4 --moe-layer-freq 1 --expert-model-parallel-size 2 --context-parallel-size 1 --train-iters 10 "
    "--num-layers-per-virtual-pipeline-stage 1 --kv-channels 64 --ffn-hidden-size 2048 --use-distributed-optimizer"
)
TITAN = (
    "torchtitan --model.name llama3 --model.flavor 8B --training.local_batch_size 2 --training.seq_len 2048 "
    "--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree -1 --activation_checkpoint.mode full "
    "--parallelism.pipeline_parallel_schedule 1F1B --training.steps 10"
)
MAXTEXT = "MaxText/train.py base.yml model_name=llama2-7b per_device_batch_size=2 ici_tensor_parallelism=2 steps=3"
OWN = "drumbeat train llama --layout dp_shard=2,tp=2 --set model=1b batch=8 accumulate=2 length=2048 recompute=full"

FLAGS = (
    "batch", "micro-batch", "seq", "nodes", "gpus-per-node", "nics", "memory", "tokens", "budget", "price", "layout", "precision",
    "framework", "fabric", "gpu", "model", "schedule", "zero", "recompute",
)  # fmt: skip
ODD = st.sampled_from(
    [
        *(0, -1, 1, 3, 7, 1.5, 1e308, 10**30, 2**63, float("nan"), float("inf")),
        *("", "x", "8", "1e3", "-", None, True, [], {}, [1], {"a": 1}),
    ]
)  # fmt: skip
ODD_WORDS = st.sampled_from(
    [
        *("0", "-1", "1", "3", "1.5", "1e9", "1e308", "9" * 40, "nan", "inf", "-inf"),
        *("", "x", "8B", "--", "=", "None", "0x10", "1_0", "tp=0"),
    ]
)  # fmt: skip
FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def good(capsys, *words):
    """Run it, and check the contract."""
    capsys.readouterr()
    try:
        code = main(["predict", *words])
    except SystemExit as left:  # argparse: a flag's value that is none
        code = left.code
        assert code == 2
        return code
    out, err = capsys.readouterr()
    assert code in (0, 1, 2), (code, err)
    if code == 2:
        assert len(err.strip().splitlines()) <= 2 and "Traceback" not in err and err.strip(), err
    else:
        assert not re.search(r"\b(nan|inf)\b|-\d[\d.]* (ms|s|GiB)", out.lower()), out
    return code


@FEW
@given(base=st.sampled_from([LLAMA, MOE, GPT]), changes=st.lists(st.tuples(st.integers(0, 30), ODD), max_size=3))
def test_configs(capsys, base, changes):
    config = dict(base)
    for place, value in changes:
        key = list(base)[place % len(base)]
        config[key] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        good(capsys, "--model", str(path), "--gpu", "h100", "--nodes", "2", "--seq", "1024")


@FEW
@given(
    command=st.sampled_from([MEGATRON, TITAN, MAXTEXT, OWN]),
    changes=st.lists(st.tuples(st.integers(0, 60), ODD_WORDS), min_size=1, max_size=3),
)
def test_commands(capsys, command, changes):
    words = command.split()
    for place, value in changes:
        at = 1 + place % (len(words) - 1)
        words[at] = words[at].split("=")[0] + "=" + value if "=" in words[at] else value
    good(capsys, "--gpu", "a100", "--nodes", "1", "--", *words)


@FEW
@given(
    flags=st.lists(
        st.tuples(
            st.sampled_from(FLAGS),
            ODD_WORDS,
        ),
        min_size=1,
        max_size=4,
    ),
    more=st.sampled_from([[], ["--search"], ["--json"]]),
)
def test_flags(capsys, flags, more):
    words = ["--model=llama3-1b", "--gpu=h100", "--nodes=2", "--layout=fsdp"]
    good(capsys, *words, *(f"--{name}={value}" for name, value in flags), *more)


@FEW
@given(
    text=st.one_of(
        st.text(max_size=200), st.sampled_from(["{", "[]", "null", "- a\n- b", "a: [", "command: 3", "\x00"])
    )
)
def test_files(capsys, text):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "job.yaml", "run.toml"):
            (Path(folder) / name).write_text(text, encoding="utf-8", errors="replace")
        good(capsys, "--model", f"{folder}/config.json", "--gpu", "h100")
        good(capsys, f"{folder}/job.yaml", "--gpu", "h100")
        good(capsys, "--gpu", "h100", "--", "torchtitan", "--job.config_file", f"{folder}/run.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "llama3-8b", "--gpu", "h100", "--budget", "gpuh", "--tokens", "1e9"], "--budget gpuh"),
        (["--model", "llama3-8b", "--gpu", "h100", "--budget=-5gpuh"], "--budget -5gpuh"),
        (["--model", "llama3-8b", "--gpu", "h100", "--tokens", "many"], "--tokens many"),
        (["--model", "no/such/config.json", "--gpu", "h100"], "No such file"),
        (["--model", "lama3", "--gpu", "h100"], "unknown model 'lama3'"),
        (["--model", "llama3-8b", "--gpu", "h1000"], "unknown GPU"),
        (["--model", "llama3-8b", "--gpu", "h100", "--framework", "magic"], "unknown framework"),
        (["--model", "llama3-8b", "--gpu", "h100", "--calibrate", "/tmp"], "/tmp"),
        (["--model", "llama3-8b", "--gpu", "v100", "--precision", "fp8"], "V100 has no fp8"),
        (["--model", "llama3-8b", "--gpu", "h100", "--layout", "tp=3"], "do not divide"),
    ],
)
def test_messages_name_what_was_typed(capsys, words, said):
    assert main(["predict", *words]) == 2
    assert said in capsys.readouterr().err
