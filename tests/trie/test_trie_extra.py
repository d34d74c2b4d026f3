"""A list travels in plain values."""

import msgspec
import pytest

from gpuinfer.backends.vllm_engine.list_constraints import KEY, extra_args, listed_in
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed

LISTED = Listed(items=(("PAR", "A PAR H"), ("BRE", "F BRE - MAO")), begin="[", end="]", separator=", ", ends=False)


def test_a_list_comes_back_as_it_was_from_json_and_msgpack():
    assert listed_in(extra_args(LISTED)) == LISTED
    assert listed_in(msgspec.json.decode(msgspec.json.encode(extra_args(LISTED)))) == LISTED
    assert listed_in(msgspec.msgpack.decode(msgspec.msgpack.encode(extra_args(LISTED)))) == LISTED


def test_without_one_there_is_none():
    assert listed_in(None) is listed_in({}) is listed_in({"other": 1}) is None


@pytest.mark.parametrize("given", [3, {"items": "x"}, {"items": [["a", "b", "c"]]}, {}])
def test_anything_else_is_refused(given):
    with pytest.raises(BadPrompt, match="no list between tags"):
        listed_in({KEY: given})
