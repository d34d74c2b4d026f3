"""How masks are to be filled in: said by flags, by a row over them, and to a model that has none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import ModelSpec
from gpuinfer.config.options import GivenValue, GivenValues, check
from gpuinfer.errors import UsageError
from gpuinfer.generation import Sampling, Unmasking
from gpuinfer.serving.openai.model_options import check_with_model
from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.requests import PromptDefaults
from gpuinfer.serving.openai.sampling_fields import UnmaskingOptions, override_unmasking, unmasking_of


def flags(**words: str | list[str]) -> UnmaskingOptions:
    """As a command line gives them."""
    given = {name: GivenValues(one) if isinstance(one, list) else one for name, one in words.items()}
    return UnmaskingOptions(
        **check(UnmaskingOptions, {name: GivenValue(one, f"--{name}") for name, one in given.items()}, "generate")
    )


def read(row: dict, run: Unmasking | None = None):
    reader = PromptRowReader(PromptDefaults(Sampling(unmasking=run)))
    return reader.read((1, json.dumps({"prompt": "a", **row}).encode()))


def test_flags_say_what_rows_say():
    words = {"decoder": "hierarchical", "threshold": "0.9", "steps": "1k", "block_length": "32", "cfg_scale": "1.5"}
    options = ["low=0.4", "near-ties=true", "mode=best", "none="]
    row = {"decoder": "hierarchical", "threshold": 0.9, "steps": 1000, "block_length": 32, "cfg_scale": 1.5}
    row |= {"cache": "dual", "decoder_options": {"low": 0.4, "near_ties": True, "mode": "best", "none": ""}}
    by_flags = unmasking_of(flags(**words, cache="dual", decoder_options=options))
    assert by_flags == read(row).prompt.sampling.unmasking


DECODER = Unmasking(decoder="a", threshold=0.9, steps=8, options={"x": 1})


@pytest.mark.parametrize(
    ("run", "row", "found"),
    [
        (Unmasking(steps=8), {"threshold": 0.5}, Unmasking(steps=8, threshold=0.5)),
        (Unmasking(cfg_scale=1.5), {"cfg_scale": 0}, Unmasking()),
        (Unmasking(steps=8), {"steps": None}, Unmasking(steps=8)),
        (DECODER, {"decoder": "b"}, Unmasking(decoder="b", steps=8)),  # which has no use for the options of the first
        (
            DECODER,
            {"decoder": "a", "decoder_options": {"y": 2}},
            Unmasking(decoder="a", threshold=0.9, steps=8, options={"x": 1, "y": 2}),
        ),
    ],
)
def test_a_row_goes_over_the_run(run, row, found):
    assert read(row, run).prompt.sampling.unmasking == found


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "decoder": st.sampled_from(["a", "b"]),
        "threshold": st.floats(0, 1),
        "steps": st.integers(1, 9),
        "block_length": st.integers(1, 9),
        "cfg_scale": st.floats(0, 100),
        "cache": st.sampled_from(["none", "dual"]),
        "options": st.dictionaries(st.sampled_from("xy"), st.integers()),
    },
)


@given(FIELDS, FIELDS)
def test_what_a_row_says_holds_whatever_the_run_says(run, row):
    found = override_unmasking(override_unmasking(None, run), row)
    for name, value in row.items():
        assert value == getattr(found, name) or name == "options"
    assert set(row.get("options", {}).items()) <= set(found.options.items())


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"threshold": 1.5}, "<= 1.0"),
        ({"steps": 0}, ">= 1"),
        ({"cache": "dul"}, "'dul' - at `$.cache`. Choose from none, prefix, dual, vicinity, exact."),
        ({"decoder_options": {"x": [1]}}, "array"),
        ({"decoder_options": {str(number): 1 for number in range(33)}}, "length <= 32"),
        ({"treshold": 0.5}, "Did you mean `threshold`?"),
    ],
)
def test_a_wrong_field_is_refused_as_the_row_is_read(row, why):
    assert why in str(read(row).error)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"threshold": "1.4"}, "--threshold: '1.4' is more than 1."),
        ({"threshold": "nan"}, "--threshold: 'nan' is not a number. Give 1 or less."),
        ({"steps": "0"}, "--steps: '0' is less than 1."),
        ({"cache": "dul"}, "Did you mean 'dual'?"),
        ({"decoder_options": ["low"]}, "Write -D low=VALUE."),
    ],
)
def test_a_wrong_flag_is_refused_with_its_cure(words, why):
    with pytest.raises(UsageError) as error:
        flags(**words)
    assert why in str(error.value)


@pytest.mark.parametrize("unmasking", [Unmasking(), Unmasking(threshold=0.9), Unmasking(options={"x": 1})])
def test_a_model_that_goes_from_left_to_right_has_no_masks(unmasking):
    with pytest.raises(UsageError, match=r"this is a qwen2 model, which goes from left to right\. Leave it out"):
        check_with_model(ModelSpec("tiny", kind="text"), Sampling(unmasking=unmasking))
