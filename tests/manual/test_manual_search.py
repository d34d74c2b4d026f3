"""A word finds its page: the best passage first, misspelled words too, and what is like a word that no page has."""

from __future__ import annotations

import pytest

from gpuinfer.cli.manual.manual_pages import pages, read_page
from gpuinfer.cli.manual.manual_search import passage, search


@pytest.fixture(scope="module")
def known():
    return pages().values()


# an address, and queries of which it is the first answer
FIRST = """
questions#out-of-memory: out of memory
questions#why-is-it-slow: slow, why is my gpu idle
questions#which-batch-size: batch size
questions#multi-gpu: multi gpu, several gpus
questions#does-it-run-on: amd
questions#no-gpu: no gpu
questions#which-models: gguf, download a model
models#quantised-folders: bitsandbytes
questions#my-prompts: csv
questions#which-ports: port in use
questions#can-i-stop: kill
questions#are-results: reproducible
questions#docker: docker
questions#what-do-exit-codes: exit code
questions#which-python: license
questions#what-is-a-workload: what is a strategy
questions#how-do-i-use-my-own-network: my own network
questions#can-it-play-chess: chess
questions#how-do-i-uninstall: uninstall
questions#is-there-a-chat: openai
plugins: plugin
monitoring: metrics
selfplay#two-networks: elo
cluster#with-ray: ray
serve#api-keys: api key
rollouts#what-trainers-read: verl
questions#curves: wandb, tensorboard, mlflow, curves
tracking: --track
questions#a-pytorch-dataset: dataset, dataloader, pandas
questions#how-long: eta
questions#does-self-play-resign: resign
questions#llm-in-a-program: llm
questions#selfplay-in-a-program: play_async, selfplay in a program
questions#centralserver: CentralServer
questions#gpuinferserve: gpuinfer.serve, serve a model object
questions#from-python: notebook, jupyter, asyncio, python api, from python
questions#fastapi: fastapi, flask, django, litserve, bentoml, web service
python#any-model: batcher, gpuinfer.Batcher
tutorials/program: in your own program in ten minutes
questions#fine-tuning: speculative decoding, langchain
questions#i-know-vllm: --max-model-len
"""
# likewise, of which it is among the first three
AMONG_THREE = """
generate#when-something-goes-wrong: resume
central: central server
generate#structured-output: structured output
diagnosis: bottleneck
fleet: slurm
monitoring#prometheus: prometheus
own-strategy: a strategy of my own
selfplay#two-networks: opponent
rollouts: kl target
serve#adapters: lora adapter
openai#the-responses-api: responses api, openai responses
install#offline-one-file: offline
generate#stop-a-run: stop
selfplay#write-a-game: write a game
settings: gpuinfer.toml
"""
CASES = [
    (query, address, places)
    for places, table in ((1, FIRST), (3, AMONG_THREE))
    for address, _, queries in (line.partition(": ") for line in table.strip().splitlines())
    for query in queries.split(", ")
]


@pytest.mark.parametrize(("query", "address", "places"), CASES)
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
    ("word", "instead"),
    [
        *(("roofine", "roofline"), ("prometeus", "prometheus"), ("--temprature", "--temperature")),
        *((word, None) for word in ("pandb", "zeta", "fesign", "gdpr", "excel", "zzyzxqq")),
    ],
)
def test_a_misspelled_word_is_taken_for_the_nearest_but_not_for_a_look_alike(known, word, instead):
    found = search(known, word)
    assert bool(found.sections) == bool(instead)
    assert (found.instead, set(found.unknown)) == (({word: instead}, set()) if instead else ({}, {word}))
    assert all(one[0] == word[0] for one in found.unknown.get(word, ()))


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


ROWS = "\n".join(f"| `--flag-{number}` | does {number} |" for number in range(60))


@pytest.mark.parametrize(
    ("rest", "word", "shown"),
    [
        pytest.param(
            f"| option | what |\n|---|---|\n{ROWS}\n\nThe end.",
            "--flag-7",
            "| option | what |\n|---|---|\n| `--flag-7` | does 7 |",
            id="the rows and paragraphs with the word",
        ),
        pytest.param("More.\n\n" * 40, "queue", "How it begins.", id="how it begins, for a word of its heading alone"),
    ],
)
def test_of_a_long_section_is_shown(rest, word, shown):
    section = read_page("long", f"# Queue\n\nHow it begins.\n\n{rest}").sections[0]
    assert passage(section, [word]) == shown
