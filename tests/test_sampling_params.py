"""SamplingParams refuses what can't be meant, by name, and stores plain Python values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minillm import InvalidRequest, SamplingParams

NUMBERS = ["n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
           "frequency_penalty", "seed", "max_tokens", "min_tokens", "logprobs"]
WHOLE = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"]


def refused(**options: object) -> None:
    """The one option is refused, with an error that names it in words and as ``param``."""
    (name,) = options
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**options)
    assert caught.value.param == name


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["5", "", b"5", True, False, math.nan, math.inf, -math.inf, [1], {}, 1j,
                                   np.nan, np.float32("inf"), np.bool_(True), np.array([1.0, 2.0])],
                         ids=repr)
def test_what_is_no_finite_number_is_refused_by_name(name, value):
    """P05 for max_tokens "5"; the same for every number."""
    refused(**{name: value})


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in ("seed", "max_tokens", "logprobs")])
def test_none_is_refused_where_it_has_no_meaning(name):
    refused(**{name: None})


@pytest.mark.parametrize("name", WHOLE)
def test_a_fraction_is_refused_where_a_whole_number_is_meant(name):
    refused(**{name: 1.5})
    refused(**{name: 1.0})


@pytest.mark.parametrize("name, bad, good", [
    ("n", [0, -1], [1, 8]),
    ("temperature", [-1e-300, -1, 10**400], [0, 0.0, -0.0, 5e-324, 1e-38, 1e-4, 1, 100]),
    ("top_k", [-2, -100], [-1, 0, 1, 5, 10**30]),
    ("top_p", [0, -0.1, 1.0000001, 2], [5e-324, 0.5, 1, 1.0]),
    ("min_p", [-1e-9, 1.0001], [0, 0.5, 1]),
    ("repetition_penalty", [0, -1, 0.0], [0.5, 1, 1e30]),
    ("presence_penalty", [-2.1, 2.1], [-2, 0, 2]),
    ("frequency_penalty", [-2.1, 2.1], [-2, 0, 2]),
    ("max_tokens", [0, -1], [None, 1, 10**9]),
    ("min_tokens", [-1], [0, 7]),
    ("logprobs", [-1, 101], [None, 0, 20, 100]),
    ("seed", [], [None, 0, -1, 2**64, -(10**400), 10**400]),
])
def test_ranges(name, bad, good):
    """S04 for top_k -2; P05 for max_tokens 0 and -1; top_p in (0, 1]; min_p in [0, 1]."""
    for value in bad:
        refused(**{name: value})
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_numpy_scalars_become_python_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4), seed=np.uint64(2**63),
                            top_p=np.float64(0.9), stop_token_ids=[np.int32(3)],
                            logit_bias={np.int64(2): np.float32(1.5)})
    for value, kind in [(params.temperature, float), (params.top_k, int), (params.seed, int), (params.top_p, float),
                        (params.stop_token_ids[0], int), (*params.logit_bias, int), (params.logit_bias[2], float)]:
        assert type(value) is kind
    assert (params.temperature, params.seed, params.logit_bias) == (0.5, 2**63, {2: 1.5})


def test_whole_numbers_do_for_fractions_and_are_stored_as_floats():
    assert type(SamplingParams(temperature=1).temperature) is float


@pytest.mark.parametrize("value", [1, 0, "true", None, np.bool_(True)])
@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens"])
def test_switches_take_booleans_alone(name, value):
    refused(**{name: value})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="min_tokens 3 is above max_tokens 2"):
        SamplingParams(min_tokens=3, max_tokens=2)
    SamplingParams(min_tokens=2, max_tokens=2)


@pytest.mark.parametrize("stop", ["", ["", "x"], ["x", ""], b"x", [b"x"], bytearray(b"x"), 5, [5], [None], {"x": 1},
                                  {"x"}, [["x"]], "\ud800", ["a\udfffb"]], ids=ascii)
def test_bad_stop_strings_are_refused(stop):
    """P02: an empty stop string is an error; so is what is no string, or can be in no text."""
    refused(stop=stop)


@pytest.mark.parametrize("stop, stored", [
    (None, ()), ([], ()), ((), ()), ("x", ("x",)), ("ab", ("ab",)), (["b", "a", "b"], ("b", "a")), ("\x00", ("\x00",)),
])
def test_stop_strings_are_stored_once_in_order(stop, stored):
    """P02: null and an empty list mean none."""
    assert SamplingParams(stop=stop).stop == stored


@pytest.mark.parametrize("ids", [
    5, "12", b"12", [-1], ["1"], [1.0], [True], [1, True], [None], [[1]], {1}, {1: 2},
], ids=repr)
def test_bad_stop_token_ids_are_refused(ids):
    refused(stop_token_ids=ids)


def test_stop_token_ids_are_stored_once_in_order():
    assert SamplingParams(stop_token_ids=[7, 3, 7]).stop_token_ids == (7, 3)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


@pytest.mark.parametrize("bias", [
    {"7": 1.0}, {-1: 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}, {7: "1"}, {7: None}, {7: math.nan}, {7: -math.inf},
    {7: 101}, {7: -100.5}, {7: True}, [(7, 1.0)], "7", 7, [],
], ids=repr)
def test_bad_logit_bias_is_refused(bias):
    refused(logit_bias=bias)


def test_logit_bias_is_stored_as_a_copy():
    bias = {7: 100, 3: -100.0}
    params = SamplingParams(logit_bias=bias)
    bias[9] = 1
    assert params.logit_bias == {7: 100.0, 3: -100.0}
    assert SamplingParams().logit_bias == {}


def test_the_defaults_draw_from_the_whole_distribution():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.greedy) == (1.0, 0, 1.0, 0.0, False)
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=5e-324).greedy


def test_params_are_frozen_and_compare_by_value():
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"])
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0
