"""The cases: what they compare exists."""

from __future__ import annotations

import pytest

from gpuinfer.config import options, registry
from gpuinfer.errors import UnknownName
from gpuinfer.lab.rollouts_bench.rollouts_cases import CASES, SelectedCases, named_cases
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


def test_a_case_that_there_is_not_is_named():
    with pytest.raises(UnknownName, match=r"no case named 'peek'\. Did you mean 'peak'"):
        named_cases(["peek"])
