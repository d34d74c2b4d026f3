"""Clients that ask, wait, think and ask again: no knob is needed, however long they think."""

from __future__ import annotations

from functools import partial

import pytest

from gpuinfer.api import Limits
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import ClosedLoop, simulate
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic

CARD = ServiceModel(alpha=50e-6, beta=2e-3, jitter=0.05)
BETAS = (0.0, 0.25, 0.5, 1.0, 2.0)  # waits that are tried by hand, in fixed costs


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [Dynamic, Adaptive])
@pytest.mark.parametrize("constant", [False, True], ids=["exponential", "constant"])
@pytest.mark.parametrize("think", [0.02, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(("clients", "lanes"), [(8, 1), (64, 1), (64, 2)])
def test_no_fixed_wait_is_much_better(strategy, constant, think, clients, lanes):
    load = ClosedLoop(clients, think * CARD.beta, constant=constant)
    run = partial(simulate, load, CARD, limits=Limits(64, lanes), requests=2500, seed=2)
    fixed = max(run(strategy=partial(Dynamic, max_wait=wait * CARD.beta)).served_rows_per_s for wait in BETAS)
    assert run(strategy=strategy).served_rows_per_s >= 0.97 * fixed
