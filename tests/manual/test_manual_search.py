"""A word finds its page: the best passage first, misspelled words too, and what is like a word that no page has."""

from __future__ import annotations

import pytest

from gpuinfer.cli.manual.manual_pages import pages, read_page
from gpuinfer.cli.manual.manual_search import passage, search


@pytest.fixture(scope="module")
def known():
    return pages().values()


FIRST = [
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
    ("several gpus", "questions#multi-gpu"),
    ("metrics", "monitoring"),
    ("elo", "selfplay#two-networks"),
    ("ray", "fleet#with-ray"),
    ("api key", "serve#api-keys"),
    ("verl", "rollouts#what-trainers-read"),
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
]
AMONG_THREE = [
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
]


@pytest.mark.parametrize(
    ("query", "address", "places"), [*((*one, 1) for one in FIRST), *((*one, 3) for one in AMONG_THREE)]
)
def test_a_query_finds_its_section_among_the_first(known, query, address, places):
    found = search(known, query)
    first = [section.address for section in found.sections[:places]]
    assert any(one.startswith(address) for one in first), first
    assert (found.instead, found.unknown) == ({}, {})


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
    found = search(known, query)
    section = next(one for one in found.sections[:6] if one.headings[-1] == command)
    assert query in passage(section, found.words)


@pytest.mark.parametrize(
    ("wrong", "right"), [("roofine", "roofline"), ("prometeus", "prometheus"), ("--temprature", "--temperature")]
)
def test_a_misspelled_word_is_taken_for_the_nearest(known, wrong, right):
    found = search(known, wrong)
    assert (found.instead, bool(found.sections)) == ({wrong: right}, True)


@pytest.mark.parametrize("word", ["pandb", "zeta", "fesign", "gdpr", "rust", "excel", "zzyzxqq"])
def test_a_word_is_not_taken_for_a_look_alike(known, word):
    found = search(known, word)
    assert (found.sections, found.instead, set(found.unknown)) == ([], {}, {word})
    assert all(one[0] == word[0] for one in found.unknown[word])


def test_a_section_with_all_words_comes_before_one_with_one_of_them_often():
    often = read_page("often", "# Often\n\n" + "queue " * 20)
    both = read_page("both", "# Both\n\nThe queues of a replica." + " And more." * 3)
    others = [read_page(f"other{number}", "# Other\n\nNothing of it.") for number in range(9)]
    assert search([often, both, *others], "replicas queue").sections[0].page == "both"


@pytest.mark.parametrize("found", [[], [read_page("empty", "")]])
def test_nothing_is_found_in_nothing(found):
    assert search(found, "word").sections == []


@pytest.mark.parametrize("query", ['"', "a OR b", "NEAR(", "*", "name: x", "--", "'; --"])
def test_signs_of_the_query_language_are_words_like_others(known, query):
    assert isinstance(search(known, query).sections, list)


def test_of_a_long_section_the_rows_and_paragraphs_with_the_word_are_shown():
    rows = "\n".join(f"| `--flag-{number}` | does {number} |" for number in range(60))
    section = read_page(
        "long", f"# Long\n\nHow it begins.\n\n| option | what |\n|---|---|\n{rows}\n\nThe end."
    ).sections[0]
    assert passage(section, ["--flag-7"]).splitlines() == ["| option | what |", "|---|---|", "| `--flag-7` | does 7 |"]


def test_a_long_section_that_has_a_word_in_its_heading_alone_shows_how_it_begins():
    section = read_page("long", "# Queue\n\nHow it begins.\n\n" + "More.\n\n" * 40).sections[0]
    assert passage(section, ["queue"]) == "How it begins."
