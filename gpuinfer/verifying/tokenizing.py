"""The tokens of texts and chats, ours against those of AutoTokenizer, and which side a difference is on.

The judge is tokenizer.json, read by the library that it is written for and by nobody else: a side that departs from it
is the one that differs. Where both depart, nobody can tell, and it counts as a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Prompt
from gpuinfer.verifying.judging import Difference, Divergence
from gpuinfer.verifying.peer import Peer
from gpuinfer.verifying.rig import TEXTS, Rig, shown

PROBES = (" The sea", "  two spaces, and a line\n", "▁marked", "x  y")
MOST_SPECIAL = 4  # special tokens that texts are made of
CHATS: tuple[tuple[Mapping[str, Any], ...], ...] = (
    ({"role": "user", "content": "Why is the sea green?"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello, \n\nworld "}),
    (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ),
)


class TokenCase(NamedTuple):
    """A prompt, and what each says of it: tokens, or why there are none."""

    prompt: Prompt
    ours: Sequence[int] | str
    theirs: Sequence[int] | str
    file: Sequence[int] | None  # by tokenizer.json alone


def missing(rig: Rig) -> str | None:
    """Why there are no tokens to compare; None when there are."""
    return None if rig.checkpoint.language.folder is not None else "the model has no tokenizer: its tokens are bytes"


def compared(rig: Rig, name: str, peer: Peer) -> Difference:
    """All texts and chats through both."""
    finding = Difference(name, unit="texts")
    cases, kind = _cases(rig, peer)
    finding.compared = len(cases)
    found = (_divergence(number, case, kind, rig) for number, case in enumerate(cases) if case.ours != case.theirs)
    finding.divergences += {(one.prompt, one.tokens): one for one in found}.values()
    faults = [one for one in finding.divergences if not one.theirs]
    if faults:
        finding.status, finding.why = "fails", faults[0].why
    elif finding.divergences:
        finding.status, finding.why = "differs", finding.divergences[0].why
    return finding


def _cases(rig: Rig, peer: Peer) -> tuple[list[TokenCase], str]:
    file = _file(rig)
    texts, chats = _texts(rig, file), _chats(rig)
    told = peer.tokens(
        [(prompt.text or "", prompt.special_tokens) for prompt in texts], [prompt.messages for prompt in chats]
    )
    prompts, answers = [*texts, *chats], [*told["texts"], *told["chats"]]
    ours = rig.language.encode(prompts)
    return [
        TokenCase(prompt, _ours(tokens), answer.get("ids", "refused"), _by(file, prompt, answer))
        for prompt, tokens, answer in zip(prompts, ours, answers, strict=True)
    ], f"{told['tokenizer']} of transformers {told['version']}"


def _ours(tokens: Any) -> Sequence[int] | str:
    return "refused" if isinstance(tokens, BadPrompt) else list(map(int, tokens))


def _texts(rig: Rig, file: Any) -> list[Prompt]:
    """The prompts that are asked, those that are built in, and some with spaces and special tokens in odd places."""
    own = [item.asked for item in rig.items if item.asked is not None and item.asked.text]
    special = [] if file is None else [one.content for one in file.get_added_tokens_decoder().values() if one.special]
    odd = [text for one in special[:MOST_SPECIAL] for text in (f"{one}The sea", f"The sea {one} was{one}{one} green")]
    others = [Prompt(text=text, special_tokens=added) for text in (*TEXTS, *PROBES, *odd) for added in (True, False)]
    return list({(prompt.text, prompt.special_tokens): prompt for prompt in (*own, *others)}.values())


def _chats(rig: Rig) -> list[Prompt]:
    if not rig.language.has_chat_template:
        return []
    own = [item.asked.messages for item in rig.items if item.asked is not None and item.asked.messages]
    return [Prompt(messages=chat) for chat in (*own, *CHATS)]  # with nothing but the chat: any template takes that


def _file(rig: Rig) -> Any:
    """tokenizer.json as `tokenizers` reads it; None where there is none."""
    from tokenizers import Tokenizer

    path = rig.checkpoint.language.folder
    if path is None or not (path / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _by(file: Any, prompt: Prompt, answer: Mapping[str, Any]) -> Sequence[int] | None:
    if file is None or "text" not in answer:
        return None
    ids = file.encode(answer["text"], add_special_tokens=prompt.messages is None and prompt.special_tokens).ids
    return list(ids)


def _divergence(number: int, case: TokenCase, kind: str, rig: Rig) -> Divergence:
    place, tokens = next(_differing(case.ours, case.theirs))
    ours, theirs = (_named(rig, side, token) for side, token in zip((case.ours, case.theirs), tokens, strict=True))
    on_their_side = case.file is not None and case.ours == case.file
    judge = (
        f"tokenizer.json says what gpuinfer says: the difference is on the side of transformers ({kind})"
        if on_their_side
        else f"tokenizer.json says what transformers ({kind}) says: the difference is on the side of gpuinfer"
        if case.file is not None and case.theirs == case.file
        else f"neither is what tokenizer.json says, or there is none ({kind}): which is right cannot be told"
    )
    text = case.prompt.text if case.prompt.messages is None else str(case.prompt.messages[-1].get("content", ""))
    why = f"gpuinfer has {ours}, transformers has {theirs}. {judge}"
    return Divergence(shown(text or ""), number, 0, place, tokens, {}, False, why, theirs=on_their_side)


def _differing(ours: Sequence[int] | str, theirs: Sequence[int] | str) -> Iterator[tuple[int, tuple[int, int]]]:
    """The first place where they differ; token -1: none there."""
    one, other = ([] if isinstance(side, str) else list(side) for side in (ours, theirs))
    for place in range(max(len(one), len(other)) + 1):
        pair = ((*one[place:], -1)[0], (*other[place:], -1)[0])
        if pair[0] != pair[1] or place == max(len(one), len(other)):
            yield place, pair


def _named(rig: Rig, side: Sequence[int] | str, token: int) -> str:
    if isinstance(side, str):
        return "no tokens, it refuses this"
    return "no further token" if token < 0 else f"token {token} {rig.language.decode([token])!r}"
