"""Several models in one run: their lines in the report, on the screen, and what the verdict says of their turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuinfer.cli.screen import final_panel
from gpuinfer.cli.screen.live_view import device_shares
from gpuinfer.report import report_sections
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.verdict import judge
from gpuinfer.stats import Histogram, Snapshot, merge_snapshots, of_model, since


def of(kind: str, share: float, requests: int, had_s: float, waited_s: float) -> dict:
    waits = Histogram()
    for _ in range(requests):
        waits.add(0.01)
    turns = {"had_s": had_s, "waited_s": waited_s}
    device = {"turns": turns, "tokens": {"output": 5 * requests}}
    counted = Snapshot(requests=requests, rows=requests, queue_wait=waits.to_wire(), device=device)
    return of_model(counted, kind, share)


BOTH = Snapshot(models={"chat": of("text", 2.0, 30, 6.0, 1.0), "net": of("rows", 1.0, 10, 2.0, 3.0)})


def test_the_device_time_is_shared_out_whole():
    chat, net = report_sections.model_lines(BOTH, 10.0)
    assert (chat["device_share"], net["device_share"]) == (0.75, 0.25)
    assert (chat["rows_per_s"], chat["output_tokens"], net["turn_wait_s"]) == (3.0, 150, 3.0)


def test_lines_of_several_processes_add_up_and_count_from_a_mark():
    twice = merge_snapshots([BOTH, BOTH])
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
    told = [(row.name, row.text) for row in final_panel.panel_rows({"models": report_sections.model_lines(BOTH, 10.0)})]
    assert ("models", "chat: 150 tokens, 75% of the device time, waited 10.0 ms in the queue, 1 s for turns") in told
    assert list(device_shares(BOTH)) == ["device: chat 75%, net 25%"]
    assert list(device_shares(Snapshot())) == []


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
