"""A conversation in the terminal: what is remembered, what is for the program, and what Ctrl-C ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from gpuinfer.cli.chat import ChatConversation, CtrlC
from gpuinfer.errors import BackendDied, BadPrompt, PromptTooLong
from gpuinfer.generation import Completion, Generation, Part, Prompt, Sampling


class Answer:
    """One that comes in the given parts; an exception among them is raised."""

    def __init__(self, *parts: str | BaseException, reason: str = "stop") -> None:
        self._parts = parts
        said = "".join(part for part in parts if isinstance(part, str))
        self.result = Generation(
            completions=(Completion(text=said, tokens=(1, 2, 3), finish_reason=reason),), prompt_tokens=1
        )
        self.closed = False

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            if isinstance(part, BaseException):
                raise part
            yield Part(sample=0, text=part, tokens=(1,))

    def close(self) -> None:
        self.closed = True


class Script:
    """Lines as a user types them, and what is shown. A line that is an exception is raised."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = iter((*lines, EOFError))
        self.answers, self.notes, self.complaints = "", [], []

    def read(self, goes_on: bool) -> str:
        line = next(self._lines)
        if isinstance(line, str):
            return line
        raise line

    def answer(self, text: str) -> None:
        self.answers += text

    def end_answer(self) -> None:
        self.answers += "\n"

    def note(self, text: str) -> None:
        self.notes.append(text)

    def complain(self, error: Exception) -> None:
        self.complaints.append(str(error))


def talk(script: Script, answer: Callable[[], Answer] = lambda: Answer("he", "llo"), **given) -> list[Prompt]:
    """What the model was asked."""
    asked: list[Prompt] = []

    def ask(prompt: Prompt) -> Answer:
        asked.append(prompt)
        return answer()

    ChatConversation(ask, script, Prompt(sampling=Sampling(max_tokens=3)), **given).run()
    return asked


def words(prompt: Prompt) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in prompt.messages or ()]


def test_the_model_is_asked_with_all_that_was_said_since_the_last_reset():
    script = Script("one", "", "two", "/reset", "one")
    first, second, third = talk(script, system="Be kind.")
    assert words(first) == words(third) == ["system: Be kind.", "user: one"]
    assert words(second) == ["system: Be kind.", "user: one", "assistant: hello", "user: two"]
    assert script.answers == "hello\nhello\nhello\n"
    assert len({first.key, second.key, third.key}) == 3  # so that the same words may be answered otherwise


def test_commands_and_lines_that_go_on():
    script = Script("/system", "/system Be brief. ", "hi", "/rest", "/help", "one \\", "two", " /etc/hosts")
    asked = talk(script)
    assert words(asked[0]) == ["system: Be brief.", "user: hi"]
    assert [words(one)[-1] for one in asked[1:]] == ["user: one \ntwo", "user: /etc/hosts"]
    assert script.notes[:2] == ["No system message", "From now on the system message is: Be brief."]
    assert script.notes[2] == "There is no command /rest. Did you mean /reset? /help lists them."
    assert "/system TEXT" in script.notes[3]
    for line in ("/exit", "/quit", EOFError):
        assert talk(Script(line, "never")) == []


def test_ctrl_c_ends_the_answer_and_what_was_said_is_remembered():
    cut = Answer("he", KeyboardInterrupt())
    answers = iter([cut, Answer("yes")])
    script = Script("one", "two")
    asked = talk(script, lambda: next(answers))
    assert cut.closed
    assert words(asked[1]) == ["user: one", "assistant: he", "user: two"]
    assert script.answers == "he\nyes\n"
    assert script.notes == ["Stopped."]


def test_answers_that_fail_or_are_cut_off():
    answers = iter([Answer(BadPrompt("no. Mend it.")), Answer("yes")])
    script = Script("one", "two")
    asked = talk(script, lambda: next(answers))
    assert words(asked[1]) == ["user: two"]  # what failed counts as not said
    assert script.complaints == ["no. Mend it."]
    error = PromptTooLong("the prompt has 90 tokens and the context 64. Shorten it, or use --truncate left or right.")
    script = Script("one")
    talk(script, lambda: Answer(error))
    (said,) = script.complaints
    assert said.startswith("the prompt has 90 tokens and the context 64. /reset begins anew")
    assert "truncate" not in said
    for allowed, said in ((3, "--max-new-tokens allows more"), (9, "context is full: /reset begins anew")):
        script, plain = Script("one"), Prompt(sampling=Sampling(max_tokens=allowed))
        ChatConversation(lambda prompt: Answer("a", reason="length"), script, plain).run()
        assert said in script.notes[0]
    with pytest.raises(BackendDied):
        talk(Script("one", "two"), lambda: Answer("a", BackendDied("gone. Start again.")))


def test_ctrl_c_is_heard_where_it_ends_something_and_nowhere_else():
    ctrl_c = CtrlC()
    with ctrl_c.listening():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ctrl_c:
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # pressed twice
