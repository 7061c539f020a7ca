"""Parameters by config.json, against the models that transformers builds from the same configs (on meta: no weights)."""

import pytest

from drumbeat.predict import shapes
from drumbeat.predict.models import FAMILIES, config_model

SMALL = {
    "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 704, "vocab_size": 1000,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
PLAIN = {key: value for key, value in SMALL.items() if key != "head_dim"}
GPT = {"n_embd": 256, "n_head": 8, "n_layer": 4, "vocab_size": 1000, "n_positions": 512}
LATENT = {
    "num_key_value_heads": 8, "kv_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 48,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
ENCODER = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 704}
CONFIGS = {
    "llama": SMALL,
    "llama bias": {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": SMALL,
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SMALL,
    "qwen2_moe": {**SMALL, "num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 320},
    "qwen3": SMALL,
    "qwen3_moe": {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "qwen3_moe sparse": {
        **SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 2,
    },
    "gemma": SMALL,
    "gemma2": SMALL,
    "gemma3_text": SMALL,
    "deepseek_v2": {**SMALL, **LATENT, "q_lora_rank": 64},
    "deepseek_v2 lite": {**SMALL, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {**SMALL, **LATENT, "q_lora_rank": 64},
    "gpt_oss": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "olmo3": PLAIN,
    "granite": SMALL,
    "smollm3": {**SMALL, "pad_token_id": 0},
    "cohere": PLAIN,
    "phi3": {**PLAIN, "pad_token_id": 0},
    "phi": {**PLAIN, "num_key_value_heads": 8},
    "starcoder2": PLAIN,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {"hidden_size": 256, "num_heads": 8, "num_layers": 4, "vocab_size": 1000, "attention_types": [[["global"], 4]]},
    "gptj": {**GPT, "rotary_dim": 16},
    "gpt_neox": {**ENCODER, "vocab_size": 1000},
    "opt": {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "ffn_dim": 704, "word_embed_proj_dim": 256},
    "bloom": {"hidden_size": 256, "n_head": 8, "n_layer": 4, "vocab_size": 1000},
    "falcon": {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000},
    "falcon new": {
        "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "vocab_size": 1000,
        "new_decoder_architecture": True, "num_kv_heads": 2,
    },
    "mpt": {"d_model": 256, "n_heads": 8, "n_layers": 4, "vocab_size": 1000},
    "bert": {**ENCODER, "vocab_size": 1000},
    "roberta": {**ENCODER, "vocab_size": 1000},
    "vit": {**ENCODER, "image_size": 64, "patch_size": 16},
}  # fmt: skip


def test_every_family_is_checked():
    assert {name.split()[0] for name in CONFIGS} >= set(FAMILIES) - {"ministral", "internlm2"}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name):
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))  # not by every worker that collects
    kind = name.split()[0]
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[name])
    maker = {
        "bert": "AutoModelForMaskedLM",
        "roberta": "AutoModelForMaskedLM",
        "vit": "AutoModelForImageClassification",
    }
    with torch.device("meta"):
        built = getattr(transformers, maker.get(kind, "AutoModelForCausalLM")).from_config(config)
    plain = {**config.to_dict(), "model_type": kind}
    model, _ = config_model(plain, name)
    assert round(shapes.parameters(model)) == built.num_parameters()
