"""Counters of a fleet never fall, whatever becomes of its replicas."""

from __future__ import annotations

import pytest
from monitoring.synthetic import Server

from gpuinfer.fleet.fleet_counters import MonotonicCounters
from gpuinfer.serving.monitoring.live_page import live_totals, live_view
from gpuinfer.stats import merge_snapshots


def test_a_replica_that_starts_anew_adds_to_what_it_counted_before():
    lives, first, second = MonotonicCounters(), Server(1), Server(2)
    lives.saw(("0", "first"), first.step(requests=50))
    lives.saw(("1", "first"), second.step(requests=20))
    assert lives.total().requests == 70
    lives.only({("1", "first")})
    assert live_totals(lives.total())["requests"] == 70
    assert live_totals(lives.total())["output_tokens"] == 70 * 48
    lives.saw(("0", "second"), Server(3).step(requests=5))
    lives.saw(("1", "first"), second.step(requests=1))
    assert lives.total().requests == 76
    assert live_totals(lives.total())["output_tokens"] == 76 * 48


def test_a_life_that_has_ended_has_no_queue_no_slots_and_no_memory():
    lives = MonotonicCounters()
    lives.saw("a", Server(1).step())
    lives.ended("a")
    lives.ended("a")
    lives.ended("never seen")
    total = lives.total()
    assert (total.waiting, total.slots, total.rss_peak_mb) == (0, 0, 0)
    assert "allocated_mb" not in total.device
    assert total.requests == 40


def test_lanes_of_one_name_are_one_so_that_a_look_tells_their_shares():
    servers, lives = [Server(seed) for seed in range(3)], MonotonicCounters()
    for number, server in enumerate(servers):
        lives.saw(number, server.step(10.0))
    before = lives.total()
    assert [lane["name"] for lane in before.lanes] == ["forward 0", "prompts 0"]
    for number, server in enumerate(servers):
        lives.saw(number, server.step(10.0))
    shares = {place["station"]: place["share"] for place in live_view(lives.total(), before, 10.0)["places"]}
    assert shares["forward"] == pytest.approx(0.72, abs=0.05)


def test_tokens_of_replicas_add_up():
    total = merge_snapshots([Server(1).step(requests=5), Server(2).step(requests=7)])
    assert total.device["tokens"] == {"input": 12 * 120, "output": 12 * 48}
    assert total.device["name"].startswith("NVIDIA")
