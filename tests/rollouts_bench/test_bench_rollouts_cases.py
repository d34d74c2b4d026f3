"""The cases: what they compare exists."""

from __future__ import annotations

import pytest

from gpuinfer.config import options, registry
from gpuinfer.errors import UnknownName
from gpuinfer.lab.rollouts_bench.rollouts_cases import CASES, SelectedCases, named
from gpuinfer.workloads.rollouts.options import RolloutsOptions


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_ways_of_different_names_whose_flags_there_are(name):
    case = CASES[name](SelectedCases())
    known = options.fields_of(RolloutsOptions)
    names = [way.name for way in case.ways]
    assert case.name == name
    assert len(set(names)) == len(names) >= 2
    for way in case.ways:
        backend = registry.load("backends", way.flags.get("backend", "inprocess"))
        assert set(way.flags) - {"backend"} <= set(known)
        assert set(way.backend) <= set(options.fields_of(backend.Options))
        RolloutsOptions(**{flag: value for flag, value in way.flags.items() if flag != "backend"})


def test_cases_are_made_in_one_order_whatever_was_named_first():
    assert named(["peak", "turns"]) == [CASES["turns"], CASES["peak"]]


def test_a_case_that_there_is_not_is_named():
    with pytest.raises(UnknownName, match=r"no case named 'peek'\. Did you mean 'peak'"):
        named(["peek"])


def test_depths_and_engines_are_as_many_as_wanted():
    wanted = SelectedCases(engines=(1, 3), depths=(2,))
    assert [way.name for way in CASES["engines"](wanted).ways] == ["1 engine", "3 engines"]
    assert [way.flags["buffer_depth"] for way in CASES["buffer"](wanted).ways] == ["2"]
