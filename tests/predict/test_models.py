"""Models as people have them: config.json of many kinds, and the arguments of frameworks."""

import json

import pytest

from drumbeat.base.problem import Problem
from drumbeat.predict import shapes
from drumbeat.predict.arguments import from_command, parse_layout
from drumbeat.predict.models import config_model, describe


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
        ({"hidden_size": -4096}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_attention_heads": 0}, "heads"),
        ({"num_attention_heads": 31}, "do not divide"),
        ({"num_key_value_heads": 7}, "do not divide"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_hidden_layers": 1.5}, "layers"),
        ({"vocab_size": None}, "missing"),
        ({"vocab_size": 10**12}, "10,000,000|vocab_size"),
        ({"intermediate_size": None}, "missing"),
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
    with pytest.raises(Problem, match="llama3-9B"):
        parse("torchtitan --model.name llama3 --model.flavor 9B")
    with pytest.raises(Problem, match="not a degree"):
        parse_layout("tp=two")


# Parameters in billions as their authors publish them (model cards, papers).
PUBLISHED = {
    "llama2-7b": 6.74, "llama2-13b": 13.02, "llama2-70b": 68.98, "llama3-8b": 8.03, "llama3.1-70b": 70.55, "llama3-405b": 405.8,
    "llama4-17b-16e": 107.8, "llama4-17b-128e": 400.7, "mistral-7b": 7.24, "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6,
    "gemma-2b": 2.51, "gemma-7b": 8.54, "gemma2-2b": 2.61, "gemma2-9b": 9.24, "gemma2-27b": 27.2, "gemma3-4b": 3.88,
    "gemma3-12b": 11.77, "gemma3-27b": 27.0, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
    "qwen3-14b": 14.77, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.1, "qwen3-480b-a35b": 480.2,
    "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62, "qwen2.5-72b": 72.7, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "deepseek2-16b": 15.7, "deepseek2-236b": 235.7, "deepseek3-671b": 671.0, "kimi-k2-1t": 1026.4, "gpt3-175b": 174.6,
    "gpt2": 0.124, "gpt-neox-20b": 20.55, "bloom-176b": 176.2, "bert-base": 0.110, "bert-large": 0.336, "vit-b16": 0.0866,
    "vit-l16": 0.304, "opt-175b": 174.6, "mt-nlg-530b": 530.0, "phi-2": 2.78, "phi-3-mini": 3.82, "llama-65b": 65.3,
    "nemotron4-340b": 341.0, "resnet-50": 0.02556, "wide-resnet-50-2": 0.06888, "resnet-152": 0.0602,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_their_published_size(name):
    model = describe(name).model
    size = model.parameters if isinstance(model, shapes.ConvNet) else shapes.parameters(model)
    assert size / 1e9 == pytest.approx(PUBLISHED[name], rel=0.006 if "bert" not in name else 0.01)


def test_megatron_mixture_of_experts_with_latent_attention():
    found = parse(
        "pretrain_gpt.py --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) --vocab-size 129280 "
        "--untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope --fp8-format hybrid "
        "--expert-model-parallel-size 64 --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 2 --bf16"
    )
    assert shapes.parameters(found.model) / 1e9 == pytest.approx(671.0, rel=1e-3)
    assert (found.layout.ep, found.layout.pp, found.layout.vp, found.precision) == (64, 16, 2, "fp8")


def test_a_torchtitan_file_is_read_and_arguments_override_it(tmp_path):
    file = tmp_path / "my_run.toml"
    file.write_text(
        '[model]\nname = "llama3"  # a comment\nflavor = "70B"\nconverters = ["float8"]\n[training]\nlocal_batch_size = 16\n'
        "seq_len = 4096\nsteps = 1_000\n[parallelism]\ntensor_parallel_degree = 8\npipeline_parallel_degree = 4\n"
        'pipeline_parallel_schedule = "InterleavedZeroBubble"\n[activation_checkpoint]\nmode = "full"\n'
    )
    found = parse(f"torchrun -m torchtitan.train --job.config_file {file} --parallelism.tensor_parallel_degree 2")
    assert found.model.name == "llama3-70b" and (found.layout.tp, found.layout.pp, found.layout.vp) == (2, 4, 2)
    assert (
        found.per_replica == 16
        and found.layout.micro == 1
        and found.layout.bubble < 0.5
        and found.layout.recompute == 2
    )
    assert found.precision == "fp8" and found.steps == 1000
    file.write_text("[model\n???")
    with pytest.raises(Problem, match="line 1"):
        parse(f"torchrun -m torchtitan.train --job.config_file {file}")


def test_maxtext_sizes_and_fractions_of_a_batch():
    found = parse(
        "python3 -m MaxText.train base.yml model_name=llama3-70b per_device_batch_size=0.5 ici_tensor_parallelism=4"
    )
    assert found.layout.tp == 4 and found.layout.micro == 2 and found.per_replica == 2
    own = parse(
        "python3 -m MaxText.train base.yml base_emb_dim=4096 base_num_query_heads=32 base_num_kv_heads=8 base_mlp_dim=14336 "
        "base_num_decoder_layers=32 head_dim=128 vocab_size=128256 per_device_batch_size=1"
    )
    assert shapes.parameters(own.model) / 1e9 == pytest.approx(8.03, rel=1e-3)
    with pytest.raises(Problem, match="per_device_batch_size"):
        parse("python3 -m MaxText.train base.yml model_name=llama3-70b per_device_batch_size=0.3")
