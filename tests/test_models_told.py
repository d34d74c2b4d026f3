"""Several models in one run: their lines in the report, on the screen, and what the verdict says of their turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuinfer.cli.screen import final_panel
from gpuinfer.cli.screen.live_view import models_of
from gpuinfer.report import report_sections
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.verdict import judge
from gpuinfer.stats import Histogram, Snapshot, merge, of_model, since


def of(kind: str, share: float, requests: int, had_s: float, waited_s: float, logs: Sequence[float] = ()) -> dict:
    waits = Histogram()
    for _ in range(requests):
        waits.add(0.01)
    looked = {"pairs": len(logs), "pair_logs": sum(logs), "pair_squares": sum(log * log for log in logs)}
    turns = {"had_s": had_s, "waited_s": waited_s, **looked, "together_s": 8.0, "at_once_s": 6.0}
    device = {"turns": turns, "tokens": {"output": 5 * requests}}
    counted = Snapshot(requests=requests, rows=requests, queue_wait=waits.to_wire(), device=device)
    return of_model(counted, kind, share)


BOTH = Snapshot(models={"chat": of("text", 2.0, 30, 6.0, 1.0), "net": of("rows", 1.0, 10, 2.0, 3.0)})


def test_the_device_time_is_shared_out_whole():
    chat, net = report_sections.model_lines(BOTH, 10.0)
    assert (chat["device_share"], net["device_share"]) == (0.75, 0.25)
    assert (chat["rows_per_s"], chat["output_tokens"], net["turn_wait_s"]) == (3.0, 150, 3.0)


def test_lines_of_several_processes_add_up_and_count_from_a_mark():
    twice = merge([BOTH, BOTH])
    assert [line["device_s"] for line in report_sections.model_lines(twice, 1.0)] == [12.0, 4.0]
    assert [line["share"] for line in report_sections.model_lines(twice, 1.0)] == [2.0, 1.0]
    assert report_sections.model_lines(since(twice, BOTH), 1.0) == report_sections.model_lines(BOTH, 1.0)
    assert Snapshot.from_wire(BOTH.to_wire()) == BOTH


def test_without_turns_the_time_of_the_forward_lanes_counts():
    lanes = (
        {"name": "worker 1: forward 0", "stations": {"forward": 2.0, "idle": 9.0}},
        {"name": "search", "stations": {}},
    )
    assert of_model(Snapshot(lanes=lanes), "rows", 1.0)["device_s"] == 2.0


def test_the_screen_has_a_line_a_model():
    told = [(row.name, row.text) for row in final_panel.rows({"models": report_sections.model_lines(BOTH, 10.0)})]
    assert ("models", "chat: 150 tokens, 75% of the device time, waited 10.0 ms in the queue, 1 s for turns") in told
    assert list(models_of(BOTH)) == ["device: chat 75%, net 25%"]
    assert list(models_of(Snapshot())) == []


RUN = Evidence(
    wall_s=10.0,
    lanes=[
        {"name": "forward 0", "stations": {"forward": 9.5, "idle": 0.5}},
        {"name": "beside net: forward 0", "stations": {"forward": 9.5, "idle": 0.5}},
    ],
    requests=400,
    rows_per_s=10.0,
    rows_mean=8.0,
    batch_s={8: [900, 9.0]},
    cores=2,
    cpu_s=19.0,
    cpu_wait_s=15.0,
    options={"-B": {"gate": False, "threads": 2}},
    models=report_sections.model_lines(BOTH, 10.0),
)


@pytest.mark.parametrize("slots", [0, 8], ids=["rows", "text"])
def test_models_that_compute_at_once_on_the_same_cores_are_told_to_take_turns(slots):
    told = judge(replace(RUN, slots=slots))
    assert told["class"] == "oversubscribed CPUs"
    assert "The forwards of chat and net ran at once: 3.4 threads wanted a core and there are 2" in told["why"]
    assert told["command"] == "gpuinfer -B gate=true"


def test_nothing_is_said_of_one_model_or_where_there_are_turns():
    for run in (replace(RUN, models=()), replace(RUN, options={"-B": {"gate": True, "threads": 2}})):
        assert "at once:" not in judge(run)["why"]


def test_that_forwards_waited_for_their_turns_stands_beside_the_verdict():
    lanes = [{"name": lane["name"], "stations": {"forward": 5.0, "turn": 5.0}} for lane in RUN.lanes]
    told = judge(replace(RUN, lanes=lanes, cpu_wait_s=0.0, options={"-B": {"gate": True}}))
    assert told["why"].startswith(
        "The models took turns: forwards waited 50% of the time for theirs; of the device, chat 75% and net 25%."
    )


def looked_at(*ratios: float) -> Evidence:
    """A run of two models, each of which got so many times as much done at once as in turns."""
    logs = [math.log(ratio) for ratio in ratios]
    snapshot = Snapshot(
        models={"chat": of("text", 2.0, 30, 6.0, 1.0, logs), "net": of("rows", 1.0, 10, 2.0, 3.0, logs)}
    )
    return replace(
        RUN, models=report_sections.model_lines(snapshot, 10.0), options={"-B": {"gate": True}}, cpu_wait_s=0.0
    )


def test_what_was_found_by_looks_is_in_the_line_of_each_model():
    chat, _ = looked_at(1.9, 2.0, 2.1).models
    assert chat["at_once"]["times"] == pytest.approx(1.998, abs=0.001)
    assert 1.7 < chat["at_once"]["low"] < 1.8 < 2.2 < chat["at_once"]["high"] < 2.3
    assert (chat["at_once"]["pairs"], chat["at_once"]["time_share"]) == (3, 0.75)
    assert looked_at(2.0).models[0]["at_once"] is None  # one pair says nothing of the noise


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        pytest.param(
            (1.9, 2.0, 2.1),
            "Side by side chat and net got 2.00 times as much done as in turns (1.76 to 2.26, 3 looks at each), and so "
            "they ran for 75% of the time in which they had work together.",
            id="at once is faster",
        ),
        pytest.param(
            (0.5, 0.52, 0.48),
            "In turns chat and net got 2.00 times as much done as side by side (1.81 to 2.21, 3 looks at each), and so "
            "they ran for 25% of the time in which they had work together.",
            id="at once is slower",
        ),
        pytest.param(
            (0.99, 1.0, 1.01), "Side by side chat and net got as much done as in turns (0.98 to 1.03).", id="alike"
        ),
    ],
)
def test_the_verdict_says_which_way_was_faster_with_its_numbers(ratios, said):
    assert judge(looked_at(*ratios))["why"].startswith(said)


def test_looks_that_disagree_say_nothing():
    assert "looks" not in judge(looked_at(0.5, 2.0))["why"]


def test_models_that_get_less_done_at_once_than_in_turns_are_told_so_with_what_turns_would_bring():
    told = judge(replace(looked_at(0.7, 0.72, 0.74), options={"-B": {"gate": False, "threads": 2}}))
    assert (told["class"], told["command"]) == ("oversubscribed CPUs", "gpuinfer -B gate=true")
    assert "got 0.72 times as much done as in turns (0.67 to 0.77, 3 looks at each)" in told["why"]
    assert told["gain"]["expected"] == pytest.approx(1.39, abs=0.01)


def test_models_that_get_as_much_done_at_once_are_not_told_to_share():
    told = judge(replace(looked_at(1.0, 1.02, 0.98), options={"-B": {"gate": False}}, cpu_wait_s=15.0))
    assert told["command"] != "gpuinfer -B gate=true"


def test_what_looks_found_adds_up_over_processes_and_counts_from_a_mark():
    line = of("text", 1.0, 30, 6.0, 1.0, [math.log(2), -math.log(4)])
    twice = merge([Snapshot(models={"chat": line})] * 2)
    assert twice.models["chat"]["sharing"]["pair_logs"] == pytest.approx(-2 * math.log(2))
    assert since(twice, Snapshot(models={"chat": line})).models["chat"]["sharing"]["pairs"] == 2
