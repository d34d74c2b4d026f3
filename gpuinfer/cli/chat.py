"""Talk with a text model in the terminal, on any backend."""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from gpuinfer.api import ModelSpec
from gpuinfer.cli import flags
from gpuinfer.cli.problems import FAILED
from gpuinfer.cli.screen.talk import TalkScreen
from gpuinfer.errors import BackendDied, BackendError, GpuinferError, PromptTooLong, RequestError, UsageError
from gpuinfer.generation import Prompt
from gpuinfer.host.terminal import printable, write
from gpuinfer.serving.openai.model_options import (
    AdapterOptions,
    ModelOptions,
    SamplingOptions,
    adapter_folders,
    check_model,
    rendering_of,
    sampling_of,
    text_model,
)
from gpuinfer.serving.openai.model_options import check_with_model as try_sampling
from gpuinfer.serving.openai.sampling_fields import USUAL_TOKENS, UnmaskingOptions, unmasking_of
from gpuinfer.serving.openai.schema import MOST_TOKENS

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import Checkpoint

NAME = "chat"
COMMON = (
    *("backend", "strategy", "backend_options", "strategy_options", "device", "dtype", "seed"),
    *("patience", "give_up", "quiet", "verbose", "config"),
)
TEXT = """Talk with a text model in the terminal.

The answer is shown as it grows; Ctrl-C ends it, Ctrl-D ends the conversation,
and /help lists what else there is. The model needs a chat template.

Where standard input is no terminal, each of its lines is a message.
"""
PROMPT, GOES_ON = "> ", "… "
FLAGS = {"max_tokens": "max_new_tokens"}  # of a field of `Sampling`, where it is called otherwise
DRAWN = ("temperature", "top_k", "top_p", "min_p")


class ChatOptions(UnmaskingOptions, SamplingOptions, AdapterOptions, ModelOptions):
    """The flags of `gpuinfer chat`."""

    system: str | None = Field(None, description="tells the model how to answer")
    max_new_tokens: int = Field(
        1024, ge=1, le=MOST_TOKENS, description=f"of each answer, at most; of a diffusion model {USUAL_TOKENS}"
    )


def execute(values: Mapping[str, Any]) -> int:
    """Talk until there are no more messages. The exit code: 1 when one of a file or a pipe was not answered."""
    from gpuinfer.cli.building import merge, served, setup_of
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.config.options import check

    merged = merge(NAME, values)
    common = merged.common
    own = ChatOptions(**check(ChatOptions, merged.table(NAME), NAME))
    check_model(own, NAME)
    adapters = adapter_folders(own.adapter)
    plain = Prompt(
        sampling=sampling_of(own, unmasking=unmasking_of(own)),
        rendering=rendering_of(own),
        adapter=next(iter(adapters), None),
    )
    spec = text_model(own, adapters=adapters)
    setup = replace(setup_of(common), model=spec, deterministic=own.deterministic)
    backend, strategy = served(NAME, setup, merged)
    log_to_people(common.verbose)
    screen = ChatScreen(NAME, "messages", common.quiet)
    with screen.waiting("loading the model"):
        usual = _usual_sampling(_chatting(spec))
        usual = {name: value for name, value in usual.items() if FLAGS.get(name, name) not in own.model_fields_set}
        plain = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, **usual))
        try_sampling(spec, plain.sampling)
        from gpuinfer.runtime.background_session import BackgroundSession

        session = BackgroundSession(backend, strategy)
    with session:
        with screen.waiting("loading the model"):
            session.ready()
        screen.note(f"{spec.name} on {common.backend}. /help says what there is, Ctrl-D ends.")
        if drawn := ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in usual.items() if name in DRAWN):
            screen.note(f"Drawn as the model recommends: {drawn}. Flags go before that.")
        ctrl_c = CtrlC()
        conversation = ChatConversation(session.stream, screen, plain, own.system, ctrl_c)
        with ctrl_c.listening():
            conversation.run()
    return FAILED if conversation.failures and not screen.talks else 0


def _usual_sampling(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Fields of `Sampling` that are the model's own where no flag says them. None: a model that is not known here."""
    from gpuinfer.text.language import recommended_sampling

    if checkpoint is None:
        return {}
    if checkpoint.shape.masking is not None:
        return {"max_tokens": USUAL_TOKENS}
    return recommended_sampling(checkpoint)


def _chatting(spec: ModelSpec) -> Checkpoint | None:
    """The model; None: only its backend can read it. Raises `UsageError` for one that knows no chats, as far as that
    can be seen here.
    """
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.language import has_chat_template

    try:
        checkpoint = open_checkpoint(spec)
    except UsageError:
        return None  # a backend that cannot read it will say so
    if not has_chat_template(checkpoint.language):
        raise UsageError(
            f"{spec.name} has no chat template: it is no chat model. "
            "Try `gpuinfer generate --prompt TEXT`, or give a folder whose tokenizer_config.json has one."
        )
    return checkpoint


class CtrlC:
    """Inside of it Ctrl-C raises `KeyboardInterrupt`, once, and elsewhere it does nothing: two of them do not end what
    one does not. `listening` lays that down for a while.
    """

    def __init__(self) -> None:
        self._inside = False

    def __enter__(self) -> None:
        self._inside = True

    def __exit__(self, *error: object) -> None:
        self._inside = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _hear(self, number: int, frame: object) -> None:
        if self._inside:
            self._inside = False
            raise KeyboardInterrupt


class ChatScreen(TalkScreen):
    """Answers on standard output."""

    _at_start = True  # of a line

    def read(self, goes_on: bool) -> str:
        return self.ask(GOES_ON if goes_on else PROMPT)

    def answer(self, text: str) -> None:
        if text:
            write(printable(text) if self.shows else text, sys.stdout)
            self._at_start = text.endswith("\n")

    def end_answer(self) -> None:
        """The next thing begins on a line of its own."""
        if not self._at_start:
            write("\n", sys.stdout)
            self._at_start = True

    def note(self, text: str) -> None:
        """Where messages come from a terminal."""
        if self.talks:
            super().note(text)


app = flags.command(NAME, flags.of(ChatOptions, NAME), COMMON, TEXT, execute)


HELP = """\
/reset          forget what was said, and begin anew
/system TEXT    tell the model how to answer; without TEXT, say what it was told
/help           this
/exit           end, as Ctrl-D does
Ctrl-C ends an answer. A line that ends with \\ goes on in the next one.
Put a space before a message that begins with /."""
COMMANDS = ("/reset", "/system", "/help", "/exit")
MORE = "\\"  # at the end of a line that is not all of a message


class ChatConversation:
    """Reads messages and answers them, one after the other. `ask` gives a `BackgroundSession.stream`; `plain` is the
    prompt of each message, but for what is said in it. Inside of `ctrl_c` a Ctrl-C is `KeyboardInterrupt`.
    """

    def __init__(
        self,
        ask: Callable[[Prompt], Any],
        screen: ChatScreen,
        plain: Prompt,
        system: str | None = None,
        ctrl_c: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._ask, self._screen, self._plain = ask, screen, plain
        self._ctrl_c = ctrl_c or contextlib.nullcontext()
        self._system = system
        self._messages: list[dict[str, str]] = []  # so far, in OpenAI's words
        self.failures = 0
        self._turns = 0  # also those before a reset: the same words draw another answer

    def run(self) -> None:
        """Until there are no more messages. Raises `BackendDied`."""
        while True:
            try:
                with self._ctrl_c:
                    text = self._screen.read(False)
                    while text.endswith(MORE):
                        text = f"{text.removesuffix(MORE)}\n{self._screen.read(True)}"
            except KeyboardInterrupt:
                self._screen.note("Ctrl-D or /exit ends.")
                continue
            except EOFError:
                return
            if not self._take(text):
                return

    def _take(self, text: str) -> bool:
        """One message. Whether there may be more."""
        if text.startswith("/"):
            word, _, rest = text.strip().partition(" ")
            if word in ("/exit", "/quit"):
                return False
            if word == "/reset":
                self._messages.clear()
                self._screen.note("A new conversation." + (" The system message stays." if self._system else ""))
            elif word == "/system":
                if told := rest.strip():
                    self._system = told
                system = self._system
                now = "no system message" if system is None else f"the system message is: {system}"
                self._screen.note(f"From now on {now}" if told else now.capitalize())
            elif word == "/help":
                self._screen.note(HELP)
            else:
                near = difflib.get_close_matches(word, COMMANDS, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                self._screen.note(f"There is no command {word}.{hint} /help lists them.")
            return True
        if text := text.strip():
            self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        self._turns += 1
        first = [] if self._system is None else [{"role": "system", "content": self._system}]
        prompt = Prompt(
            messages=(*first, *self._messages, {"role": "user", "content": text}),
            rendering=self._plain.rendering,
            sampling=self._plain.sampling,
            key=f"turn-{self._turns}",
        )
        stream, answer_text = self._ask(prompt), ""
        try:
            with self._ctrl_c:
                for part in stream:
                    answer_text += part.text
                    self._screen.answer(part.text)
            (whole,) = stream.result.completions
            self._screen.answer(whole.text[len(answer_text) :])  # all of it, where the backend makes no parts
            answer_text = whole.text
            self._screen.end_answer()
            if whole.finish_reason == "length":
                why = "Cut off, as the model's context is full: /reset begins anew, --context N may allow more."
                if len(whole.tokens) >= (most := prompt.sampling.max_tokens):
                    why = f"Cut off after {most:,} tokens: --max-new-tokens allows more."
                self._screen.note(why)
            elif not answer_text.strip():
                self._screen.note("The answer is empty.")
        except KeyboardInterrupt:
            stream.close()
            self._screen.end_answer()
            self._screen.note("Stopped.")
        except (RequestError, BackendError) as error:
            self._fail(error, bool(answer_text))
            return
        if answer_text:
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer_text}]

    def _fail(self, error: GpuinferError, begun: bool) -> None:
        """Forget the message that failed."""
        self.failures += 1
        if begun:
            self._screen.end_answer()
        if isinstance(error, BackendDied):
            raise error
        said = str(error)
        if isinstance(error, PromptTooLong):
            said = (
                said.partition(". ")[0]
                + ". /reset begins anew without what was said; or start with a longer --context N."
            )
        self._screen.complain(said)
