"""What users of a loop on many machines expect: matches and training with any backend, and how long it will take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from forking import Forked, own_environment
from safetensors.numpy import load_file
from train.train_models import positions

from gpuinfer.api import Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.fleet import FleetBackend
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.cluster.coordinator_core import CoordinatorCore
from gpuinfer.cluster.node_feed import NodeFeed
from gpuinfer.cluster.range_policy import RangePolicy
from gpuinfer.division import Division, WorkRange, intervals_of
from gpuinfer.errors import BackendDied, BackendError, UsageError
from gpuinfer.gradients import TrainingBatch
from gpuinfer.lab.loop import cluster_games, loop_summary
from gpuinfer.lab.loop.loop_division import LoopDivision
from gpuinfer.lab.loop.loop_runner import LoopPlan, run_loop
from gpuinfer.lab.loop.loop_times import LoopTimes, times_line
from gpuinfer.models.data_parallel import split_batch
from gpuinfer.models.load import write_weights
from gpuinfer.models.positions import PositionsFolder, positions_of
from gpuinfer.report import plotting
from gpuinfer.runtime.run import execute
from gpuinfer.runtime.session import Session
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.workloads.optimizer import TrainingFolder
from gpuinfer.workloads.selfplay.workload import SelfPlayWorkload
from gpuinfer.workloads.train import Train

pytestmark = pytest.mark.usefixtures("children_forked")

WAIT_S = 120
COMMAND = str(Path(__file__).parent.parent / "loop" / "loop_command.py")


def played(folder, kind, weights, games=4, **options):
    """A match of two networks of one name, each with its own weights, by worker processes: its report."""
    play = SelfPlayWorkload(
        Setup(seed=3),
        game="connect-four",
        model="blobnet-small",
        weights=weights[0],
        opponent_model="blobnet-small",
        opponent_weights=weights[1],
        games=games,
        simulations=4,
        workers=2,
        out=folder,
        deterministic=True,
    )
    setup = Setup(model=play.model(), processes=play.processes, deterministic=True)
    done = execute(play, kind(setup, **options), Dynamic(setup), roofline=False)
    return asyncio.run(asyncio.wait_for(done, WAIT_S))


@pytest.fixture
def two_weights(tmp_path):
    model = SelfPlayWorkload(game="connect-four", model="blobnet-small").model()
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for seed, file in enumerate(files):
        write_weights(model, seed, file)
    return files


@pytest.mark.parametrize(
    "kind", [Central, pytest.param(FleetBackend, marks=pytest.mark.thorough)], ids=["central", "fleet"]
)
def test_two_networks_play_on_servers_the_games_that_they_play_in_process(tmp_path, two_weights, kind):
    report = played(tmp_path / "served", kind, two_weights)
    assert (report["status"], report["strength"]["games"]) == ("done", 4)
    names = {"blobnet-small (one.safetensors)", "blobnet-small (other.safetensors)"}
    assert {line["name"] for line in report["models"] if line["rows"]} == names, "a line for each, and both were asked"
    right = played(tmp_path / "right", InProcess, two_weights)
    found, expected = (positions_of([tmp_path / name]) for name in ("served", "right"))
    for name in ("observation", "policy", "value"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert report["strength"] == right["strength"]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    written = PositionsFolder(folder)
    written.open({"game": "made up", "game_options": {}}, resume=False)
    written.write(positions(300))
    written.close(300)
    return folder


def trained(records, out, kind=InProcess, devices=("cpu",), steps=12, until=None, **options):
    """The weights that come of a training, and its report. `until` is called with each update."""
    work = Train(
        Setup(seed=5, devices=devices),
        records=[records],
        out=out,
        model="blobnet-small",
        steps=steps,
        batch_size=33,
        learning_rate=0.003,
        warmup_steps=2,
        checkpoint_every=1000,
        picture=False,
        resume=out.exists(),
    )
    setup = Setup(model=work.model(), seed=5, devices=devices)
    backend = kind(setup, threads=1, **options)
    more = {} if until is None else {"on_update": until, "update_s": 0.01}
    done = execute(work, backend, Dynamic(setup), roofline=False, **more)
    report = asyncio.run(asyncio.wait_for(done, WAIT_S))
    return load_file(out / "weights.safetensors"), report


def losses(out):
    return [row["loss"] for row in plotting.read_losses(out / plotting.LOSS_FILE) if "loss" in row]


def training_processes():
    return [one for one in multiprocessing.active_children() if "training" in one.name]


def test_training_on_two_devices_has_the_losses_of_one(records, tmp_path):
    """Torch's DistributedDataParallel over gloo: 33 rows a batch, which are 16 and 17."""
    one, _ = trained(records, tmp_path / "one")
    two, report = trained(records, tmp_path / "two", devices=("cpu", "cpu"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    for name, weight in one.items():
        assert np.allclose(two[name], weight, atol=1e-4), name
    rows = {name: device["rows"] for name, device in report["device"]["devices"].items()}
    assert rows == {"cpu:0": 12 * 16, "cpu:1": 12 * 17}
    assert training_processes() == [], "nothing is left running"
    assert not torch.distributed.is_initialized()


def test_training_whose_second_process_is_killed_says_so_and_goes_on_from_its_last_step(records, tmp_path):
    def kill(update):
        if update.progress.done >= 3:
            for one in training_processes():
                one.kill()

    with pytest.raises(BackendDied, match=r"trains on cpu \(rank 1\) was killed .* --resume"):
        trained(records, tmp_path / "out", devices=("cpu", "cpu"), steps=20_000, until=kill)
    assert training_processes() == [], "nothing is left running"
    step, _, _ = TrainingFolder(tmp_path / "out").last()
    assert step >= 3, "what was trained is kept, though no checkpoint was due"


def test_training_on_a_central_server_is_that_of_this_process_bit_for_bit(records, tmp_path):
    one, _ = trained(records, tmp_path / "one")
    served, report = trained(records, tmp_path / "served", Central)
    assert (report["status"], report["errors"]["failed"]) == ("done", 0)
    assert report["batches"]["count"] > 12, "the server's passes are counted"
    for name, weight in one.items():
        assert np.array_equal(served[name], weight), name


def test_training_whose_server_is_killed_says_so_and_keeps_its_last_step(records, tmp_path):
    def kill(update):
        if update.progress.done >= 3:
            for one in training_processes():
                one.kill()

    with pytest.raises(BackendDied, match="server process that trains was killed"):
        trained(records, tmp_path / "out", Central, steps=20_000, until=kill)
    step, _, _ = TrainingFolder(tmp_path / "out").last()
    assert step >= 3


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        pytest.param(Central, {"restart": True}, "goes on with --resume", id="a server that is brought back"),
        pytest.param(InProcess, {"in_flight": 2}, "one batch at a time", id="two batches at once"),
    ],
)
def test_what_training_cannot_have_is_refused(records, tmp_path, kind, options, message):
    with pytest.raises(UsageError, match=message):
        trained(records, tmp_path / "out", kind, **options)


def test_a_batch_of_fewer_rows_than_devices_is_refused():
    rows = np.zeros((1, 4), np.float32)
    with pytest.raises(BackendError, match="at least --batch-size 2"):
        split_batch(TrainingBatch(rows, {}), 2)


@pytest.mark.parametrize("kind", [InProcess, Central])
def test_a_network_of_rows_takes_other_weights_while_it_serves(two_weights, kind):
    """The answers are those of a server that began with them, bit for bit, and no process is started again."""
    model = SelfPlayWorkload(game="connect-four", model="blobnet-small").model()
    rows = np.random.default_rng(1).random((16, model.inputs)).astype(model.input_dtype)

    async def answers(weights, then):
        setup = Setup(model=replace(model, weights=str(weights)), deterministic=True)
        async with Session(kind(setup, threads=1, in_flight=1), Dynamic(setup)) as infer:
            found = [await infer(rows, rows=16)]
            for version, other in enumerate(then):
                await infer.update(str(version), str(other))
                found.append(await infer(rows, rows=16))
            with pytest.raises(UsageError):
                await infer.update("broken", __file__)
            found.append(await infer(rows, rows=16))
            return found

    one, other = two_weights
    first, second, again, last = asyncio.run(asyncio.wait_for(answers(one, [other, one]), WAIT_S))
    right, _ = asyncio.run(asyncio.wait_for(answers(other, []), WAIT_S))
    for place in range(2):  # policy and value
        assert np.array_equal(second[place], right[place])
        assert np.array_equal(again[place], first[place])
        assert np.array_equal(last[place], again[place]), "weights that do not fit leave the old ones in force"
        assert not np.array_equal(first[place], second[place])


@pytest.fixture
def plan(tmp_path):
    return LoopPlan(
        folder=tmp_path / "loop",
        model="blobnet-small",
        iterations=500,
        games=30,
        temperature_moves=16,
        window=2,
        training_steps=20,
        batch_size=32,
        learning_rate=1e-3,
        evaluation_games=60,
        evaluate_every=50,
        seed=7,
    )


def test_a_loop_projects_its_time_from_the_first_iteration_on(plan):
    times = LoopTimes(plan)
    steps = plan.steps()
    assert times.document() is None, "nothing is known yet"
    times.ended(next(steps), 520.0)
    assert times.document() is None, "how long training takes is not known"
    times.ended(next(steps), 100.0)
    found = times.document()
    assert found["projection"] == "500 iterations: 3.7 days, of which self-play 81 %"
    assert found["kinds"]["match"]["seconds"] == 10 * 2 * 520.0, "ten matches of twice the games, each as long"
    assert sum(one["share"] for one in found["kinds"].values()) == pytest.approx(1)
    assert found["done_s"] == 620.0
    assert found["seconds"] == pytest.approx(sum(one["seconds"] for one in found["kinds"].values()))
    assert times_line(found) == "self-play 8 min 40 s (81 %), training 1 min 40 s (16 %), match 21 s (3 %)"


def test_a_loop_that_goes_on_knows_how_long_it_took_before_it_was_stopped(plan, tmp_path):
    program = [sys.executable, COMMAND, str(tmp_path / "journal"), "done"]
    steps = list(plan.steps())[:4]
    run_loop(steps, False, lambda step: None, lambda step, report, seconds: None, program)
    document = loop_summary.loop_document(plan, {}, "gpuinfer loop --out loop", "partial")
    time = document["time"]
    assert (time["iterations"], time["done_s"], time["kinds"]["games"]["step_s"]) == (500, 12.0, 3.0)
    page = loop_summary.loop_page(document, {})
    assert time["projection"] in page.markdown()
    assert [row[0] for row in page.more[0].rows] == ["self-play", "training", "match", "all"]
    assert json.loads(json.dumps(document)) == document


class KeptGames(Division):
    """Stands in for the folder of an iteration: what it holds is lost with it."""

    def __init__(self, folder):
        self.path = folder

    total = settings = None

    def open(self):
        self.path.mkdir(parents=True, exist_ok=True)
        return intervals_of(int(one) for path in self.path.glob("*.npz") for one in np.load(path)["finished"])

    async def read(self, most):
        raise NotImplementedError

    async def keep(self, work, records):
        numbers = np.arange(work.start, work.stop)
        np.savez(self.path / f"{work.start}.npz", finished=numbers, version=np.array([records.decode()] * len(work)))

    async def close(self, complete):
        pass


class PlayedLoop:
    """A division of a loop's games, and who plays them."""

    def __init__(self, plan, max_staleness):
        self.plan, self.played = plan, []
        self.division = LoopDivision(
            plan, lambda one: KeptGames(plan.of(one) / "games"), dict, max_staleness, self.played.append
        )
        self.kept = self.division.open()

    async def play(self, games):
        """The versions and iterations of up to so many games, which are kept."""
        found = []
        while games > 0 and (work := await self.division.read(games)):
            await self.division.keep(replace_version(work), work.version.encode())
            found.append(((work.start // self.plan.games) + 1, int(work.version), len(work)))
            games -= len(work)
        return found


def replace_version(work):
    """As the coordinator hands it on."""
    return WorkRange(work.start, work.stop)


@pytest.fixture
def short(plan):
    return replace(plan, iterations=4, games=10)


async def test_an_iterations_games_are_all_of_its_weights_and_wait_for_them(short):
    loop = PlayedLoop(short, max_staleness=0)
    assert await loop.play(100) == [(1, 0, 10)]
    assert (await loop.division.read(5), loop.division.open_until) == (WorkRange(10, 10), 10)
    assert loop.played == [1]
    loop.division.published = 1
    assert await loop.play(4) == [(2, 1, 4)]
    assert await loop.play(100) == [(2, 1, 6)]
    assert loop_summary.loop_document(short, {}, "", "partial")["staleness"] == {"0": 20}


def test_weights_that_are_there_before_the_nodes_run_has_begun_open_their_games(short, monkeypatch):
    opened, go_on, seen = threading.Event(), threading.Event(), []

    class Beginning:
        def __init__(self, division, *_):
            self._division = division

        async def __aenter__(self):
            opened.set()
            assert await asyncio.to_thread(go_on.wait, 60)
            return self

        async def __aexit__(self, *_):
            pass

        def look_again(self):
            seen.append(self._division.open_until)

        async def follow(self, stopping):
            await stopping.wait()
            yield None

    monkeypatch.setattr(cluster_games, "Coordinator", Beginning)
    with cluster_games.ClusterGames(short, lambda one: KeptGames(short.of(one)), dict, None, None, 0) as games:
        assert opened.wait(60)
        games.step_ended(next(step for step in short.steps() if step.kind == "training"))
        go_on.set()
    assert seen == [2 * short.games]


async def test_an_asynchronous_loop_plays_on_with_older_weights_up_to_the_bound(short):
    loop = PlayedLoop(short, max_staleness=2)
    assert await loop.play(100) == [(1, 0, 10), (2, 0, 10), (3, 0, 10)], "and then waits"
    loop.division.published = 2
    assert await loop.play(100) == [(4, 2, 10)]
    assert await loop.division.read(1) is None
    assert loop.played == [1, 2, 3, 4]
    document = loop_summary.loop_document(short, {}, "", "done")
    assert document["staleness"] == {"0": 10, "1": 20, "2": 10}
    page = loop_summary.loop_page(document, {})
    assert (page.table.columns[-1], page.table.rows[2][-1]) == (loop_summary.STALENESS, "100 % by 2")


async def test_a_loop_that_was_killed_plays_each_game_once(short):
    loop = PlayedLoop(short, max_staleness=1)
    await loop.play(13)
    resumed = PlayedLoop(short, max_staleness=1)
    assert list(resumed.kept) == [(0, 10), (10, 13)]
    assert await resumed.play(100) == [(2, 0, 7)]
    numbers = [int(one) for path in short.folder.rglob("*.npz") for one in np.load(path)["finished"]]
    assert sorted(numbers) == list(range(20))


async def test_an_iteration_that_was_kept_to_the_end_as_the_loop_was_killed_is_reported(short):
    folder = KeptGames(short.of(1) / "games")
    folder.open()
    await folder.keep(WorkRange(0, 10), b"000000")
    loop = PlayedLoop(short, max_staleness=0)
    await loop.division.finish_kept()
    assert loop.played == [1]
    assert json.loads((short.of(1) / "games.json").read_text())["status"] == "done"


async def test_a_node_changes_its_weights_between_two_versions_with_nothing_under_way():
    feed, used = NodeFeed(), []

    async def use(version):
        used.append((version, len(under_way)))

    under_way = set()
    feed.use_version = use
    feed.add([WorkRange(0, 2, (), "1"), WorkRange(2, 4, (), "2")])
    first = await feed.take(8)
    under_way.update(range(first.start, first.stop))
    waiting = asyncio.create_task(feed.take(8))
    for number in (0, 1):
        await asyncio.sleep(0)
        assert not waiting.done()
        under_way.discard(number)
        feed.done(number, b"")
    second = await asyncio.wait_for(waiting, WAIT_S)
    assert (first, second) == (WorkRange(0, 2, (), "1"), WorkRange(2, 4, (), "2"))
    assert used == [("1", 0), ("2", 0)]


def test_ranges_get_smaller_towards_units_that_cannot_be_read_yet():
    def first_range(until):
        core = CoordinatorCore(RangePolicy(nodes=2, least=1), total=10_000)
        core.open_until(until)
        for node in (0, 1):
            core.join(node, 0.0, name=f"node {node}")
        core.lease(0, WorkRange(0, core.grant(0, 0.0).fresh), 0.0)
        return core.grant(1, 0.0).fresh, core

    late, core = first_range(3)
    assert 0 < late < first_range(None)[0]
    core.open_until(3 + 1_000)
    assert core.grant(1, 1.0).fresh > late


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--asynchronous", "Add --launcher NAME"),
        ("--max-staleness 2", "Add --asynchronous"),
        ("--launcher local -L nodes=2", "Add --backend central"),
    ],
)
def test_what_a_loop_on_nodes_cannot_have_is_refused_before_any_game(gpuinfer, empty_folder, words, message):
    code, out, err = gpuinfer("loop", "--game", "connect-four", "--out", "l", *words.split())
    assert (code, out, message in err) == (2, "", True), err
    assert not Path("l").exists()


LOOP = ["--game", "connect-four", "--games", "300", "--simulations", "16", "--training-steps", "6", "--iterations", "2"]
LOOP += ["--batch-size", "16", "--evaluation-games", "4", "--workers", "1", "--out", "l", "--launcher", "local"]
LOOP += ["-L", "nodes=2", "--backend", "central", "--training-device", "cpu,cpu"]


def node_processes(folder):
    """The processes of nodes whose loop works in this folder."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "--key-file" in one.cmdline() and one.cwd() == str(folder):
                found.append(one)
    return found


def wait_for(condition, process=None):
    end = time.monotonic() + 4 * WAIT_S
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_nodes_that_die_and_a_loop_that_is_killed_lose_no_game_and_bring_none_twice(tmp_path):
    def started(*words):
        return Forked(["gpuinfer", "loop", *LOOP, *words], tmp_path, own_environment(COLUMNS="160"), text=True)

    games = tmp_path / "l" / "iteration-001" / "games"
    with started() as process:
        wait_for(lambda: (games / ".parts").is_dir() or list(games.glob("*.npz")), process)
        nodes = node_processes(tmp_path)
        assert nodes
        nodes[0].kill()  # the other one, and the one in its place, play what it had
        wait_for(lambda: (tmp_path / "l" / "iteration-001" / "games.json").exists(), process)
        first = {one.pid for one in node_processes(tmp_path)}
        wait_for(lambda: (tmp_path / "l" / "iteration-001" / "training.json").exists(), process)
        assert first & {one.pid for one in node_processes(tmp_path)}, "nodes stay up over iterations"
        process.kill()
        process.communicate(timeout=WAIT_S)
    wait_for(lambda: not node_processes(tmp_path))
    with started("--resume", "--json", "-") as process:
        out, err = process.communicate(timeout=6 * WAIT_S)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert [one["games"] for one in document["iterations"]] == [300, 300]
    assert document["staleness"] == {"0": 600}
    for iteration in (1, 2):
        shards = sorted((tmp_path / "l" / f"iteration-00{iteration}" / "games").glob("*.npz"))
        arrays = [np.load(shard) for shard in shards]
        numbers = np.concatenate([one["finished"] for one in arrays]).tolist()
        assert numbers == list(range(300 * (iteration - 1), 300 * iteration))
        assert {str(one) for array in arrays for one in array["version"]} == {f"{iteration - 1:06d}"}
    wait_for(lambda: not node_processes(tmp_path))
