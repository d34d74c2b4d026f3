"""Talk with a text model in the terminal, on any backend."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from pydantic import Field

from gpuinfer.api import ModelSpec
from gpuinfer.cli import flags
from gpuinfer.cli.problems import FAILED, MARGIN
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.generation import Prompt
from gpuinfer.host.terminal import dim, printable, show_status, write
from gpuinfer.openai.adapters import AdapterOptions, adapters_of
from gpuinfer.openai.options import DrawingOptions, ModelOptions, check_model, model_of, rendering_of, sampling_of
from gpuinfer.openai.options import try_out as try_sampling
from gpuinfer.openai.schema import MOST_TOKENS
from gpuinfer.openai.unmasking import USUAL_TOKENS, UnmaskingOptions, unmasking_of

if TYPE_CHECKING:
    from gpuinfer.text.shape import Shape

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


class ChatOptions(UnmaskingOptions, DrawingOptions, AdapterOptions, ModelOptions):
    """The flags of `gpuinfer chat`."""

    system: str | None = Field(None, description="tells the model how to answer")
    max_new_tokens: int = Field(
        1024, ge=1, le=MOST_TOKENS, description=f"of each answer, at most; of a diffusion model {USUAL_TOKENS}"
    )


def _app() -> typer.Typer:
    return flags.command(NAME, flags.of(ChatOptions, NAME), COMMON, TEXT, execute)


def execute(values: Mapping[str, Any]) -> int:
    """Talk until there are no more messages. The exit code: 1 when one of a file or a pipe was not answered."""
    from gpuinfer.cli.building import merge, served, setup_of
    from gpuinfer.cli.conversation import Conversation
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.config.options import check

    merged = merge(NAME, values)
    common = merged.common
    own = ChatOptions(**check(ChatOptions, merged.table(NAME), NAME))
    check_model(own, NAME)
    adapters = adapters_of(own.adapter)
    plain = Prompt(
        sampling=sampling_of(own, unmasking=unmasking_of(own)),
        rendering=rendering_of(own),
        adapter=next(iter(adapters), None),
    )
    spec = model_of(own, adapters=adapters)
    setup = replace(setup_of(common), model=spec, deterministic=own.deterministic)
    backend, strategy = served(NAME, setup, merged)
    log_to_people(common.verbose)
    screen = Terminal(quiet=common.quiet)
    with screen.loading():
        shape = _chatting(spec)
        if "max_new_tokens" not in own.model_fields_set and shape is not None and shape.masking is not None:
            usual = msgspec.structs.replace(plain.sampling, max_tokens=USUAL_TOKENS)
            plain = msgspec.structs.replace(plain, sampling=usual)
        try_sampling(spec, plain.sampling)
        from gpuinfer.runtime.background import BackgroundSession

        session = BackgroundSession(backend, strategy)
    with session:
        with screen.loading():
            session.ready()
        screen.note(f"{spec.name} on {common.backend}. /help says what there is, Ctrl-D ends.")
        ctrl_c = CtrlC()
        conversation = Conversation(session.stream, screen, plain, own.system, ctrl_c)
        with ctrl_c.listening():
            conversation.run()
    return FAILED if conversation.failures and not screen.talks else 0


def _chatting(spec: ModelSpec) -> Shape | None:
    """The model's shape; None: only its backend can read it. Raises `UsageError` for one that knows no chats, as far as
    that can be seen here.
    """
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.language import has_chat_template

    try:
        checkpoint = open_checkpoint(spec)
    except UsageError:
        return None  # a backend that cannot read it will say so
    if not has_chat_template(checkpoint.language_files()):
        raise UsageError(
            f"{spec.name} has no chat template: it is no chat model. "
            "Try `gpuinfer generate --prompt TEXT`, or give a folder whose tokenizer_config.json has one."
        )
    return checkpoint.shape


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


class Terminal:
    """Messages from standard input, answers to standard output, and everything else to standard error."""

    def __init__(self, quiet: bool = False) -> None:
        if sys.stdin is None:
            raise UsageError("chat reads messages, and there is no standard input. Run it in a terminal, or pipe them.")
        self.talks = sys.stdin.isatty()
        self._quiet = quiet
        self._shows = sys.stdout.isatty()
        self._at_start = True  # of a line
        if self.talks and self._shows:
            _edit_lines()
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        if not self._quiet:
            show_status("loading the model")
        try:
            yield
        finally:
            show_status("")

    def read(self, goes_on: bool) -> str:
        """The next line. Raises `EOFError`."""
        if not self.talks:
            if not (line := sys.stdin.readline()):
                raise EOFError
            return line.removesuffix("\n")
        asking = GOES_ON if goes_on else PROMPT
        if self._shows:
            return _line(asking)
        write(asking, sys.stderr)
        return input()

    def answer(self, text: str) -> None:
        if text:
            write(printable(text) if self._shows else text, sys.stdout)
            self._at_start = text.endswith("\n")

    def end_answer(self) -> None:
        """The next thing begins on a line of its own."""
        if not self._at_start:
            write("\n", sys.stdout)
            self._at_start = True

    def note(self, text: str) -> None:
        """For people: said where messages come from a terminal."""
        if self.talks and not self._quiet:
            write((dim(printable(text)) if sys.stderr.isatty() else text) + "\n", sys.stderr)

    def complain(self, error: GpuinferError) -> None:
        write(f"{MARGIN}{printable(str(error))}\n", sys.stderr)


def _line(asking: str) -> str:
    """A line edited with readline. At its end the cursor goes to a line of its own."""
    try:
        return input(asking)
    except (EOFError, KeyboardInterrupt):
        print()
        raise


def _edit_lines() -> None:
    """History, editing, and text that is pasted whole, whatever line breaks it has."""
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


app = _app()
