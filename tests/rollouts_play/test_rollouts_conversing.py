"""Token in, token out: a conversation's tokens are those of the whole chat, and what was said stays as it was."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_run import language_of
from text.tiny import END, copy_of, tiny_checkpoint

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Completion, Prompt, Rendering
from gpuinfer.rollouts.agent import ChatEncoder, TokenConversation
from gpuinfer.rollouts.environment import Observation

WORDS = st.text(st.sampled_from(list("abc de,.\nüß東{}<|>")), max_size=12)
ROLES = st.sampled_from(["user", "system", "tool"])
MESSAGES = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, ROLES, WORDS), min_size=1, max_size=3)
TURNS = st.lists(st.tuples(MESSAGES, WORDS), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def folder():
    return tiny_checkpoint("qwen2")


@pytest.fixture(scope="module")
def language(folder):
    return language_of(str(folder))


def tokens_of(language, text):
    (found,) = language.encode([Prompt(text=text, special_tokens=False)]) if text else ([],)
    return tuple(map(int, found))


def conversation(language, turns, ends=True, **options):
    """What was added and said in each turn, and all tokens."""

    async def talk():
        chat, said, added = ChatEncoder(language, **options), TokenConversation(), []
        try:
            for messages, answer in turns:
                new = await chat.added(said, Observation(messages=messages))
                tokens = tokens_of(language, answer) + ((END,) if ends else ())
                said.add_answer(new, Completion(text=answer, tokens=tokens, finish_reason="stop" if ends else "length"))
                added.append((new, tokens))
        finally:
            chat.close()
        return added, said.tokens

    return asyncio.run(talk())


def whole(language, turns):
    """The chat written out at once, up to where the last answer begins, and that answer's tokens."""
    messages = [one for shown, answer in turns for one in (*shown, {"role": "assistant", "content": answer})]
    (found,) = language.encode([Prompt(messages=tuple(messages[:-1]))])
    return tuple(found.tolist()) + tokens_of(language, turns[-1][1]) + (END,)


@given(turns=TURNS)
def test_the_tokens_are_those_of_the_whole_chat(language, turns):
    added, tokens = conversation(language, turns)
    assert tokens == whole(language, turns)
    assert tokens == tuple(token for new, said in added for token in (*new, *said))


@given(turns=TURNS)
def test_an_answer_that_was_cut_off_is_ended_as_the_template_ends_it(language, turns):
    _, tokens = conversation(language, turns, ends=False)
    text = language.decode(tokens, special_tokens=True)
    messages = [one for shown, answer in turns for one in (*shown, {"role": "assistant", "content": answer})]
    assert text == language.render_chat(messages[:-1], Rendering()) + turns[-1][1]


async def test_what_was_drawn_is_never_tokenised_again(language):
    """Tokens that no tokenizer would have chosen for their text."""
    chat, said = ChatEncoder(language), TokenConversation()
    first = await chat.added(said, Observation(messages=[{"role": "user", "content": "go on"}]))
    spelled = sum((tokens_of(language, letter) for letter in "hello"), ())
    assert spelled != tokens_of(language, "hello")
    said.add_answer(first, Completion(text="hello", tokens=(*spelled, END), finish_reason="stop"))
    second = await chat.added(said, Observation(messages=[{"role": "user", "content": "more"}]))
    chat.close()
    assert said.tokens == (*first, *spelled, END)
    assert language.decode(second, special_tokens=True) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_changes_what_was_said_does_not_change_its_tokens(folder, tmp_path):
    """As some leave the thoughts out of all answers but the last."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ (m.content.split('</think>')[-1] if m.role == 'assistant' else m.content) | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    language = language_of(str(with_template(folder, tmp_path / "thinks", template)))
    turns = [([{"role": "user", "content": "one"}], "a</think>b"), ([{"role": "user", "content": "two"}], "c")]
    _, tokens = conversation(language, turns)
    assert language.decode(tokens, special_tokens=True) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\na</think>b<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    )


def test_a_template_that_forgets_answers_and_none_at_all_are_refused_with_the_cure(folder, tmp_path):
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
    turns = [([{"role": "user", "content": "one"}], "a"), ([{"role": "user", "content": "two"}], "b")]
    with pytest.raises(BadPrompt, match="leaves out an answer"):
        conversation(language_of(str(with_template(folder, tmp_path / "forgets", template))), turns)
    language = language_of(str(with_template(folder, tmp_path / "plain", None)))
    with pytest.raises(UsageError, match=r"no chat template.*--plain"):
        ChatEncoder(language)
    _, tokens = conversation(language, turns, ends=False, plain=True)
    assert language.decode(tokens) == "user: one\nassistant: a\nuser: two\nassistant: b"


def with_template(folder, to, template):
    """A copy of the model with this chat template, or without one."""
    made = copy_of(folder, to)
    (made / "chat_template.jinja").unlink(missing_ok=True)
    path = made / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings | ({} if template is None else {"chat_template": template})))
    return made
