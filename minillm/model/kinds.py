"""What a value in a model's file must be: tables from key to :class:`Kind`. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minillm.errors import ModelError


@dataclass(frozen=True)
class Kind:
    """A kind of value: what it ``must_be``, in words, and whether a value ``fits``."""

    must_be: str
    fits: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """The same, or JSON's null (``None``), where that stands for "not given"."""
        return Kind(f"{self.must_be}, or null", lambda value: value is None or self.fits(value))

    def listed(self) -> Kind:
        """A list of any length, all of whose members fit."""
        return Kind(f"a list, each member {self.must_be}",
                    lambda value: isinstance(value, list) and all(map(self.fits, value)))


def _whole(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Any) -> bool:
    """A finite number: JSON as Python reads it also holds NaN, infinity, and whole numbers beyond any float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


COUNT = Kind("a whole number from 1 to 2147483647", lambda value: _whole(value, 1, 2**31 - 1))
LAYERS = Kind("a whole number from 1 to 10000", lambda value: _whole(value, 1, 10_000))  # each is work to list
INDEX = Kind("a whole number of at least 0", lambda value: _whole(value, 0, 2**31 - 1))
TOKEN_ID = Kind("a whole number", _whole)  # -1, or the largest there is, stands for "none" in some files
TOKEN_IDS = Kind("a whole number or a list of them",
                 lambda value: TOKEN_ID.fits(value) or TOKEN_ID.listed().fits(value))
POSITIVE = Kind("a number above 0", lambda value: _number(value) and value > 0)
NOT_NEGATIVE = Kind("a number of at least 0", lambda value: _number(value) and value >= 0)
ABOVE_ONE = Kind("a number above 1", lambda value: _number(value) and value > 1)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))

# config.json and generation_config.json. Null stands for "not given" where transformers' own files write it.
CONFIG_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings",
                     "sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok",
                     "moe_intermediate_size", "decoder_sparse_step"), COUNT.or_null()),
    "num_hidden_layers": LAYERS.or_null(),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"), SWITCH),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), OBJECT.or_null()),
    **dict.fromkeys(("dtype", "torch_dtype"), TEXT.or_null()),  # read by nobody here; another kind is a damaged file
    "rms_norm_eps": POSITIVE, "rope_theta": ABOVE_ONE, "max_window_layers": INDEX, "use_sliding_window": SWITCH,
    "layer_types": TEXT.listed().or_null(), "mlp_only_layers": INDEX.listed().or_null(),
    "bos_token_id": TOKEN_ID.or_null(), "eos_token_id": TOKEN_IDS.or_null(),
}
ROPE_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
                    POSITIVE.or_null()),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NOT_NEGATIVE.or_null()),
    "rope_theta": ABOVE_ONE, "original_max_position_embeddings": COUNT.or_null(), "truncate": SWITCH.or_null(),
}


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> None:
    """Check every value that is there; a key that is absent is no fault here.

    Raises:
        ModelError: naming ``where``, the key, its value, and what it must be.
    """
    for key, kind in kinds.items():
        if key in values and not kind.fits(values[key]):
            raise ModelError(f"{where} has {key} = {repr(values[key])[:80]}; it must be {kind.must_be}")
