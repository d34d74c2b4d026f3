"""Prompts become the tokens that transformers makes of them, or say why not."""

import json
import re

import numpy as np
import pytest
from language_samples import byte_fallback, byte_level, folder, language, shape, whole_words
from text.tiny import VOCABULARY, llama_tokenizer, tiny_checkpoint
from tokenizers import Tokenizer

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Prompt
from gpuinfer.text.checkpoint import LanguageFiles
from gpuinfer.text.language import open_language
from gpuinfer.text.language.tokenizer import open_subwords, read_settings

TEXTS = [
    "hello world",
    " the  lot: {",
    "日本 😀 é",
    "<s>[INST] hi",
    "<|im_start|>user\nhi<|im_end|>",
    "a<tool call>b",
    "1\n\n2",
]


def encoded(opened, *texts, **more):
    return [one.tolist() for one in opened.encode([Prompt(text=text, **more) for text in texts])]


def refusal(opened, prompt) -> str:
    (answer,) = opened.encode([prompt])
    assert isinstance(answer, BadPrompt)
    return str(answer)


def transformers_tokenizer(path, kind="PreTrainedTokenizerFast"):
    from huggingface_hub import constants  # noqa: F401  keeps what HF_HUB_OFFLINE was when it was imported

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import transformers

        return getattr(transformers, kind).from_pretrained(str(path))


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("make", [byte_level, byte_fallback, whole_words])
def test_a_folder_encodes_and_decodes_as_transformers_does(tmp_path, make, special_tokens):
    opened = language(tmp_path / "m", make(), tokenizer_config={"model_max_length": 64})
    theirs = transformers_tokenizer(tmp_path / "m")
    ours = encoded(opened, *TEXTS, special_tokens=special_tokens)
    assert ours == [theirs.encode(text, add_special_tokens=special_tokens) for text in TEXTS]
    for tokens in ours:
        assert opened.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gpt2", "GPT2Tokenizer"), *((family, "Qwen2Tokenizer") for family in ("qwen2", "dream", "sdar"))],
)
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True, "bos_token": "<|im_start|>"}])
def test_vocabulary_and_merges_make_the_tokenizer_of_their_family(tmp_path, family, kind, settings):
    model = json.loads(byte_level())["model"]
    path = folder(tmp_path / "m", vocab=model["vocab"], tokenizer_config={"tokenizer_class": kind, **settings})
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    opened = open_language(LanguageFiles(path), shape(len(model["vocab"]), family))
    theirs = transformers_tokenizer(path, kind)
    texts = [*TEXTS, "e\u0301 I'll 12345", "<|endoftext|>a"]
    ours = encoded(opened, *texts)
    assert ours == [theirs.encode(text) for text in texts]
    assert opened.decode(ours[-1]) == theirs.decode(ours[-1], skip_special_tokens=True)


def test_tokens_of_the_settings_are_added_and_made_special(tmp_path):
    size = Tokenizer.from_str(byte_level()).get_vocab_size()
    added = {str(size): {"content": "<think>", "special": False}, str(size + 1): {"content": "<pad>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": {"content": "fox"}, "pad_token": "<pad>"}
    opened = language(tmp_path / "m", byte_level(), padded=2, tokenizer_config=config)
    (tokens,) = encoded(opened, "<think>a<pad>")
    assert tokens[0] == size
    assert tokens[-1] == size + 1
    assert opened.decode(tokens) == "<think>a"


def test_end_tokens_come_from_all_files_that_name_them(tmp_path):
    path = folder(tmp_path / "m", byte_level(), generation_config={"eos_token_id": [0, 2]}, tokenizer_config={})
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|im_start|>"}')
    opened = open_language(LanguageFiles(path), shape(600, end_tokens=(2, 7)))
    assert opened.end_tokens == (2, 7, 0, 1)


def test_an_empty_prompt_is_the_token_that_begins_texts_or_is_refused(tmp_path):
    for files, more, beginning in (
        (LanguageFiles(bytes=True), {"end_tokens": (256,)}, 256),  # after an end
        (LanguageFiles(vocabulary=("a", "\n")), {}, 1),  # on a new line
        (LanguageFiles(vocabulary=("a", "b")), {"beginning_token": 0}, 0),  # as the model says
    ):
        (tokens,) = open_language(files, shape(260, **more)).encode([Prompt(text="")])
        assert (tokens.tolist(), tokens.dtype) == ([beginning], np.int32)
    opened = language(tmp_path / "m", byte_level())
    assert "empty" in refusal(opened, Prompt(text=""))
    assert "empty" in refusal(opened, Prompt(tokens=()))
    assert encoded(language(tmp_path / "n", byte_level(), tokenizer_config={"bos_token": "<|im_start|>"}), "") == [[1]]


def test_texts_tokens_and_bad_prompts_keep_their_order():
    opened = open_language(LanguageFiles(bytes=True), shape(257, end_tokens=(256,)))
    prompts = [
        Prompt(text="a"),
        Prompt(tokens=(256, 0)),
        Prompt(tokens=(257,)),
        Prompt(tokens=(-1,)),
        Prompt(text="half \ud83d of a pair"),
        Prompt(text="b", tokens=(1,)),
        Prompt(),
        Prompt(text="é", special_tokens=False),
        Prompt(tokens=(2**70,)),
        Prompt(messages=({"role": "user", "content": "hi"},)),
    ]
    answers = opened.encode(prompts)  # a bad one leaves its neighbours alone
    assert [None if isinstance(one, BadPrompt) else one.tolist() for one in answers] == [
        [97],
        [256, 0],
        *[None] * 5,
        [0xC3, 0xA9],
        None,
        None,
    ]
    messages = [str(one) for one in answers if isinstance(one, BadPrompt)]
    assert all(message.endswith(".") for message in messages)
    assert "257" in messages[0]
    assert "chat template" in messages[-1]


def test_a_tokenizer_larger_than_the_model_and_letters_that_an_alphabet_lacks(tmp_path):
    path = folder(tmp_path / "m", byte_level())
    size = Tokenizer.from_str(byte_level()).get_vocab_size()
    opened = open_language(LanguageFiles(path), shape(size - 1))
    assert f"token {size - 1}" in refusal(opened, Prompt(text="a<tool call>"))
    assert len(encoded(opened, "the fox")) == 1
    opened = open_language(LanguageFiles(vocabulary=tuple("abc ")), shape(4))
    assert encoded(opened, "a cab") == [[0, 3, 2, 0, 1]]
    assert opened.decode([2, 0, 1, 9]) == "cab"
    assert "'f', 'o', 'x', ',', 'd', …" in refusal(opened, Prompt(text="a fox, a dog"))


WORDS = ("e4", "e5", "\n", "O O", "<|endoftext|>", "Nf3")


@pytest.mark.parametrize(
    ("vocabulary", "separator", "text", "pieces", "joined"),
    [
        pytest.param(WORDS, None, "e4  e5\tNf3", "e4·e5·Nf3", "e4 e5 Nf3", id="white space between words"),
        pytest.param(WORDS, None, "e4\n\ne5", "e4·\n·\n·e5", "e4 \n \n e5", id="newlines that are tokens"),
        pytest.param(WORDS, None, "e4 O O e5", "e4·O O·e5", "e4 O O e5", id="a word with a space in it"),
        pytest.param(WORDS, None, "<|endoftext|> e4", "<|endoftext|>·e4", "e4", id="the end of a text is not shown"),
        pytest.param(("a", "b", "<pad>"), None, "ab<pad>a", "a·b·<pad>·a", "ab<pad>a", id="characters, and special"),
        pytest.param(("e", "e4", " e5", " "), None, "e4 e5e ", "e4· e5·e· ", "e4 e5e ", id="the longest that fits"),
        pytest.param(("e4", "e5"), "", "e4e5", "e4·e5", "e4e5", id="a file that says that nothing is between"),
        pytest.param(("e4", "e5"), ";", "e4;;e5;", "e4·e5", "e4;e5", id="a separator of the file"),
        pytest.param(("", "a b"), None, "a b", "a b", "a b", id="a token without a text"),
    ],
)
def test_a_vocabulary_that_is_a_list_of_texts_is_read_as_it_was_written(vocabulary, separator, text, pieces, joined):
    opened = open_language(LanguageFiles(vocabulary=vocabulary, separator=separator), shape(len(vocabulary) + 2))
    (tokens,) = encoded(opened, text)
    assert [vocabulary[token] for token in tokens] == pieces.split("·")
    assert opened.decode([*tokens, len(vocabulary) + 1]) == joined
    assert opened.end_tokens == (() if "<|endoftext|>" not in vocabulary else (4,))


@pytest.mark.parametrize(
    ("separator", "text", "said"),
    [
        (None, "e4 Nf4 ee", r"lacks 'Nf4', 'ee'\. Did you mean 'Nf3'.*with ' ' between them"),
        (None, "e4e5", r"lacks 'e4e5'.*It is several tokens"),
        ("", "e4Nf4 e5", r"lacks 'Nf4', ' '\. Did you mean 'Nf3'"),
        (None, "e4 \ud800", "not valid Unicode"),
    ],
)
def test_a_word_that_a_vocabulary_lacks_is_named_with_the_cure(separator, text, said):
    opened = open_language(LanguageFiles(vocabulary=WORDS, separator=separator), shape(len(WORDS)))
    assert re.search(said, refusal(opened, Prompt(text=text)))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        pytest.param("tokenizer.model", "x", "save_pretrained", id="SentencePiece alone"),
        pytest.param("README.md", "x", "has no tokenizer", id="no tokenizer"),
        pytest.param("tokenizer.json", "{", "cannot be read", id="a torn tokenizer"),
        pytest.param("tokenizer_config.json", "[1", "cannot be read as JSON", id="torn settings"),
        pytest.param("tokenizer_config.json", "[1]", "does not hold a JSON object", id="settings of another kind"),
    ],
)
def test_a_folder_without_a_good_tokenizer_is_refused_with_the_cure(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        open_language(LanguageFiles(tmp_path), shape(10))
    assert str(caught.value).count("\n") < 3
    assert str(caught.value).rstrip(".") != str(caught.value) or "installed" in str(caught.value)


def test_a_decoder_that_looks_ahead_is_refused(tmp_path):
    whole = json.loads(byte_fallback())
    whole["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    with pytest.raises(UsageError, match=r"BPEDecoder.*vllm|vLLM"):
        language(tmp_path / "m", json.dumps(whole))


def test_padding_and_truncation_of_a_tokenizer_are_ignored_and_bad_texts_fail_alone(tmp_path):
    tokenizer = Tokenizer.from_str(byte_level())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    opened = language(tmp_path / "m", tokenizer.to_str())
    (tokens,) = encoded(opened, "the quick brown fox is here")
    assert opened.decode(tokens) == "the quick brown fox is here"
    good, bad, again = opened.encode([Prompt(text="good"), Prompt(text="bad \udc00"), Prompt(text="good")])
    assert isinstance(bad, BadPrompt)
    assert good.tolist() == again.tolist()


LLAMA_TEXTS = [
    "The dog", " The dog", "  two spaces", "<s>The dog</s> <s> mind", "The <s>dog</s><s>", "東京 café 🙂", "a\n\nb\n",
    "▁marked", "x  y", " ",
]  # fmt: skip
SETTINGS = [
    {}, {"legacy": False}, {"legacy": True}, {"legacy": None}, {"add_prefix_space": False},
    {"add_prefix_space": True, "legacy": True}, {"tokenizer_class": "LlamaTokenizerFast", "legacy": False},
    {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": None},
]  # fmt: skip


def both(folder, family, settings):
    """The tokenizers of a folder whose settings name LlamaTokenizer: ours and transformers'."""
    llama_tokenizer(folder, **settings)
    (folder / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": VOCABULARY}))
    return open_subwords(folder, family, read_settings(folder)), transformers_tokenizer(folder, "AutoTokenizer")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_spaces_of_a_llama_tokenizer_are_those_of_transformers(family, settings, tmp_path):
    ours, theirs = both(tmp_path, family, settings)
    for special in (True, False):
        expected = [theirs(text, add_special_tokens=special)["input_ids"] for text in LLAMA_TEXTS]
        found = [tokens.tolist() for tokens in ours.encode(LLAMA_TEXTS, special)]
        assert found == expected
        assert [ours.decode(tokens) for tokens in found] == [
            theirs.decode(tokens, skip_special_tokens=True) for tokens in found
        ]


def test_a_vocabulary_of_bytes_is_read_as_its_file_says_whatever_class_it_names(tmp_path):
    source = tiny_checkpoint("llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    before = open_subwords(tmp_path, "llama", read_settings(tmp_path)).encode(LLAMA_TEXTS, True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    after = open_subwords(tmp_path, "llama", read_settings(tmp_path))
    assert [tokens.tolist() for tokens in after.encode(LLAMA_TEXTS, True)] == [tokens.tolist() for tokens in before]
    assert after.decode(before[0].tolist()) == "The dog"
