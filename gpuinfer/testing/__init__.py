"""The conformance kit: what a plugin must keep to, checked; and the stand-ins with which its tests need not sleep.

    assert_ok(check_backend(lambda: EchoBackend()))                  # each promise of api.Backend, tried for real
    assert_ok(games.check_game(Nim))                                 # a game, in `gpuinfer.testing.games`
    assert Dynamic(max_wait=2.0).cut_at(waiting([1.0])) == 3.0       # a queue as a strategy sees it
    run_virtual(test())                                              # asyncio on a clock that jumps, never sleeps

`gpuinfer plugins check PACKAGE` runs `check_package`.
"""

from gpuinfer.testing.backends import check_backend
from gpuinfer.testing.fakes import FakeInfer, VirtualClock, VirtualLoop, run_virtual
from gpuinfer.testing.findings import Finding, assert_ok
from gpuinfer.testing.packages import check_package
from gpuinfer.testing.strategies import check_strategy, waiting
from gpuinfer.testing.workloads import check_workload

__all__ = [
    "FakeInfer",
    "Finding",
    "VirtualClock",
    "VirtualLoop",
    "assert_ok",
    "check_backend",
    "check_package",
    "check_strategy",
    "check_workload",
    "run_virtual",
    "waiting",
]
