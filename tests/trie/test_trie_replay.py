"""A trainer sees again what each token was drawn from."""

import random

import pytest
from listing import KINDS, ORDERS, allowed, codec_of, spelt
from msgspec import structs

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint
from gpuinfer.text.language import Language
from gpuinfer.text.language.list_walks import list_support


@pytest.mark.parametrize("kind", KINDS)
def test_the_support_is_what_was_allowed(kind):
    codec = codec_of(kind)
    language = Language(codec, codec.size + 3, (codec.size,))
    listed = structs.replace(ORDERS, ends=False, separator=", ")
    at, draws, tokens, seen = language.matcher(Constraint(listed=listed)), random.Random(5), [], []
    start = language.matcher(Constraint(listed=listed))
    said = [token for part in ("so ", listed.begin) for token in spelt(codec, part, codec.size, draws, beyond=False)]
    while len(tokens) < 80:
        choices = allowed(at, language.vocabulary)
        token = said[len(tokens)] if len(tokens) < len(said) else draws.choice(choices)
        seen.append(choices)
        at.advance(token)
        tokens.append(token)
    nodes = start.nodes(tokens)
    assert set(nodes[: len(said)]) == {-1}
    assert max(nodes) > 0
    found = list_support(listed, language.tries(), tokens, nodes)
    for (ids, only), choices in zip(found, seen, strict=True):
        assert choices == (
            ids.tolist() if only else [one for one in range(language.vocabulary) if one not in set(ids.tolist())]
        )


def test_another_list_is_noticed():
    language = Language(codec_of("bytes"), 300, (256,))
    text = "<orders>\nA PAR H\n</orders>"
    tokens = list(text.encode())
    nodes = language.matcher(Constraint(listed=ORDERS)).nodes(tokens)
    assert len(list_support(ORDERS, language.tries(), tokens, nodes)) == len(tokens)
    other = structs.replace(ORDERS, items=(("PAR", "A PAR S"),))
    with pytest.raises(BadPrompt, match="another list"):
        list_support(other, language.tries(), tokens, nodes)
    with pytest.raises(BadPrompt, match="not allowed by its list"):
        list_support(other, language.tries(), tokens)
