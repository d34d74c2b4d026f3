"""A word finds its page: the best passage first, misspelled words too, and what is like a word that stands nowhere."""

from __future__ import annotations

import pytest

from gpuinfer.cli.manual.manual_pages import pages, read
from gpuinfer.cli.manual.manual_search import passage, search, stem_of


@pytest.fixture(scope="module")
def known():
    return pages()


@pytest.mark.parametrize(
    ("query", "address"),
    [
        ("resume", "generate#when-something-goes-wrong"),
        ("central server", "central"),
        ("structured output", "generate#structured-output"),
        ("bottleneck", "diagnosis"),
        ("slurm", "fleet"),
        ("prometheus", "monitoring#prometheus"),
        ("a strategy of my own", "own-strategy"),
        ("opponent", "selfplay#two-networks"),
        ("kl target", "rollouts"),
        ("lora adapter", "serve#adapters"),
        ("responses api", "serve#not-here-the-responses-api"),
        ("openai responses", "serve#not-here-the-responses-api"),
        ("offline", "install#offline-one-file"),
        ("stop", "generate#stop-a-run"),
        ("write a game", "selfplay#write-a-game"),
        ("gpuinfer.toml", "settings"),
    ],
)
def test_what_people_ask_is_among_the_first_three(known, query, address):
    first = [section.address for section in search(known.values(), query).sections[:3]]
    assert any(one.startswith(address) for one in first), first


@pytest.mark.parametrize(
    ("query", "address"),
    [
        ("out of memory", "questions#out-of-memory"),
        ("slow", "questions#why-is-it-slow"),
        ("why is my gpu idle", "questions#why-is-it-slow"),
        ("batch size", "questions#which-batch-size"),
        ("multi gpu", "questions#multi-gpu"),
        ("amd", "questions#does-it-run-on"),
        ("no gpu", "questions#no-gpu"),
        ("gguf", "questions#which-models"),
        ("download a model", "questions#which-models"),
        ("csv", "questions#my-prompts"),
        ("port in use", "questions#which-ports"),
        ("kill", "questions#can-i-stop"),
        ("reproducible", "questions#are-results"),
        ("docker", "questions#docker"),
        ("exit code", "questions#what-do-exit-codes"),
        ("license", "questions#which-python"),
        ("what is a strategy", "questions#what-is-a-workload"),
        ("my own network", "questions#how-do-i-use-my-own-network"),
        ("chess", "questions#can-it-play-chess"),
        ("uninstall", "questions#how-do-i-uninstall"),
        ("openai", "questions#is-there-a-chat"),
        ("plugin", "plugins"),
        ("several gpus", "devices"),
        ("metrics", "monitoring"),
        ("elo", "selfplay#two-networks"),
        ("ray", "fleet#with-ray"),
        ("api key", "serve#api-keys"),
        ("verl", "rollouts#what-trainers-read"),
    ],
)
def test_the_words_of_a_newcomer_are_answered_by_the_first(known, query, address):
    first = search(known.values(), query).sections[0].address
    assert first.startswith(address)


@pytest.mark.parametrize(
    ("query", "command"),
    [
        ("--determinizations", "gpuinfer selfplay"),
        ("--fail-under", "gpuinfer bench selfplay"),
        ("--max-new-tokens", "gpuinfer generate"),
        ("simulate", "gpuinfer simulate"),
    ],
)
def test_options_and_commands_are_found(known, query, command):
    found = search(known.values(), query)
    assert command in [section.headings[-1] for section in found.sections[:6]]
    section = next(one for one in found.sections if one.headings[-1] == command)
    assert query in passage(section, found.words)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("roofine", "roofline"), ("prometeus", "prometheus"), ("--temprature", "--temperature"), ("determin", "determin")],
)
def test_a_misspelled_word_is_taken_for_the_nearest(known, wrong, right):
    found = search(known.values(), wrong)
    assert found.instead[wrong].startswith(right)
    assert found.sections


@pytest.mark.parametrize(
    ("query", "address"),
    [
        ("wandb", "questions#curves"),
        ("tensorboard", "questions#curves"),
        ("eta", "questions#how-long"),
        ("resign", "questions#does-self-play-resign"),
        ("notebook", "questions#from-python"),
        ("jupyter", "questions#from-python"),
        ("asyncio", "questions#from-python"),
        ("python api", "questions#from-python"),
        ("from python", "questions#from-python"),
        ("bitsandbytes", "questions#which-models"),
        ("speculative decoding", "questions#fine-tuning"),
        ("langchain", "questions#fine-tuning"),
        ("--max-model-len", "questions#i-know-vllm"),
    ],
)
def test_what_is_elsewhere_or_not_there_is_answered_first_and_by_no_look_alike(known, query, address):
    found = search(known.values(), query)
    assert found.sections[0].address.startswith(address), [section.address for section in found.sections[:4]]
    assert (found.instead, found.unknown) == ({}, {})


@pytest.mark.parametrize("word", ["pandb", "zeta", "fesign", "gdpr", "rust", "excel"])
def test_a_word_is_not_taken_for_a_look_alike(known, word):
    found = search(known.values(), word)
    assert found.instead.get(word) is None
    assert all(one[0] == word[0] for one in found.unknown.get(word, ()))


def test_a_word_that_is_like_none_is_told_with_what_is_a_little_like_it(known):
    found = search(known.values(), "zzyzxqq")
    assert not found.sections
    assert set(found.unknown) == {"zzyzxqq"}


def test_a_section_with_all_words_comes_before_one_with_one_of_them_often():
    often = read("often", "# Often\n\n" + "queue " * 50)
    both = read("both", "# Both\n\nThe queue of a replica." + " And more." * 50)
    assert search([often, both], "replica queue").sections[0].page == "both"


@pytest.mark.parametrize(
    "words",
    [
        "batch batches batched batching",
        "resume resumed resuming",
        "stop stopped stops",
        "policy policies",
        "setting settings",
    ],
)
def test_forms_of_a_word_are_one(words):
    assert len({stem_of(word) for word in words.split()}) == 1


def test_nothing_is_found_in_nothing():
    assert search([], "word").sections == []
    assert search([read("empty", "")], "").sections == []


def test_of_a_long_section_the_rows_and_paragraphs_with_the_word_are_shown():
    rows = "\n".join(f"| `--flag-{number}` | does {number} |" for number in range(60))
    section = read("long", f"# Long\n\nHow it begins.\n\n| option | what |\n|---|---|\n{rows}\n\nThe end.").sections[0]
    shown = passage(section, frozenset({"--flag-7"}))
    assert shown.splitlines() == ["| option | what |", "|---|---|", "| `--flag-7` | does 7 |"]


def test_a_long_section_that_has_a_word_in_its_heading_alone_shows_how_it_begins():
    section = read("long", "# Queue\n\nHow it begins.\n\n" + "More.\n\n" * 40).sections[0]
    assert passage(section, frozenset({"queu"})) == "How it begins."
