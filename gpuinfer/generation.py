"""What a workload that wants text asks for, and what it is answered.

A `Prompt` is the payload of a request, a `Generation` its result. Both are plain structures: they travel as msgpack,
and a backend of a third party reads them as they are. A request has as many rows as its prompt has samples: each takes
a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

MOST_TEMPERATURE = 1e3
MOST_REPETITION = 100.0
MOST_PENALTY = 2.0  # of presence and frequency, either way
MOST_GUIDANCE = 100.0
MOST_LOGPROBS = 20  # beside each token


class Listed(Struct, frozen=True, kw_only=True):
    """Text is free until `begin` has been said, which tokens may spell in any way; from there on it is a list, up to
    `end`: `begin` (separator item)* separator `end`. No two items are of one unit. After `end` the answer is over, or
    free again. An empty `begin`: the answer is the list, from its first token on, and is over with its `end`.
    """

    items: tuple[tuple[str, str], ...]  # (unit, text): such as ("PAR", "A PAR - BUR")
    begin: str = "<orders>"
    end: str = "</orders>"
    separator: str = "\n"
    ends: bool = True  # the answer is over with `end`


class Constraint(Struct, frozen=True, kw_only=True):
    """What the whole answer must match. Exactly one field is set."""

    json_schema: Mapping[str, Any] | bool | None = None  # true: any JSON
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark, or GBNF as llama.cpp has it
    listed: Listed | None = None


class Unmasking(Struct, frozen=True, kw_only=True):
    """How the answer of a masked diffusion model is filled in; None leaves it to the run, and then to the model.

    The answer is `Sampling.max_tokens` masks, in blocks from left to right. Each step commits some of a block's masks.
    """

    decoder: str | None = None  # which masks a step commits: an entry point of the group gpuinfer.decoders
    steps: int | None = None  # of the whole answer, shared out among its blocks; None: one for each token
    block_length: int | None = None  # tokens; None: the model's own, or the whole answer
    threshold: float | None = None  # confidence from which a token may be committed; None: the decoder's own
    cfg_scale: float = 0.0  # classifier-free guidance (Ho and Salimans 2022); 0: none
    cache: Literal["none", "prefix", "dual", "vicinity", "exact"] | None = None  # `exact`: block-causal models alone
    options: Mapping[str, Any] = {}  # what else this decoder has


class Sampling(Struct, frozen=True, kw_only=True):
    """How one answer is drawn. The names are those of OpenAI's API, and of vLLM's where that has none.

    The filters apply in this order: logit bias, penalties, temperature, top-k, top-p, min-p.
    """

    max_tokens: int = 128
    min_tokens: int = 0  # before them neither the end token nor a stop token can come, and no stop string counts
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over the tokens of prompt and answer (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over those of the answer
    frequency_penalty: float = 0.0
    seed: int | None = None  # of this prompt; None: the run's, and the prompt's own key
    keyed: bool = False  # with a seed: it stands for the run's, and the prompt's own key counts too
    stop: tuple[str, ...] = ()  # not part of the answer
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = {}  # token id → added to its logit
    skip_special_tokens: bool = True  # no special token is part of the answer's text
    logprobs: int | None = None  # that of each chosen token, and of so many likeliest ones beside it
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    prompt_logprob_start: int = 0  # from this one of them on; what comes before need not be told, and is None
    spelled: bool = False  # log-probabilities come with what each token is called (`Candidate.name`)
    processed_logprobs: bool = False  # of chosen tokens: under the distribution they were drawn from, filters and all
    constraint: Constraint | None = None
    unmasking: Unmasking | None = None  # of diffusion models alone


class Rendering(Struct, frozen=True, kw_only=True):
    """How a chat is written out by the model's template; the names are those of transformers' `apply_chat_template`."""

    tools: tuple[Mapping[str, Any], ...] | None = None  # as JSON schemas; a call stands in the answer's text
    variables: Mapping[str, Any] = {}  # whatever else the template reads, such as enable_thinking
    add_generation_prompt: bool = True  # the text ends where the assistant's answer begins
    continue_final_message: bool = False  # the text ends with that of the last message, which the answer goes on with


class Prompt(Struct, frozen=True, kw_only=True):
    """One thing to continue: exactly one of `text`, `tokens`, `messages`.

    `begun`: of each sample the tokens that have been drawn already, by the same model with the same seed and key; one
    entry for each sample, which may be empty, or none at all. They are computed like a prompt's, and the answer goes on
    as if it had never stopped: the `Generation` is the whole one, a `Part` holds only what follows. Whoever has had
    parts gives the tokens of all that it has had. A sample that is ended by its tokens (an end or stop token, the last
    of `max_tokens`, a stop string or constraint complete in them) draws none: its one part is its finish. Of one that a
    stop string ended the tokens do not tell, where they are not part of the answer: they are drawn again, and it ends
    the same. Tokens that cannot be those of an answer are a `BadPrompt`.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None  # a chat, through the model's own template
    rendering: Rendering = Rendering()  # of the chat
    sampling: Sampling = Sampling()
    samples: int = 1  # answers wanted
    first_sample: int = 0  # the number of the first of them: parts of one prompt draw different answers
    key: str = ""  # names the prompt where random numbers are drawn, so that its answer is its own in any company
    truncate: Literal["left", "right"] | None = None  # of a prompt that does not fit, what goes; None: it is refused
    adapter: str | None = None  # the name of one that the backend has; None: the model itself
    embed: Literal["model", "mean", "last", "first"] | None = None
    """Nothing is drawn, and `Generation.embedding` is wanted: the tokens' states pooled so, or as the model has it."""
    special_tokens: bool = True  # add what the tokenizer adds to a text; a chat template has its own
    begun: tuple[tuple[int, ...], ...] = ()
    begun_versions: tuple[tuple[tuple[int, str], ...], ...] = ()
    """`Completion.versions` of the tokens in `begun`, sample by sample: whoever goes on cannot know that. None
    at all: the weights of the start."""
    begun_processed: tuple[tuple[float, ...], ...] = ()
    """`Completion.processed` of the tokens in `begun`; with `Sampling.processed_logprobs` they must be there."""


class Candidate(Struct, frozen=True, array_like=True):
    """One token and its log-probability, before temperature and filters."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    name: bytes | None = None  # how its vocabulary spells it, in UTF-8 or a part of a character; None: nobody says
    silent: bool = False  # it adds nothing to the text: a special token


class Logprob(Struct, frozen=True, array_like=True):
    """What the model thought of one token, and of the likeliest others."""

    chosen: Candidate
    likeliest: tuple[Candidate, ...] = ()


class Completion(Struct, frozen=True, kw_only=True):
    """One answer. `finish_reason`: stop (end token, stop token, stop string, complete constraint) or length."""

    text: str
    tokens: tuple[int, ...]  # without what a stop string cut off; with the end token
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None  # the token id or the string that ended it; None: the model's end token
    logprobs: tuple[Logprob, ...] | None = None  # one for each token
    processed: tuple[float, ...] | None = None  # with `Sampling.processed_logprobs`: one for each token
    nodes: tuple[int, ...] | None = None  # of a listed constraint: the node at which each token was drawn; -1 outside
    versions: tuple[tuple[int, str], ...] = ((0, ""),)  # (token, version): from which on which weights computed it


class Part(Struct, frozen=True, kw_only=True):
    """What has been added to one answer since its part before.

    Joined over one sample, texts, tokens and log-probabilities are exactly those of its `Completion`: what a stop
    string may still take back, and half a character, wait for what follows them. At the end of each part but the last,
    the tokens so far say what the text so far is: so whoever goes on after them (`Prompt.begun`) knows what has been
    given out. The last part cannot be divided so: its text and its finish belong together.
    """

    sample: int  # whose: its place in `Generation.completions`
    text: str  # may be empty: not every token has a text
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None  # one for each token
    finish_reason: Literal["stop", "length"] | None = None  # of the sample's last part alone, as is `stop_reason`
    stop_reason: int | str | None = None
    processed: tuple[float, ...] | None = None  # as in the `Completion`, one for each token
    versions: tuple[tuple[int, str], ...] = ()  # of the `Completion`'s, those that begin here; never (0, "")


class Generation(Struct, frozen=True, kw_only=True):
    """The answers to one prompt, in the order of their numbers."""

    completions: tuple[Completion, ...]
    prompt_tokens: int
    cached_tokens: int = 0  # of them, those that had been computed for another prompt
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    """Of each token. None for the first, which nothing predicts, and for those before `prompt_logprob_start`."""
    first_token_s: float = 0.0  # from the admission to a slot
    seconds: float = 0.0  # from the admission to the last token
    versions: tuple[str, ...] = ("",)  # of the weights that computed it, in order; "" are those of the start
    embedding: bytes | None = None  # of `Prompt.embed`: float32 [hidden], little-endian, of length 1

    @property
    def version(self) -> str:
        """Of the weights that computed the end of it, and all of it if they are the only ones."""
        return self.versions[-1]
