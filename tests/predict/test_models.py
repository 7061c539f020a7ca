"""Models as people have them: config.json of many kinds, and the arguments of frameworks."""

import json

import pytest

from drumbeat.base.problem import Problem
from drumbeat.predict import shapes
from drumbeat.predict.models import config_model, describe, from_command, parse_layout


def parse(command):
    return from_command(command.split())


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = [
    (LLAMA, 8.03),
    ({**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}, 46.7),
    (
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False,
        },
        671.03,
    ),
    (
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4,
            "num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
        },
        30.5,
    ),
    ({"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257, "n_positions": 1024}, 1.556),
    (
        {
            "model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44,
            "intermediate_size": 24576, "vocab_size": 50432, "tie_word_embeddings": False,
        },
        20.55,
    ),
    (
        {
            "model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "num_hidden_layers": 42, "intermediate_size": 14336, "vocab_size": 256000, "sliding_window": 4096,
        },
        9.24,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "billions"), CONFIGS, ids=[config["model_type"] for config, _ in CONFIGS])
def test_config_json_of_every_kind(tmp_path, config, billions):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert shapes.parameters(describe(str(path)).model) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "not modelled"),
        ({"hidden_size": None}, "missing"),
        ({"hidden_size": -4096}, "hidden size"),
        ({"hidden_size": "4096"}, "hidden size"),
        ({"num_attention_heads": 0}, "heads"),
        ({"num_attention_heads": 31}, "do not divide"),
        ({"num_key_value_heads": 7}, "do not divide"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_hidden_layers": 1.5}, "layers"),
        ({"vocab_size": None}, "missing"),
        ({"vocab_size": 10**12}, "no model is that large"),
        ({"intermediate_size": None}, "MLP"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "experts"),
    ],
)
def test_impossible_sizes_are_named(change, words):
    with pytest.raises(Problem, match=words) as caught:
        config_model({**LLAMA, **change}, "it")
    assert caught.value.exit_code == 2 and "\n" not in caught.value.what


def test_megatron_arguments():
    found = parse(
        "torchrun pretrain_gpt.py --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention "
        "--num-query-groups 8 --ffn-hidden-size 28672 --swiglu --seq-length 8192 --micro-batch-size 1 --global-batch-size 512 "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 --bf16 "
        "--use-distributed-optimizer --sequence-parallel --vocab-size 128256 --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --normalization RMSNorm --train-iters=1000"
    )
    assert shapes.parameters(found.model) / 1e9 == pytest.approx(70.55, rel=0.001)
    layout = found.layout
    assert (layout.tp, layout.pp, layout.vp, layout.zero, layout.sp, found.batch, found.steps) == (
        4,
        4,
        4,
        1,
        1,
        512,
        1000,
    )
    assert found.framework == "megatron" and found.precision == "bf16" and found.seq == 8192


def test_torchtitan_maxtext_and_own_arguments():
    titan = parse("torchrun -m torchtitan.train --job.config_file llama3_8b.toml --training.seq_len 4096")
    assert titan.model.name == "llama3-8b" and titan.seq == 4096 and titan.framework == "torchtitan"
    flavor = parse("torchrun train.py --model.name llama3 --model.flavor 70B --parallelism.tensor_parallel_degree=8")
    assert flavor.model.name == "llama3-70b" and flavor.layout.tp == 8
    maxtext = parse("python3 MaxText/train.py base.yml model_name=llama2-7b per_device_batch_size=4")
    assert maxtext.model.name == "llama2-7b" and maxtext.layout.micro == 4 and maxtext.framework == "maxtext"
    own = parse("drumbeat train llama --layout fsdp --set model=8b batch=64 length=4096")
    assert own.model.name == "llama3-8b" and own.layout.zero == 3 and own.batch == 64 and own.seq == 4096
    assert parse("python train.py --lr 1e-3") is None


def test_what_is_not_known_is_said():
    with pytest.raises(Problem, match="did you mean|known"):
        describe("lama3-8b")
    with pytest.raises(Problem, match="hidden-size"):
        parse("pretrain_gpt.py --num-layers 2 --hidden-size big --num-attention-heads 4")
    with pytest.raises(Problem, match="flavor"):
        parse("torchtitan --model.name llama3 --model.flavor 9B")
    with pytest.raises(Problem, match="not a degree"):
        parse_layout("tp=two")
