"""transformers as a second opinion, in a process of its own: its logits, and the tokens of texts and chats by
AutoTokenizer. The judge of tokens is tokenizer.json, read by the library that it is written for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuinfer.errors import BadPrompt, WorkError
from gpuinfer.generation import Prompt
from gpuinfer.host.child import Channel, Child, ChildLost, Conversation
from gpuinfer.lab.verify import transformers_child
from gpuinfer.lab.verify.divergence import AnswerDivergence, Difference
from gpuinfer.lab.verify.logits_checks import Pieces, Tokens, rows_in_a_piece
from gpuinfer.lab.verify.verify_setup import TEXTS, VerifySetup, clipped

LOAD_S, ANSWER_S, LEAVE_S = 900.0, 600.0, 3.0
OWN = ("nanogpt", "null")  # families that transformers has not
CURE = "Use --no-transformers to go without it, or --limit 4."


class TransformersFailed(WorkError):
    """transformers did not do what was asked: that says nothing about us."""


class TransformersPeer:
    """A model and its tokenizer in transformers, in a child process (`TransformersAnswerer` says what it can be asked).

    Everything raises `TransformersFailed` when transformers fails, ends, or takes too long.
    """

    def __init__(self, conversation: Conversation, piece: int) -> None:
        self._conversation, self._piece = conversation, piece

    def ask(self, seconds: float, **request: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._conversation.ask(request, seconds)
        except ChildLost as lost:
            raise TransformersFailed(f"{lost} {CURE}") from lost
        if "error" in answer:
            raise TransformersFailed(f"transformers failed: {answer['error'].rstrip('.')}. {CURE}")
        return answer

    def open(self, dtype: str) -> None:
        """Load the model in a number format."""
        self.ask(LOAD_S, do="open", dtype=dtype)

    def logits(self, dtype: str, tokens: Tokens) -> Pieces:
        """Float32 [positions, vocabulary], in pieces."""
        width = int(self.ask(ANSWER_S, do="logits", dtype=dtype, tokens=tokens.tolist())["vocabulary"])
        for _ in range(0, len(tokens), self._piece):
            try:
                rows = self._conversation.receive(ANSWER_S)
            except ChildLost as lost:
                raise TransformersFailed(f"{lost} {CURE}") from lost
            yield np.frombuffer(rows, np.float32).reshape(-1, width)


def missing_transformers(opened: VerifySetup) -> str | None:
    """Why there is nothing to compare with; None when there is."""
    if not opened.options.transformers:
        return "--no-transformers"
    if find_spec("transformers") is None:
        return "transformers is not installed"
    if opened.checkpoint.shape.family in OWN:
        return f"transformers has no {opened.checkpoint.shape.family} models"
    return None


@contextmanager
def open_transformers(opened: VerifySetup) -> Iterator[TransformersPeer]:
    """A child process that has transformers, ended afterwards."""
    from gpuinfer.text.checkpoint.built_in import save_folder

    with tempfile.TemporaryDirectory(prefix="gpuinfer-verify-") as drafts:
        folder = opened.checkpoint.folder
        if folder is None:  # a model that is no folder, as one
            save_folder(opened.checkpoint, folder := Path(drafts) / "model")
        piece = rows_in_a_piece(opened.checkpoint.shape.vocabulary)
        file = opened.checkpoint.language.gguf
        gguf = str(file.path.resolve()) if file is not None else None
        arguments = (str(folder), gguf, opened.facts["device"], opened.threads, piece)
        child = Child(transformers_child.run_child, *arguments, name="gpuinfer-transformers", daemon=True)
        conversation = Conversation("the process with transformers", child, Channel(child.end))
        try:
            yield TransformersPeer(conversation, piece)
        finally:
            conversation.close(LEAVE_S)


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


def compare_tokens(opened: VerifySetup, name: str, peer: TransformersPeer) -> Difference:
    """All texts and chats through both: the prompts that are asked, those that are built in, and some with spaces and
    special tokens in odd places.
    """
    file = _tokenizer_file(opened)
    own = [item.asked for item in opened.items if item.asked is not None]
    special = [] if file is None else [one.content for one in file.get_added_tokens_decoder().values() if one.special]
    odd = [text for one in special[:MOST_SPECIAL] for text in (f"{one}The sea", f"The sea {one} was{one}{one} green")]
    others = [Prompt(text=text, special_tokens=added) for text in (*TEXTS, *PROBES, *odd) for added in (True, False)]
    each = [*(prompt for prompt in own if prompt.text), *others]
    texts = list({(prompt.text, prompt.special_tokens): prompt for prompt in each}.values())
    chats = []
    if opened.language.has_chat_template:  # with nothing but the chat: any template takes that
        chats = [Prompt(messages=chat) for chat in (*(one.messages for one in own if one.messages), *CHATS)]
    reply = peer.ask(
        LOAD_S,
        do="tokens",
        texts=[(prompt.text or "", prompt.special_tokens) for prompt in texts],
        chats=[prompt.messages for prompt in chats],
    )
    prompts, kind = [*texts, *chats], f"{reply['tokenizer']} of transformers {reply['version']}"
    answers = zip(prompts, opened.language.encode(prompts), [*reply["texts"], *reply["chats"]], strict=True)
    found = []
    for number, (prompt, tokens, answer) in enumerate(answers):
        judged = None
        if file is not None and "text" in answer:
            added = prompt.messages is None and prompt.special_tokens
            judged = list(file.encode(answer["text"], add_special_tokens=added).ids)
        ours = "refused" if isinstance(tokens, BadPrompt) else list(map(int, tokens))
        case = TokenCase(prompt, ours, answer.get("ids", "refused"), judged)
        if case.ours != case.theirs:
            found.append(_divergence(number, case, kind, opened))
    finding = Difference(name, unit="texts", compared=len(prompts))
    finding.divergences += {(one.prompt, one.tokens): one for one in found}.values()
    faults = [one for one in finding.divergences if not one.theirs]
    if finding.divergences:
        finding.status, finding.why = "fails" if faults else "differs", (faults or finding.divergences)[0].why
        if opened.checkpoint.language.gguf is not None:  # transformers leaves out how a file's words are cut
            finding.status = "told"
    return finding


def _tokenizer_file(opened: VerifySetup) -> Any:
    """tokenizer.json as `tokenizers` reads it; None where there is none."""
    from tokenizers import Tokenizer

    path = opened.checkpoint.language.folder
    if path is None or not (path / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _divergence(number: int, case: TokenCase, kind: str, opened: VerifySetup) -> AnswerDivergence:
    """At the first place where the tokens differ; token -1: none there."""
    mine, other = ([] if isinstance(side, str) else list(side) for side in (case.ours, case.theirs))
    pairs = list(zip_longest(mine, other, fillvalue=-1))
    place = next((place for place, (one, two) in enumerate(pairs) if one != two), len(pairs))
    tokens = pairs[place] if place < len(pairs) else (-1, -1)

    def named(side: Sequence[int] | str, token: int) -> str:
        if isinstance(side, str):
            return "no tokens, it refuses this"
        return "no further token" if token < 0 else f"token {token} {opened.language.decode([token])!r}"

    on_their_side = case.file is not None and case.ours == case.file
    judge = (
        f"tokenizer.json says what gpuinfer says: the difference is on the side of transformers ({kind})"
        if on_their_side
        else f"tokenizer.json says what transformers ({kind}) says: the difference is on the side of gpuinfer"
        if case.file is not None and case.theirs == case.file
        else f"neither is what tokenizer.json says, or there is none ({kind}): which is right cannot be told"
    )
    text = case.prompt.text if case.prompt.messages is None else str(case.prompt.messages[-1].get("content", ""))
    why = f"gpuinfer has {named(case.ours, tokens[0])}, transformers has {named(case.theirs, tokens[1])}. {judge}"
    return AnswerDivergence(clipped(text or ""), number, 0, place, tokens, {}, False, why, theirs=on_their_side)
