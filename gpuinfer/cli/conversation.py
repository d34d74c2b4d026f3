"""A conversation: what has been said, what the model is asked next, and the words that are for the program."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpuinfer.errors import BackendDied, BackendError, BadPrompt, GpuinferError, PromptTooLong, RequestError
from gpuinfer.generation import Generation, Part, Prompt

HELP = """\
/reset          forget what was said, and begin anew
/system TEXT    tell the model how to answer; without TEXT, say what it was told
/help           this
/exit           end, as Ctrl-D does
Ctrl-C ends an answer. A line that ends with \\ goes on in the next one.
Put a space before a message that begins with /."""
COMMANDS = ("/reset", "/system", "/help", "/exit")
MORE = "\\"  # at the end of a line that is not all of a message


class AnswerStream(Protocol):
    """An answer that is read as it grows."""

    def __iter__(self) -> Iterator[Part]: ...
    @property
    def result(self) -> Generation: ...
    def close(self) -> None: ...


class Screen(Protocol):
    """Where messages come from and answers go. `read` raises `EOFError` at the end."""

    def read(self, goes_on: bool) -> str: ...
    def answer(self, text: str) -> None: ...
    def end_answer(self) -> None: ...
    def note(self, text: str) -> None: ...
    def complain(self, error: GpuinferError) -> None: ...


class History:
    """The messages so far, in OpenAI's words."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._said: list[dict[str, str]] = []

    def with_message(self, text: str) -> tuple[dict[str, str], ...]:
        """The chat that asks for an answer to this."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return (*first, *self._said, {"role": "user", "content": text})

    def keep(self, text: str, answer: str) -> None:
        self._said += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        self._said.clear()


class Conversation:
    """Reads messages and answers them, one after the other. `plain`: their prompt, but for what is said in it.

    Inside of `ctrl_c` a Ctrl-C is `KeyboardInterrupt`.
    """

    def __init__(
        self,
        ask: Callable[[Prompt], AnswerStream],
        screen: Screen,
        plain: Prompt,
        system: str | None = None,
        ctrl_c: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._ask, self._screen, self._plain = ask, screen, plain
        self._ctrl_c = ctrl_c or contextlib.nullcontext()
        self.history = History(system)
        self.failures = 0
        self._turns = 0  # also those before a reset: the same words draw another answer

    def run(self) -> None:
        """Until there are no more messages. Raises `BackendDied`."""
        while True:
            try:
                with self._ctrl_c:
                    text = self._message()
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
            return self._obey(text)
        if text := text.strip():
            self._answer(text)
        return True

    def _message(self) -> str:
        text = self._screen.read(False)
        while text.endswith(MORE):
            text = f"{text.removesuffix(MORE)}\n{self._screen.read(True)}"
        return text

    def _obey(self, text: str) -> bool:
        word, _, rest = text.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self.history.reset()
            self._screen.note("A new conversation." + (" The system message stays." if self.history.system else ""))
        elif word == "/system":
            self._instruct(rest.strip())
        elif word == "/help":
            self._screen.note(HELP)
        else:
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            self._screen.note(f"There is no command {word}.{hint} /help lists them.")
        return True

    def _instruct(self, text: str) -> None:
        if text:
            self.history.system = text
        said = "no system message" if self.history.system is None else f"the system message is: {self.history.system}"
        self._screen.note(f"From now on {said}" if text else said.capitalize())

    def _answer(self, text: str) -> None:
        self._turns += 1
        prompt = _asking(self._plain, self.history.with_message(text), f"turn-{self._turns}")
        stream, said = self._ask(prompt), ""
        try:
            with self._ctrl_c:
                for part in stream:
                    said += part.text
                    self._screen.answer(part.text)
            (whole,) = stream.result.completions
            self._screen.answer(whole.text[len(said) :])  # all of it, where the backend makes no parts
            said = whole.text
            self._screen.end_answer()
            if whole.finish_reason == "length":
                self._screen.note(cut_off(len(whole.tokens), prompt.sampling.max_tokens))
            elif not said.strip():
                self._screen.note("The answer is empty.")
        except KeyboardInterrupt:
            stream.close()
            self._screen.end_answer()
            self._screen.note("Stopped.")
        except (RequestError, BackendError) as error:
            self._fail(error, bool(said))
            return
        if said:
            self.history.keep(text, said)

    def _fail(self, error: GpuinferError, begun: bool) -> None:
        """The message counts as not said."""
        self.failures += 1
        if begun:
            self._screen.end_answer()
        if isinstance(error, BackendDied):
            raise error
        self._screen.complain(_in_a_chat(error))


def _asking(plain: Prompt, messages: tuple[dict[str, str], ...], key: str) -> Prompt:
    return Prompt(messages=messages, rendering=plain.rendering, sampling=plain.sampling, key=key)


def cut_off(tokens: int, most: int) -> str:
    """Why an answer of so many tokens ends before its end."""
    if tokens >= most:
        return f"Cut off after {most:,} tokens: --max-new-tokens allows more."
    return "Cut off, as the model's context is full: /reset begins anew, --context N may allow more."


def _in_a_chat(error: GpuinferError) -> GpuinferError:
    if not isinstance(error, PromptTooLong):
        return error
    happened = str(error).partition(". ")[0]
    return BadPrompt(f"{happened}. /reset begins anew without what was said; or start with a longer --context N.")
