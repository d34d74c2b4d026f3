"""A list without a tag before it begins with the answer."""

import random

import pytest
from listing import ORDERS, allowed, codec_of, drawn, is_legal
from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint
from gpuinfer.text.language import Language

UNTAGGED = structs.replace(ORDERS, begin="")


def matcher(kind: str, listed=UNTAGGED):
    codec = codec_of(kind)
    language = Language(codec, codec.size + 1, (codec.size,))
    return language, language.matcher(Constraint(listed=listed))


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "metaspace", "bytes"])
def test_every_answer_is_a_list_and_nothing_else(kind):
    found = set()
    listed = structs.replace(UNTAGGED, separator=",") if kind == "metaspace" else UNTAGGED  # it has no new line
    for seed in range(60):
        language, at = matcher(kind, listed)
        tokens = drawn(at, language.vocabulary, random.Random(seed))
        text = language.decode(tokens)
        assert at.complete
        assert is_legal(f"<orders>{text}", structs.replace(listed, begin="<orders>")), text
        found.add(text)
    assert len(found) > 20


def test_what_may_come_first_is_the_separator():
    language, at = matcher("bytes")
    assert allowed(at, language.vocabulary) == [ord("\n")]


def test_its_nodes_can_be_told_again():
    language, at = matcher("byte level")
    tokens = drawn(at, language.vocabulary, random.Random(3))
    nodes = at.nodes(tokens)
    assert nodes[0] == 0
    assert min(nodes) >= 0


@pytest.mark.parametrize("changes", [{"ends": False}, {"separator": " "}])
def test_one_that_could_be_misread_is_refused(changes):
    with pytest.raises(BadPrompt, match="without `begin`"):
        matcher("bytes", structs.replace(UNTAGGED, **changes))
