"""Model configs: every value where transformers finds it, and nothing that changes the arithmetic passed over."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from minillm.errors import ModelError
from minillm.model.config import FAMILY_DEFAULTS, ModelConfig, config_from_hf, load_config
from minillm.model.kinds import CONFIG_KINDS

BASE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def make(model_type: str = "llama", generation: dict | None = None, **keys) -> ModelConfig:
    return config_from_hf({"model_type": model_type, **BASE, **keys}, generation)


def oracle_windows(config) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("model_type", FAMILY_DEFAULTS)
@pytest.mark.parametrize("keys", [{}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}])
def test_absent_keys_mean_what_transformers_takes_them_for(model_type, keys):
    keys = {} if model_type == "llama" else keys
    small = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    small |= {"num_attention_heads": 32, "hidden_size": 128}
    ours = config_from_hf({"model_type": model_type, **small, **keys})
    theirs = AutoConfig.for_model(model_type, **small, **keys)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == (oracle_windows(theirs) if model_type != "llama" else (None,) * 3)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    if model_type in ("mixtral", "qwen3_moe"):
        wide = theirs.intermediate_size if model_type == "mixtral" else theirs.moe_intermediate_size
        assert ours.num_experts == theirs.num_local_experts
        assert ours.num_experts_per_token == theirs.num_experts_per_tok
        assert ours.moe_intermediate_size == wide
        assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)


@pytest.mark.parametrize(("keys", "theta"), [
    ({"rope_theta": 500_000}, 500_000.0), ({"rope_parameters": {"rope_theta": 500_000, "rope_type": "default"}}, 5e5),
    ({}, 10_000.0), ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7e4}, 7e4),
    ({"rope_scaling": None, "rope_theta": 9e4}, 9e4),
])
def test_m02_rope_theta_is_found_wherever_the_config_holds_it(keys, theta):
    assert make(**keys).rope.theta == theta


def test_m02_rope_scaling_keeps_every_parameter():
    yarn = make(rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.5,
                              "beta_fast": 16, "truncate": False}).rope
    assert (yarn.type, yarn.factor, yarn.original_max_position_embeddings) == ("yarn", 4.0, 64)
    assert (yarn.mscale, yarn.mscale_all_dim, yarn.attention_factor) == (1.0, 1.0, 1.5)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (16, 1.0, False)
    llama3 = make(rope_parameters={**LLAMA3, "rope_theta": 5e5}).rope
    assert (llama3.type, llama3.factor, llama3.low_freq_factor, llama3.high_freq_factor) == ("llama3", 8.0, 1.0, 4.0)
    assert make(rope_scaling={"type": "dynamic", "factor": 3.0}).rope.type == "dynamic"


def test_m02_a_yarn_factor_left_out_follows_from_the_two_lengths():
    rope = make(max_position_embeddings=256, rope_scaling={**YARN, "factor": None}).rope
    assert rope.factor == 4.0
    assert make(max_position_embeddings=99, rope_scaling={"type": "yarn", "factor": 2.0}
                ).rope.original_max_position_embeddings == 99


@pytest.mark.parametrize(("keys", "named"), [
    ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "foo"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": None}}, "high_freq_factor"),
    ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ({"hidden_act": "gelu"}, "gelu"), ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"sliding_window": 16}, "sliding_window"), ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"), ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"hidden_size": "32"}, "hidden_size"), ({"vocab_size": None}, "vocab_size"),
])
def test_m02_what_would_change_the_arithmetic_is_refused_by_name(keys, named):
    with pytest.raises(ModelError, match=named):
        make(**keys)


WRONG = ("x", -1.5, float("nan"), 10**400, True, [None], {"a": 1})


@pytest.mark.parametrize("key", CONFIG_KINDS)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(key):
    """Whatever the key: text, fractions, NaN, numbers beyond a float, booleans, lists with holes, objects."""
    family = "qwen3_moe" if "expert" in key else "mistral"
    wrong = [value for value in WRONG if not CONFIG_KINDS[key].fits(value)]
    assert len(wrong) >= 4
    for value in wrong:
        with pytest.raises(ModelError, match=key):
            make(family, **{key: value})


@pytest.mark.parametrize(("keys", "named"), [
    ({"eos_token_id": "x"}, "eos_token_id"), ({"generation": {"eos_token_id": [257, None]}}, "eos_token_id"),
    ({"rms_norm_eps": None}, "rms_norm_eps"), ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rope_theta": -1}, "rope_theta"), ({"rope_theta": None}, "rope_theta"), ({"model_type": ["llama"]}, "model_type"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"), ({"rope_scaling": {"rope_theta": "x"}}, "rope_theta"),
    ({"rope_scaling": {**YARN, "factor": "4"}}, "factor"), ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"hidden_size": 2, "num_attention_heads": 4}, "head_dim"),
])
def test_a_value_out_of_range_is_refused_by_its_key(keys, named):
    with pytest.raises(ModelError, match=named):
        make(**keys)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", None])
def test_an_unknown_model_type_is_refused_by_name(model_type):
    with pytest.raises(ModelError, match=str(model_type)):
        make(model_type)


@pytest.mark.parametrize(("config_eos", "generation", "expected"), [
    (5, None, (5,)), ([5, 6], None, (5, 6)), (5, {"eos_token_id": [7, 5]}, (5, 7)),
    (None, {"eos_token_id": 9}, (9,)), ([5], {"eos_token_id": None}, (5,)), (-1, {"eos_token_id": 300}, ()),
])
def test_every_eos_id_of_both_configs_stops(config_eos, generation, expected):
    assert make(eos_token_id=config_eos, generation=generation).eos_token_ids == expected


def test_a_family_eos_is_assumed_only_where_neither_file_names_one():
    assert make().eos_token_ids == (2,)
    assert make(generation={"eos_token_id": 8}).eos_token_ids == (8,)


def test_switches_of_the_families():
    assert make("qwen2").qkv_bias and not make("qwen2").o_bias
    assert make("llama", attention_bias=True, mlp_bias=True).o_bias
    assert make("qwen3").qk_norm and make("qwen3", attention_bias=True).qkv_bias
    moe = make("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[3], decoder_sparse_step=2, num_experts=8)
    assert moe.sparse_layers == (False, True, False, False, False)
    mixed = make("qwen3", use_sliding_window=True, sliding_window=8,
                 layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert mixed.sliding_window == (None, 8, None)
    with pytest.raises(ModelError, match="layer_types"):
        make("mistral", sliding_window=8, layer_types=["full_attention", "sliding_attention", "full_attention"])
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        make("mixtral", num_local_experts=2, num_experts_per_tok=3)


def test_a_folder_gives_its_config_or_says_what_is_wrong(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **BASE}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    config = load_config(tmp_path)
    assert config.eos_token_ids == (3, 4)
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            load_config(tmp_path)


def test_reading_a_config_does_not_import_torch():
    code = "import sys, minillm.model.config, minillm.model.gguf_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
