"""Sampling parameters: every field checked, nothing ignored, unset fields filled."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.errors import ArtifactError, InputError
from ninfer_jax.sampling_params import ResolvedSampling, SamplingParams

NAN, INF = math.nan, math.inf
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, "1", True],
    "temperature": [-0.1, NAN, INF, "hot", True, 10**400],
    "top_p": [0, -0.5, 1.01, NAN, "1", False],
    "top_k": [-2, 1.5, "5", True],
    "min_p": [-0.1, 1.1, NAN, True],
    "seed": [2**63, -(2**63) - 1, 1.0, "1", True],
    "max_tokens": [0, -1, 1.5, True],
    "min_tokens": [-1, 0.0, True],
    "stop": ["", ["a", ""], [1], 3, b"x", {"a": 1}],
    "stop_token_ids": [[-1], [1.0], [True], ["1"], 3, "1"],
    "ignore_eos": [1, 0, "yes"],
    "presence_penalty": [2.1, -2.1, NAN, True, "1"],
    "frequency_penalty": [2.1, -2.1, INF, True],
    "repetition_penalty": [0, -1, NAN, INF, True],
    "logit_bias": [
        {1: 101},
        {1: NAN},
        {-1: 0},
        {"x": 0},
        {1.0: 0},
        {True: 0},
        [1],
        {1: "2"},
        {1: 0, "1": 0},
    ],
    "logprobs": [-1, 21, 1.0, True],
    "prompt_logprobs": [-1, 21, "5"],
    "include_stop_str_in_output": [1, "no"],
    "skip_special_tokens": [0, "no"],
    "structured_outputs": [{"json": {}}, {}, "x"],
    "thinking_budget": [-1, 1.0, True],
}
GOOD: dict[str, list[Any]] = {
    "n": [1, 4, np.int64(2)],
    "temperature": [0, 0.7, 100, np.float32(0.5)],
    "top_p": [1, 0.01, 1.0],
    "top_k": [-1, 0, 1, 10**9],
    "min_p": [0, 1, 0.5],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "max_tokens": [1, 10**6],
    "min_tokens": [0],
    "stop": ["x", ["x", "y"], ("x",), []],
    "stop_token_ids": [[], [3, 1, 3], {5}],
    "ignore_eos": [True, False],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0, 2],
    "repetition_penalty": [0.1, 1, 5],
    "logit_bias": [{}, {1: 100, 2: -100.0}, {"3": 1}],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "thinking_budget": [0, 10],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in BAD.items() for v in vs])
def test_bad_values_name_the_field(name: str, value: Any) -> None:
    for build in (
        lambda: SamplingParams(**{name: value}),
        lambda: SamplingParams.from_dict({name: value}),
    ):
        with pytest.raises(InputError, match=name):
            build()


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in GOOD.items() for v in vs])
def test_good_values(name: str, value: Any) -> None:
    resolved = SamplingParams(**{name: value}).resolve({}, vocab_size=10)
    assert isinstance(resolved, ResolvedSampling)
    hash(resolved)


def test_every_field_is_covered_here() -> None:
    fields = set(asdict(SamplingParams()))
    assert set(BAD) == fields
    assert set(GOOD) == fields - {"structured_outputs"}


def test_unknown_fields_name_the_nearest() -> None:
    for wrong, right in (
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("topk", "top_k"),
    ):
        with pytest.raises(InputError, match=f"{wrong}.*did you mean {right}"):
            SamplingParams(**{wrong: 1})  # type: ignore[arg-type]
        with pytest.raises(InputError, match=right):
            SamplingParams.from_dict({wrong: 1})
    with pytest.raises(InputError, match="known are n, temperature"):
        SamplingParams(zzzzzz=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="by name"):
        SamplingParams(1)  # type: ignore[misc]
    for bad in ([], None, {1: 2}):
        with pytest.raises(InputError):
            SamplingParams.from_dict(bad)  # type: ignore[arg-type]


def test_it_is_a_frozen_value() -> None:
    bias = {"5": 1}
    params = SamplingParams(stop="x", logit_bias=bias, top_k=-1, stop_token_ids=[3, 1, 3])
    bias["6"] = 2
    assert params.logit_bias == {5: 1.0}
    assert (params.stop, params.top_k, params.stop_token_ids) == (("x",), 0, (1, 3))
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert replace(params, n=2).n == 2
    with pytest.raises(InputError):
        replace(params, n=0)
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params
    assert SamplingParams.from_dict(asdict(params)) == params


def test_unset_fields_come_from_the_checkpoint_then_from_neutral_values() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3}
    filled = SamplingParams().resolve(config, vocab_size=10)
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p) == (0.6, 20, 0.95, 0.0)
    mine = SamplingParams(temperature=0, top_k=0, top_p=1).resolve(config, vocab_size=10)
    assert (mine.temperature, mine.top_k, mine.top_p, mine.greedy) == (0.0, 0, 1.0, True)
    neutral = SamplingParams().resolve({}, vocab_size=10)
    assert neutral == ResolvedSampling(
        n=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=None,
        max_tokens=None,
        min_tokens=0,
        stop=(),
        stop_token_ids=(),
        ignore_eos=False,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=(),
        logprobs=None,
        prompt_logprobs=None,
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        thinking_budget=None,
    )
    greedy = SamplingParams().resolve({"do_sample": False, "temperature": 0.6}, vocab_size=10)
    assert greedy.temperature == 0.0
    asked = SamplingParams(temperature=0.5).resolve({"do_sample": False}, vocab_size=10)
    assert asked.temperature == 0.5
    nulls = SamplingParams().resolve({"temperature": None, "top_k": None}, vocab_size=10)
    assert nulls == neutral


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 2}, {"max_new_tokens": 0}])
def test_a_checkpoints_bad_value_is_the_checkpoints_fault(bad: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=r"generation_config.json.*" + next(iter(bad))):
        SamplingParams().resolve(bad, vocab_size=10)


def test_what_needs_the_model() -> None:
    for fields in ({"logit_bias": {10: 1}}, {"stop_token_ids": [10]}):
        with pytest.raises(InputError, match="0 to 9"):
            SamplingParams(**fields).resolve({}, vocab_size=10)  # type: ignore[arg-type]
    resolve = {"vocab_size": 10, "max_context": 100}
    fits = SamplingParams(max_tokens=40).resolve({}, prompt_tokens=60, **resolve)
    assert fits.max_tokens == 40
    with pytest.raises(InputError, match=r"max_tokens 41.*60.*100"):
        SamplingParams(max_tokens=41).resolve({}, prompt_tokens=60, **resolve)
    with pytest.raises(InputError, match="no room"):
        SamplingParams().resolve({}, prompt_tokens=100, **resolve)
    assert SamplingParams().resolve({}, prompt_tokens=60, **resolve).max_tokens is None
    # The checkpoint's default was not asked for, so it gives way.
    cut = SamplingParams().resolve({"max_new_tokens": 90}, prompt_tokens=60, **resolve)
    assert cut.max_tokens == 40
    with pytest.raises(InputError, match="min_tokens"):
        SamplingParams(min_tokens=41).resolve({}, prompt_tokens=60, **resolve)
    with pytest.raises(InputError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)


@given(st.dictionaries(st.one_of(st.sampled_from(list(BAD)), st.text(max_size=8)), ANY, max_size=4))
def test_anything_is_accepted_or_refused_with_a_reason(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_dict(fields)
    except InputError:
        return  # any other exception fails the test
    given_fields = {name for name, value in fields.items() if value is not None}
    assert given_fields == {k for k, v in asdict(params).items() if v is not None}
