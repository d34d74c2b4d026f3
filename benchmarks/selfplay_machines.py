"""Self-play with one server as the simulator sees it: two machines, whose service times were measured, and the workers
that ask them.

A worker is a thread that searches one block while its others are in the model. A block of `rows` positions costs it
`rows × search_s`; with more workers than cores each is slower by that factor. The search takes no core from the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpuinfer.api import Limits
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.engine.arrivals import ClosedLoop, Mix
from gpuinfer.lab.simulate import SimulationOutcome, simulate
from gpuinfer.strategies.dynamic import Dynamic

DETERMINIZATIONS = 3  # rows of a game in flight, at most
EVALUATIONS = 1_072  # of a game of Blob, 4 players × 5 cards, 3 × 30 simulations: what the H100's run made of them
REQUEST_S = 10e-6  # the engine's own time for a request, docs/strategies.md
SEARCH_S = 0.7e-6  # a row: sixteen workers that searched for 40 % of their time gave an H100 8.9 million rows a second
ROUNDS, MOST_REQUESTS = 400, 100_000  # simulated: of each client so many requests, and no more in all


@dataclass(frozen=True)
class Machine:
    """`service` is what a batch takes in one of `in_flight` lanes."""

    name: str
    cores: int
    service: ServiceModel
    in_flight: int
    most_rows: int


# blobnet in float32, docs/benchmarks.md: 29,500 rows/s on both cores, a forward on each; 0.6 ms more a batch
CPU = Machine(
    "2 cores", 2, ServiceModel(alpha=68e-6, beta=0.6e-3, turn_request_s=REQUEST_S), in_flight=2, most_rows=4096
)
# blobnet in bfloat16, docs/benchmarks.md: 83 % busy at 8.9 million rows/s with all that is copied, 94 ns a row; the
# bare model's 178 µs at 2,048 rows and 2.37 ms at 65,536 leave 110 µs a batch. Two in flight share the device.
GPU = Machine(
    "H100, 16 cores",
    16,
    ServiceModel(alpha=94e-9, beta=110e-6, turn_request_s=REQUEST_S),
    in_flight=1,
    most_rows=65_536,
)


@dataclass(frozen=True)
class Play:
    """The parameters of a run. `games` are in flight, of all workers together."""

    workers: int
    games: int
    blocks: int = 2  # requests that each worker keeps under way
    request_rows: int | None = None  # of a request, with as many under way as the games have; None: all in the blocks
    max_rows: int | None = None  # None: as the machine has it
    max_wait_s: float | None = None  # None: learnt


USUAL = {CPU.name: Play(workers=2, games=1024), GPU.name: Play(workers=16, games=40_000)}


def simulated(machine: Machine, play: Play, seed: int = 0) -> SimulationOutcome:
    """The server of this machine with these workers. A request that does not fit a batch is made smaller."""
    most = min(play.max_rows or machine.most_rows, machine.most_rows)
    own_rows = max(1, play.games * DETERMINIZATIONS // play.workers)  # of a worker, at most
    blocks = play.blocks if play.request_rows is None else max(1, own_rows // play.request_rows)
    rows = min(most, max(1, own_rows // blocks))
    think_s = rows * SEARCH_S * max(1.0, play.workers / machine.cores)
    load = ClosedLoop(play.workers * blocks, think_s, mix=Mix((rows, rows)), blocks=blocks)
    requests = min(MOST_REQUESTS, max(2_000, ROUNDS * load.clients))
    strategy = partial(Dynamic, max_wait=play.max_wait_s)
    return simulate(load, machine.service, strategy, Limits(most, machine.in_flight), requests=requests, seed=seed)
