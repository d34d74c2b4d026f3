"""transformers as a second opinion, in a process of its own: its logits, and the tokens of texts and chats by
AutoTokenizer. The judge of tokens is tokenizer.json, read by the library that it is written for.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuinfer.errors import BadPrompt, WorkError
from gpuinfer.generation import Prompt
from gpuinfer.host import children
from gpuinfer.lab.verify import transformers_child
from gpuinfer.lab.verify.divergence import AnswerDivergence, Difference
from gpuinfer.lab.verify.logits_checks import Pieces, Tokens, rows_in_a_piece
from gpuinfer.lab.verify.verify_setup import TEXTS, VerifySetup, clipped

LOAD_S, ANSWER_S, LEAVE_S = 900.0, 600.0, 3.0


OWN = ("nanogpt", "null")  # families that transformers has not


class TransformersFailed(WorkError):
    """transformers did not do what was asked: that says nothing about us."""


class TransformersPeer:
    """A model and its tokenizer in transformers. Everything here raises `PeerFailed` when transformers fails, ends, or
    takes too long.
    """

    def __init__(self, channel: Connection, process: Any, size: int) -> None:
        self._channel, self._process, self._size = channel, process, size
        self._late = ""  # why nothing more is asked: an answer to an earlier question may still come

    def tokens(self, texts: Sequence[tuple[str, bool]], chats: Sequence[Any]) -> dict[str, Any]:
        """The tokens of texts, with special tokens or without, and of chats: see `peer_child`."""
        self._ask(do="tokens", texts=list(texts), chats=list(chats))
        return self.reply(LOAD_S)

    def open(self, dtype: str) -> None:
        """Load the model in a number format."""
        self._ask(do="open", dtype=dtype)
        self.reply(LOAD_S)

    def logits(self, dtype: str, tokens: Tokens) -> Pieces:
        """Float32 [positions, vocabulary], in pieces."""
        self._ask(do="logits", dtype=dtype, tokens=tokens.tolist())
        width = int(self.reply(ANSWER_S)["vocabulary"])
        for _ in range(0, len(tokens), self._size):
            yield np.frombuffer(self._taken(ANSWER_S), np.float32).reshape(-1, width)

    def _ask(self, **request: Any) -> None:
        if self._late:
            raise TransformersFailed(self._late)
        with suppress(OSError):  # it is gone: what comes next says so
            self._channel.send_bytes(json.dumps(request).encode())

    def reply(self, seconds: float) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._taken(seconds))
        if "error" in message:
            raise TransformersFailed(
                f"transformers failed: {message['error'].rstrip('.')}. Use --no-transformers to go without it."
            )
        return message

    def _taken(self, seconds: float) -> bytes:
        try:
            if not self._channel.poll(seconds):
                self._late = f"transformers took over {seconds:g} s. Use --no-transformers, or --limit 4."
                raise TransformersFailed(self._late)
            return self._channel.recv_bytes()
        except (EOFError, ConnectionError) as error:
            self._process.join(LEAVE_S)
            raise TransformersFailed(
                f"the process with transformers ended with code {self._process.exitcode}; there may be too little "
                "memory for a second model. Use --no-transformers to go without it."
            ) from error


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
    """A process that has transformers, ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpuinfer-verify-") as drafts:
        folder = opened.checkpoint.folder or _written(opened, Path(drafts) / "model")
        ours, theirs = multiprocessing.Pipe()
        size = rows_in_a_piece(opened.checkpoint.shape.vocabulary)
        process = start_transformers(theirs, str(folder), opened.facts["device"], opened.threads, size)
        try:
            yield TransformersPeer(ours, process, size)
            ours.close()
            process.join(LEAVE_S)  # the child ends by itself when its channel is closed
        finally:
            ours.close()
            children.end_process(process, LEAVE_S)


def start_transformers(channel: Connection, *arguments: Any) -> Any:
    """The process, which has the other end of the channel."""
    process = children.spawn(transformers_child.main, channel, *arguments, name="gpuinfer-transformers", daemon=True)
    channel.close()
    return process


def _written(opened: VerifySetup, folder: Path) -> Path:
    """A model that is no folder, as one."""
    from gpuinfer.text.checkpoint.built_in import save_folder

    save_folder(opened.checkpoint, folder)
    return folder


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


def missing_tokenizer(opened: VerifySetup) -> str | None:
    """Why there are no tokens to compare; None when there are."""
    return None if opened.checkpoint.language.folder is not None else "the model has no tokenizer: its tokens are bytes"


def compare_tokens(opened: VerifySetup, name: str, peer: TransformersPeer) -> Difference:
    """All texts and chats through both."""
    finding = Difference(name, unit="texts")
    cases, kind = _cases(opened, peer)
    finding.compared = len(cases)
    found = (_divergence(number, case, kind, opened) for number, case in enumerate(cases) if case.ours != case.theirs)
    finding.divergences += {(one.prompt, one.tokens): one for one in found}.values()
    faults = [one for one in finding.divergences if not one.theirs]
    if faults:
        finding.status, finding.why = "fails", faults[0].why
    elif finding.divergences:
        finding.status, finding.why = "differs", finding.divergences[0].why
    return finding


def _cases(opened: VerifySetup, peer: TransformersPeer) -> tuple[list[TokenCase], str]:
    file = _file(opened)
    texts, chats = _texts(opened, file), _chats(opened)
    reply = peer.tokens(
        [(prompt.text or "", prompt.special_tokens) for prompt in texts], [prompt.messages for prompt in chats]
    )
    prompts, answers = [*texts, *chats], [*reply["texts"], *reply["chats"]]
    ours = opened.language.encode(prompts)
    return [
        TokenCase(
            prompt,
            "refused" if isinstance(tokens, BadPrompt) else list(map(int, tokens)),
            answer.get("ids", "refused"),
            _by(file, prompt, answer),
        )
        for prompt, tokens, answer in zip(prompts, ours, answers, strict=True)
    ], f"{reply['tokenizer']} of transformers {reply['version']}"


def _texts(opened: VerifySetup, file: Any) -> list[Prompt]:
    """The prompts that are asked, those that are built in, and some with spaces and special tokens in odd places."""
    own = [item.asked for item in opened.items if item.asked is not None and item.asked.text]
    special = [] if file is None else [one.content for one in file.get_added_tokens_decoder().values() if one.special]
    odd = [text for one in special[:MOST_SPECIAL] for text in (f"{one}The sea", f"The sea {one} was{one}{one} green")]
    others = [Prompt(text=text, special_tokens=added) for text in (*TEXTS, *PROBES, *odd) for added in (True, False)]
    return list({(prompt.text, prompt.special_tokens): prompt for prompt in (*own, *others)}.values())


def _chats(opened: VerifySetup) -> list[Prompt]:
    if not opened.language.has_chat_template:
        return []
    own = [item.asked.messages for item in opened.items if item.asked is not None and item.asked.messages]
    return [Prompt(messages=chat) for chat in (*own, *CHATS)]  # with nothing but the chat: any template takes that


def _file(opened: VerifySetup) -> Any:
    """tokenizer.json as `tokenizers` reads it; None where there is none."""
    from tokenizers import Tokenizer

    path = opened.checkpoint.language.folder
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


def _divergence(number: int, case: TokenCase, kind: str, opened: VerifySetup) -> AnswerDivergence:
    place, tokens = next(_differing(case.ours, case.theirs))
    ours, theirs = (_named(opened, side, token) for side, token in zip((case.ours, case.theirs), tokens, strict=True))
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
    return AnswerDivergence(clipped(text or ""), number, 0, place, tokens, {}, False, why, theirs=on_their_side)


def _differing(ours: Sequence[int] | str, theirs: Sequence[int] | str) -> Iterator[tuple[int, tuple[int, int]]]:
    """The first place where they differ; token -1: none there."""
    one, other = ([] if isinstance(side, str) else list(side) for side in (ours, theirs))
    for place in range(max(len(one), len(other)) + 1):
        pair = ((*one[place:], -1)[0], (*other[place:], -1)[0])
        if pair[0] != pair[1] or place == max(len(one), len(other)):
            yield place, pair


def _named(opened: VerifySetup, side: Sequence[int] | str, token: int) -> str:
    if isinstance(side, str):
        return "no tokens, it refuses this"
    return "no further token" if token < 0 else f"token {token} {opened.language.decode([token])!r}"
