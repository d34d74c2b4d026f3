"""Proposed tokens make fewer steps and change no answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from text.guessing import FreeTokens, guessing
from text.test_generator_models import TEXTS, opened
from text.tiny import copy_of, llama_tokenizer, tiny_checkpoint
from text.toy import add, alone, finish, prompt, run, toy_generator

from gpuinfer.backends.fleet import FleetBackend
from gpuinfer.errors import UsageError
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.text.generator.draft_model import DraftModel
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.generator.speculation import PromptLookup, Proposal, Proposer, Speculation, StepTimes
from gpuinfer.text.text_options import TorchModelOptions


@pytest.mark.parametrize(
    ("text", "most", "expected", "grade"),
    [
        pytest.param("abcdxab", 3, "cdx", 2, id="what came after the same two"),
        pytest.param("abc1 abc2 bc", 1, "2", 2, id="the last of several"),
        pytest.param("abc1 bc2 abc", 1, "1", 3, id="the longest before the last"),
        pytest.param("xyxyx", 6, "yxyxyx", 3, id="a run that repeats goes on repeating"),
        pytest.param("the same words the same", 9, " words th", 4, id="no more than there is room for"),
        pytest.param("abcd", 9, "", 0, id="nothing came before"),
        pytest.param("a", 9, "", 0, id="a lone token"),
    ],
)
def test_what_is_looked_up(text, most, expected, grade):
    table = SlotTable(2, 32, 128, ())
    table.tokens[1, : len(text)] = [ord(letter) for letter in text]
    table.filled[1] = len(text) - 1
    [found] = PromptLookup(table).propose(np.array([1], np.int32), np.array([most], np.int32))
    assert ("".join(map(chr, found.tokens)), found.grade) == (expected, grade)


class Always(Proposer):
    """Proposes so many tokens, always of the same grade."""

    def __init__(self, table):
        pass

    def propose(self, slots, rooms):
        return [Proposal(np.zeros(room, np.int32), 4) for room in rooms.tolist()]


def speculation(rows, seconds_of, most=15):
    """Of so many rows, where steps take what `seconds_of` says of their number of tokens."""
    table, times = SlotTable(rows, 256, 8, ()), StepTimes()
    table.held[:], table.final[:] = 8, 255
    for _ in range(20):
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            times.took(tokens, seconds_of(tokens))
    return Speculation(table, Always(table), most, times)


def proposed(found, rows, room=512):
    slots = np.arange(rows, dtype=np.int32)
    proposals = found.proposals(slots, room)
    return None if proposals is None else [len(one.tokens) for one in proposals]


def test_a_lone_row_takes_as_many_tokens_as_pay_and_a_full_batch_takes_none():
    bound_by_memory = speculation(1, lambda tokens: 0.04 + 0.0005 * tokens)
    assert proposed(bound_by_memory, 1)[0] >= 6
    assert proposed(speculation(64, lambda tokens: 0.04 + 0.01 * tokens), 64) is None
    assert proposed(speculation(1, lambda tokens: 0.04 * tokens), 1) is None


def test_a_step_that_was_disturbed_ends_nothing():
    """Slow steps of one size keep proposals away for a while, not for good."""
    found = speculation(1, lambda tokens: 0.04 + 0.0005 * tokens)
    for _ in range(100):
        for tokens in (2, 4, 8, 16):
            found.times.took(tokens, 4.0)
    assert proposed(found, 1) is None
    for _ in range(70):
        found.times.took(1, 0.04)
    assert proposed(found, 1)[0] > 0


def test_rows_whose_proposals_come_true_take_more_and_others_fewer():
    found = speculation(2, lambda tokens: 0.04 + 0.002 * tokens)
    slots = np.arange(2, dtype=np.int32)
    before = proposed(found, 2)
    for _ in range(6):
        proposals = found.proposals(slots, 512)
        drawn = np.array([len(proposals[0].tokens), 0])
        found.settled(slots, proposals, drawn, np.zeros(2, np.bool_))
    after = proposed(found, 2)
    assert after[0] > before[0] >= before[1] > after[1]
    found._table.begin_anew(1)  # another row: nothing is known of it
    assert proposed(found, 2)[1] > after[1]


def test_proposals_stay_in_the_row_s_pages_and_before_its_last_token():
    found = speculation(2, lambda tokens: 0.04)
    found._table.filled[:] = 250, 240
    found._table.held[:] = 8, 8
    found._table.final[:] = 252, 255
    assert proposed(found, 2) == [1, 14]  # to draw two tokens, and fifteen
    found._table.held[1] = 7
    found._table.filled[1] = 222
    assert proposed(found, 2) == [1, 1]


def test_an_answer_takes_fewer_steps_and_is_the_same():
    asked = [prompt("as", 40), prompt("fast as that", 40, samples=2), prompt("it gets", 40, logprobs=2)]
    plain, generator = toy_generator(), toy_generator()
    generator.speculate(guessing(64, right=1.0), 15, FreeTokens())
    counts = []
    found = run(generator, asked, watch=counts.append)
    assert [one.completions for one in found] == [one.completions for one in run(plain, asked)]
    assert [one.completions for one in found] == [alone(one) for one in asked]
    assert len(generator.decoder.steps) < 0.5 * len(plain.decoder.steps)
    assert sum(one.output_tokens for one in counts) == 4 * 40
    drawn, wanted = (sum(getattr(one, name) for one in counts) for name in ("accepted", "proposed"))
    assert 0 < drawn <= wanted
    assert wanted + 4 * 40 > sum(one.tokens for one in counts) - sum(one.prompt_tokens for one in counts) >= wanted


def test_an_answer_that_is_cancelled_amid_proposals_leaves_what_is_true():
    """What it had drawn serves the next prompt, and no token that was only proposed."""
    generator = toy_generator(length=64)
    generator.speculate(guessing(64, right=0.7), 15, FreeTokens())
    first = prompt("the beginning of all", 40)
    for steps in (2, 3, 5):
        add(generator, first)
        for _ in range(steps):
            generator.step()
        assert generator.cancel(0)
        assert not finish(generator)
        on = Prompt(text="the beginning of all" + alone(first)[0].text[:20], sampling=first.sampling, key="next")
        [found] = run(generator, [on])
        assert found.completions == alone(on)
        assert found.cached_tokens > 0


SAMPLINGS = {
    "the likeliest": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
    "penalised": {"temperature": 0.6, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "processed_logprobs": True},
    "stopped": {"temperature": 0.8, "stop": ("e", "th")},
    "constrained": {"temperature": 0.8, "constraint": Constraint(regex="(ab|cd){2,12}")},
    "of a list": {"temperature": 0.8, "constraint": Constraint(choice=("abababababab", "cdcdcdcdcd", "abcdabcd"))},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_model_answers_with_the_same_bits(name, dtype):
    asked = [
        Prompt(text=text * 2, key=text, sampling=Sampling(max_tokens=40, ignore_eos=True, **SAMPLINGS[name]))
        for text in TEXTS
    ]
    steps = []
    plain, quick = opened(tiny_checkpoint("llama"), dtype=dtype), opened(tiny_checkpoint("llama"), dtype=dtype)
    quick.speculate(PromptLookup, 15, FreeTokens())
    expected = run(plain, asked, watch=steps.append)
    found = run(quick, asked, watch=steps.append)
    assert [one.completions for one in found] == [one.completions for one in expected]
    assert sum(one.proposed for one in steps) > 0
    plain.close()
    quick.close()


def test_a_model_of_transformers_answers_with_the_same_bits():
    asked = [
        Prompt(text=text * 2, key=text, sampling=Sampling(max_tokens=30, ignore_eos=True, temperature=0, logprobs=2))
        for text in TEXTS
    ]
    plain, quick = (opened(tiny_checkpoint("llama"), decoder="transformers") for _ in range(2))
    quick.speculate(PromptLookup, 15, FreeTokens())
    steps = []
    expected, found = run(plain, asked), run(quick, asked, watch=steps.append)
    assert [one.completions for one in found] == [one.completions for one in expected]
    assert sum(one.accepted for one in steps) > 0


DRAFTS = {"the model itself": {}, "another one": {"seed": 5, "num_hidden_layers": 1}}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_changes_no_answer(draft, name, monkeypatch):
    """Whether it is always right or hardly ever; more rows than it has slots or pages for have no proposals."""
    asked = [
        Prompt(text=text * 2, key=text, sampling=Sampling(max_tokens=30, ignore_eos=True, **SAMPLINGS[name]))
        for text in TEXTS
    ]
    folder, other = tiny_checkpoint("llama"), tiny_checkpoint("llama", **DRAFTS[draft])
    plain, quick = opened(folder, slots=3), opened(folder, slots=3, draft=str(other), context=192)
    quick.speculation.times = FreeTokens()
    monkeypatch.setattr(DraftModel, "step_share", lambda self, rows, times: 0.01)
    steps, plainly = [], []
    expected, found = run(plain, asked, watch=plainly.append), run(quick, asked, watch=steps.append)
    assert [one.completions for one in found] == [one.completions for one in expected]
    accepted, proposed = (sum(getattr(one, name) for one in steps) for name in ("accepted", "proposed"))
    assert proposed > 0
    if draft == "the model itself" and name in ("the likeliest", "drawn"):
        assert accepted > 0.9 * proposed
        assert len(steps) < 0.5 * len(plainly)
    plain.close()
    quick.close()


def test_a_draft_that_does_not_fit_is_refused(tmp_path):
    other = copy_of(tiny_checkpoint("llama"), tmp_path / "other")
    llama_tokenizer(other)
    for draft, words in (
        (other, "another vocabulary.*-B speculate=lookup"),
        ("tiny-llada", "diffusion.*another draft"),
    ):
        with pytest.raises(UsageError, match=words):
            opened(tiny_checkpoint("llama"), draft=str(draft))
    with pytest.raises(UsageError, match="no model folder"):
        opened(tiny_checkpoint("llama"), draft="none/such")
    for given in ({"speculate": "draft"}, {"speculate": "lookup", "draft": "tiny"}):
        for options in (TorchModelOptions, FleetBackend.Options):
            with pytest.raises(ValueError, match="belong together"):
                options(**given)


def test_a_run_has_the_same_answers_and_says_what_came_of_it(gpuinfer, empty_folder):
    rows = [{"id": str(number), "prompt": text * 3} for number, text in enumerate(TEXTS)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers, reports = {}, {}
    words = "--no-roofline --batch-size 2 --max-new-tokens 60 --temperature 0 --ignore-eos"
    for way in ("off", "lookup"):
        files = f"--input in.jsonl --output {way}.jsonl --json {way}.json -B speculate={way}"
        code, panel, said = gpuinfer("generate", "--model", "tiny", *words.split(), *files.split())
        assert code == 0, said
        lines = map(json.loads, Path(f"{way}.jsonl").read_text().splitlines())
        answers[way] = {line["id"]: line["text"] for line in lines}
        reports[way] = json.loads(Path(f"{way}.json").read_text())
        assert ("proposed tokens accepted" in panel + said) == (way == "lookup")
    assert answers["lookup"] == answers["off"]
    assert reports["off"]["speculation"] is None
    found = reports["lookup"]["speculation"]
    assert 0 < found["accepted_tokens"] <= found["proposed_tokens"]
    assert found["acceptance"] == found["accepted_tokens"] / found["proposed_tokens"]
    assert found["tokens_per_step"] > 1
    assert found["gain"] > 0
    assert reports["lookup"]["model"]["speculate"] == "lookup"


def test_what_proposes_nothing_is_refused():
    for model, more, words in (("tiny-llada", {}, "diffusion"), ("tiny", {"parallel": "layers"}, "stages")):
        with pytest.raises(UsageError, match=rf"speculate=lookup.*{words}.*eave"):
            opened(model, speculate="lookup", **more)
