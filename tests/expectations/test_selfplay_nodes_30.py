"""Self-play that is divided over nodes leaves the folder of one machine, whatever is cut, reordered or killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from cluster.list_feed import ListFeed
from counts import examples
from forking import own_environment
from helpers import AtOnce
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.api import Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.division import WorkRange, intervals_of
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.library.game_folder import GameRecords
from gpuinfer.models import merged_records
from gpuinfer.models.positions import PARTS, PositionsFolder, positions_of, shards_of
from gpuinfer.models.record_shards import GameArrays, GameRecord, mapped_arrays, unpack_shard
from gpuinfer.runtime.run import run
from gpuinfer.workloads.selfplay.workload import SelfPlayWorkload

pytestmark = pytest.mark.usefixtures("children_forked")

WAIT_S = 120
GAMES = 60
SMALL = {"game": "connect-four", "model": "uniform", "simulations": 4, "workers": 2, "games": GAMES}
NETWORK = {"model": "blobnet-small", "deterministic": True, "games_in_flight": 16}
CUTS = [(30, 41), (0, 7), (41, 60), (7, 8), (8, 30)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Some ten games in each merged shard."""
    monkeypatch.setattr(merged_records, "SHARD_BYTES", 25_000)


def workload(**options):
    return SelfPlayWorkload(Setup(devices=("cpu",)), **{**SMALL, **options})


def played(work, backend=InProcess, **watched):
    served = backend(Setup(model=work.model(), devices=("cpu",), processes=work.processes))
    made = run(work, served, AtOnce(), roofline=False, **watched)
    assert made["status"] == "done"
    return made


def played_on_a_node(ranges, feed=None, backend=InProcess, watched=None, **options):
    """The bytes of these ranges, as real workers play them."""
    work = workload(**options)
    feed = feed or ListFeed([WorkRange(*one) for one in ranges], work.pack_records)
    work.run = lambda infer: work.run_ranges(infer, feed)
    played(work, backend, **(watched or {}))
    return feed.sent


def kept(division, parts, complete=True):
    """These parts in this order: what the coordinator does."""

    async def keep():
        for (start, stop), records in parts:
            await division.keep(WorkRange(start, stop), records)
        await division.close(complete)

    before = division.open()
    asyncio.run(keep())
    return before


def children():
    """The processes that this one and the fork server of the tests have started, but for the latter."""
    return {child for child in psutil.Process().children(recursive=True) if not child.children()}


def bytes_of(folder):
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def games_seen(folder):
    """How often a reader sees each game."""
    return Counter(
        itertools.chain.from_iterable(np.load(shard)["finished"].tolist() for shard in PositionsFolder(folder).shards())
    )


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    """The folder of a plain run, in shards of the same size."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merged_records, "SHARD_BYTES", 25_000)
        folder = tmp_path_factory.mktemp("plain") / "games"
        played(workload(out=folder, workers=0))
    return folder


@pytest.fixture(scope="module")
def parts_of(one_machine):
    """The bytes of any range, as a node would send them."""
    work, records = workload(out="games"), GameRecords(one_machine)
    shards = [GameArrays(mapped_arrays(shard)) for shard in shards_of(one_machine)]
    places = {
        number: GameRecord(shard, place) for shard in shards for place, number in enumerate(shard.numbers.tolist())
    }
    assert len(places) == len(records) == GAMES
    return lambda start, stop: work.pack_records([places[number] for number in range(start, stop)])


# The bytes of one machine


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="worker processes"),
        pytest.param({"model": "rollout", "workers": 0, "resign": 0.5}, id="players resign"),
        pytest.param({**NETWORK, "opponent_model": "uniform"}, id="network against none", marks=pytest.mark.thorough),
        pytest.param(NETWORK, id="network", marks=pytest.mark.thorough),
    ],
)
def test_a_divided_run_leaves_the_bytes_of_one_machine(options, tmp_path):
    plain, divided = tmp_path / "plain", tmp_path / "divided"
    report = played(workload(**options, out=plain))
    parts = [*played_on_a_node(CUTS[:2], **options, out=divided).items()]
    parts += played_on_a_node(CUTS[2:], **{**options, "workers": 0}, out=divided).items()
    division = workload(**options, out=divided).division()
    kept(division, parts)
    assert bytes_of(divided) == bytes_of(plain)
    assert len(shards_of(plain)) >= 3
    for section in ("strength", "resignation"):
        if report.get(section):
            wins = {"strength": "wins", "resignation": "resigned"}[section]
            assert division.facts()[f"{section}: {wins}"] == report[section][wins]


@settings(max_examples=examples(40), deadline=None)
@given(st.sets(st.integers(1, GAMES - 1), max_size=25), st.randoms(use_true_random=False), st.data())
def test_however_ranges_are_cut_and_in_whatever_order_they_come_the_folder_is_the_same(
    one_machine, parts_of, tmp_path_factory, cuts, chance, data
):
    folder = tmp_path_factory.mktemp("cut") / "games"
    parts = [(one, parts_of(*one)) for one in itertools.pairwise([0, *sorted(cuts), GAMES])]
    chance.shuffle(parts)
    stopped_after = data.draw(st.integers(0, len(parts)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merged_records, "SHARD_BYTES", 25_000)
        kept(workload(out=folder).division(), parts[:stopped_after], complete=False)
        there = [one for one, _ in parts[:stopped_after]]
        assert games_seen(folder) == Counter(number for start, stop in there for number in range(start, stop))
        before = kept(workload(out=folder, resume=True).division(), parts[stopped_after:])
        assert before == intervals_of(number for start, stop in there for number in range(start, stop))
    assert bytes_of(folder) == bytes_of(one_machine)
    shutil.rmtree(folder.parent)


def test_a_shard_holds_no_date_of_its_making(parts_of, tmp_path):
    (tmp_path / "part.npz").write_bytes(parts_of(0, 3))
    assert {info.date_time for info in zipfile.ZipFile(tmp_path / "part.npz").infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_files_of_ranges_are_moved_and_no_small_ones_stay(one_machine, parts_of, tmp_path):
    division = workload(out=tmp_path / "games").division()

    async def keep():
        ranges = tmp_path / "games" / ".ranges"
        ranges.mkdir()
        for number in random.Random(3).sample(range(GAMES), GAMES):
            file = ranges / f"{number}.npz"
            file.write_bytes(parts_of(number, number + 1))
            await division.keep(WorkRange(number, number + 1), file)
            assert not file.exists()
        parts = tmp_path / "games" / PARTS
        assert sum(one.stat().st_size for one in parts.iterdir()) < 30_000  # but for the last shard all are merged
        await division.close(True)

    division.open()
    asyncio.run(keep())
    assert bytes_of(tmp_path / "games") == bytes_of(one_machine)


# Nothing is lost, nothing twice


class Killed(BaseException):
    """In the place of a kill -9."""


@contextlib.contextmanager
def killed_before(step):
    """Before the operation of this number that changes the folder; yields how many there were."""
    done = itertools.count()
    count = [0]

    def counted(function):
        def call(*arguments, **keywords):
            count[0] = next(done) + 1
            if count[0] > step:
                raise Killed
            return function(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in ("rename", "unlink", "rmdir"):
            patched.setattr(Path, name, counted(getattr(Path, name)))
        patched.setattr(os, "fsync", counted(lambda descriptor: None))
        with contextlib.suppress(Killed):
            yield count


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 8))])
def test_a_coordinator_that_is_killed_at_any_step_counts_each_game_once(part, one_machine, parts_of, tmp_path):
    parts = [(one, parts_of(*one)) for one in [(40, 60), (0, 12), (25, 40), (12, 25)]]
    for step in itertools.count(part, 8):
        folder = tmp_path / str(step)
        with killed_before(step) as count:
            kept(workload(out=folder).division(), parts)
        gc.collect()  # what still holds the folder
        if count[0] <= step:
            break
        assert set(games_seen(folder).values()) <= {1}, f"after step {step}"
        division = workload(out=folder, resume=True).division()
        there = {number for start, stop in division.open() for number in range(start, stop)}
        asyncio.run(division.close(False))
        assert games_seen(folder) == Counter(there)
        left = [one for one in parts if one[0][0] not in there]
        kept(workload(out=folder, resume=True).division(), left)
        assert bytes_of(folder) == bytes_of(one_machine), f"after step {step}"
        shutil.rmtree(folder)
    assert step > 30


def test_a_worker_of_a_node_that_is_killed_loses_only_time(one_machine, tmp_path):
    killed, before = [], children()

    def kill(update):
        if not killed and update.progress.done:
            killed.append(min(children() - before, key=lambda child: child.pid))
            killed[0].kill()

    options = {"simulations": 40, "games_in_flight": 8}
    parts = played_on_a_node(CUTS, watched={"on_update": kill, "update_s": 0.01}, out=tmp_path / "games", **options)
    assert len(killed) == 1
    kept(workload(out=tmp_path / "games", **options).division(), parts.items())
    played(workload(out=tmp_path / "plain", **{**options, "workers": 0}))
    assert bytes_of(tmp_path / "games") == bytes_of(tmp_path / "plain")


class OneAtATime(ListFeed):
    """Gives a range when all units of the one before are done, as between two versions of the weights."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.all_done = asyncio.Event()

    async def take(self, most):
        if len(self.records) < sum(len(one) for one in self._ranges) - sum(len(one) for one in self._left):
            self.all_done.clear()
            await asyncio.wait_for(self.all_done.wait(), WAIT_S)
        return await super().take(most)

    def done(self, number, record):
        super().done(number, record)
        if len(self.records) == sum(len(one) for one in self._ranges) - sum(len(one) for one in self._left):
            self.all_done.set()


def test_a_node_that_waits_for_games_sends_all_records_that_it_has_and_names_their_weights(tmp_path):
    work = workload(out=tmp_path / "games")
    feed = OneAtATime([WorkRange(0, 25, (), "iteration-1"), WorkRange(25, 60, (), "iteration-2")], work.pack_records)
    sent = played_on_a_node((), feed, out=tmp_path / "games", workers=0)
    kept(workload(out=tmp_path / "games").division(), sent.items())
    versions = GameRecords(tmp_path / "games").arrays()["version"]
    assert versions.tolist() == 25 * ["iteration-1"] + 35 * ["iteration-2"]
    assert len(positions_of([tmp_path / "games"])) > GAMES


def test_records_that_came_damaged_are_refused(parts_of, tmp_path):
    division = workload(out=tmp_path / "games").division()
    division.open()
    damaged = bytearray(parts_of(0, 5))
    damaged[len(damaged) // 2] ^= 0xFF
    for start, records in ((0, bytes(damaged)), (1, parts_of(0, 5)), (0, b"")):
        with pytest.raises(WorkError, match=r"came damaged .* run again with --resume"):
            asyncio.run(division.keep(WorkRange(start, start + 5), records))
    asyncio.run(division.close(False))
    assert not list(PositionsFolder(tmp_path / "games").shards())


# With runs of one machine


def test_a_cluster_goes_on_with_a_folder_of_a_plain_run_and_the_other_way_round(one_machine, parts_of, tmp_path):
    folder = tmp_path / "games"
    played(workload(out=folder, games=20, workers=0))
    kept(workload(out=folder, resume=True).division(), [((35, 50), parts_of(35, 50))], complete=False)
    played(workload(out=folder, resume=True, workers=0))
    assert bytes_of(folder) == bytes_of(one_machine)
    with pytest.raises(UsageError, match="Ask for 60 or more"):
        workload(out=folder, resume=True, games=59).division().open()


def test_shards_that_a_killed_plain_run_left_are_merged_too(one_machine, parts_of, tmp_path):
    folder = PositionsFolder(tmp_path / "games")
    folder.open(workload(out=folder.path).deciding(""), resume=False)
    for numbers in ([5, 1, 3], [0, 9, 2, 4], [*range(20, 40)]):
        ends = [unpack_shard(parts_of(number, number + 1)) for number in numbers]
        folder.write({name: np.concatenate([one[name] for one in ends]) for name in ends[0]})
    folder.release()
    rest = [(6, 9), (10, 20), (40, 60)]
    kept(workload(out=folder.path, resume=True).division(), [(one, parts_of(*one)) for one in rest])
    assert bytes_of(folder.path) == bytes_of(one_machine)


# What is refused, and what is counted


def test_a_node_with_other_weights_or_rules_differs_in_what_decides(tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(3)}, weights)
    options = {"model": "blobnet-small", "weights": weights}
    division = workload(**options).division()
    assert division.open() == ()
    assert division.settings == workload(**options).deciding("float32")
    torch.save({"a": torch.ones(3)}, weights)
    assert division.settings != workload(**options).deciding("float32")
    assert division.settings != workload().deciding("float32")


def test_without_a_folder_games_are_counted_and_thrown_away():
    sent = played_on_a_node(CUTS, workers=0)
    assert set(sent.values()) == {b""}
    division = workload().division()
    assert kept(division, sent.items()) == ()
    assert (division.folder, division.facts()) == (None, {})


def test_how_games_ended_is_counted_without_a_folder():
    options = {"model": "rollout", "simulations": 10, "resign": 0.3, "resign_check": 0.5, "workers": 0}
    sent = played_on_a_node(CUTS, **options)
    assert all(len(records) < 4000 for records in sent.values()), "no searched moves in them"
    division = workload(**options).division()
    kept(division, sent.items())
    expected = played(workload(**options))["resignation"]
    assert expected["resigned"] > 0
    for name in ("games", "resigned", "would_have_resigned", "false"):
        assert division.facts()[f"resignation: {name}"] == expected[name]


def test_what_nodes_cannot_import_is_refused():
    with pytest.raises(UsageError, match="Name it: module:factory"):
        SelfPlayWorkload(Setup(), source=object(), **SMALL).division()


def test_every_folder_of_a_whole_run_is_merged_and_is_read_as_before(one_machine, tmp_path):
    names = [shard.name for shard in shards_of(one_machine)]
    assert names[0] == "shard-000000000000.npz"
    assert all(len(name) == len(names[0]) for name in names)
    records = GameRecords(one_machine)
    assert [game.number for game in records] == [*range(GAMES)]
    assert len(positions_of([one_machine])) == sum(len(game) for game in records)
    assert not (one_machine / PARTS).exists()


def test_what_a_killed_run_had_set_apart_is_seen_by_the_next_reader(parts_of, tmp_path):
    folder = tmp_path / "games"
    division = workload(out=folder).division()
    division.open()
    asyncio.run(division.keep(WorkRange(10, 14), parts_of(10, 14)))
    assert not list(PositionsFolder(folder).shards())
    assert len(GameRecords(folder)) == 0, "while the run goes on nobody else touches the folder"
    division._folder.release()  # as the end of its process does
    assert {game.number for game in GameRecords(folder)} == {10, 11, 12, 13}
    assert len(positions_of([folder])) > 4


# The whole command

COMMAND = "--game connect-four --model uniform --simulations 200 --games 1500 --workers 2 --quiet --out games"
ON_NODES = "--launcher local -L nodes=2"


def selfplay(words, folder):
    """The command, with all its processes in a group of their own."""
    command = [sys.executable, "-m", "gpuinfer", "selfplay", *words.split()]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=own_environment(), start_new_session=True, **streams)


def to_its_end(process):
    """Its exit code and what it said, with nothing of it left running."""
    try:
        _, errors = process.communicate(timeout=2 * WAIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the command leaves on one machine."""
    folder = tmp_path_factory.mktemp("whole")
    assert to_its_end(selfplay(COMMAND, folder)) == (0, "")
    return bytes_of(folder / "games")


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["worker", "node", "coordinator"])
def test_whatever_process_of_a_real_run_is_killed_the_folder_is_that_of_one_machine(victim, whole, tmp_path):
    folder = tmp_path / "games"
    process = selfplay(f"{COMMAND} {ON_NODES}", tmp_path)
    until = time.monotonic() + WAIT_S
    while not any(folder.glob(f"{PARTS}/shard-*.npz")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    tree = psutil.Process(process.pid).children(recursive=True)
    of = {"worker": "spawn_main", "node": "gpuinfer node", "coordinator": ""}[victim]
    chosen = next(child for child in tree if of in " ".join(child.cmdline())) if of else process
    chosen.kill()
    code, errors = to_its_end(process)
    _, alive = psutil.wait_procs(tree, timeout=WAIT_S)
    assert not alive, "nothing is left running"
    if victim == "coordinator":
        assert set(games_seen(folder).values()) <= {1}
        code, errors = to_its_end(selfplay(f"{COMMAND} {ON_NODES} --resume", tmp_path))
    assert code == 0, errors
    assert bytes_of(folder) == whole
