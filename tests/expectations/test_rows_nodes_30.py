"""Rows and groups over many machines: what nodes answer is, put together, what one machine writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from cluster.list_feed import ListFeed

from gpuinfer.api import Progress, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.cluster.coordinator_core import CoordinatorCore
from gpuinfer.cluster.node_figures import ClusterFigures
from gpuinfer.cluster.range_policy import RangePolicy
from gpuinfer.division import Division, WorkRange
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.report.report import failures
from gpuinfer.rollouts.files import read
from gpuinfer.runtime.session import Session
from gpuinfer.serving.openai.model_options import model_fingerprint
from gpuinfer.stats import Snapshot
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.workloads.generate import generate_division
from gpuinfer.workloads.generate import workload as generate_workload
from gpuinfer.workloads.generate.workload import Generate
from gpuinfer.workloads.rollouts.workload import Rollouts

TINY = {"model": "tiny", "max_new_tokens": 5, "batch_size": 8}
WAIT_S = 120.0


def session(workload: Any) -> Session:
    setup = Setup(model=workload.model(), seed=workload.setup.seed)
    return Session(InProcess(setup), Dynamic(setup))


def generate(folder: Path, output: str = "out.jsonl", seed: int = 3, **options: Any) -> Generate:
    given = {"input": str(folder / "in.jsonl"), "output": f"{folder}/{output}", **TINY, **options}
    return Generate(Setup(seed=seed), **given)


def node_of(workload: Any) -> Any:
    """The workload as a node makes it."""
    return type(workload)(workload.setup, **json.loads(json.dumps(dict(workload.node_options()))))


async def alone(workload: Any) -> None:
    """The run of one machine."""
    async with session(workload) as infer:
        async for _ in workload.run(infer):
            pass


async def ranges_of(division: Division, most: int = 7) -> list[WorkRange]:
    """All of the input."""
    found = []
    while (work := await asyncio.wait_for(division.read(most), WAIT_S)) is not None:
        found += [work] if len(work) else []
    return found


async def on_node(workload: Any, ranges: Sequence[WorkRange]) -> ListFeed:
    """What one node makes of these ranges."""
    node = node_of(workload)
    feed = ListFeed(ranges, node.pack_records)
    async with session(node) as infer:
        async for _ in node.run_ranges(infer, feed):
            pass
    return feed


async def over_nodes(workload: Any, nodes: int = 2, *, leave: int = 0) -> list[WorkRange]:
    """The run of a coordinator and nodes, whose ranges come back in any order; `leave` of them never do, and the
    coordinator is stopped. All ranges.
    """
    division = workload.division()
    await asyncio.to_thread(division.open)
    ranges = await ranges_of(division)
    back = [pair for node in range(nodes) for pair in (await on_node(workload, ranges[node::nodes])).sent.items()]
    random.Random(5).shuffle(back)
    for (start, stop), records in back[: len(back) - leave]:
        await division.keep(WorkRange(start, stop), records)
    await division.flush()
    await division.close(not leave)
    return ranges


def rows(folder: Path, count: int = 8) -> None:
    """Rows of all kinds: with and without ids, duplicates, settings of their own, and errors of rows and prompts."""
    listed: list[Any] = []
    for number in range(count):
        listed += [
            {"id": f"r{number}", "prompt": f"prompt {number}"},
            f"a text {number % 7}",
            {"id": number, "prompt_token_ids": [number, 1, 2], "n": 1 + number % 3, "metadata": {"number": number}},
        ]
    listed[10] = {"id": "odd", "prompt": "x", "tempurature": 1}
    listed[11] = {"id": "r0", "prompt": "this id has come before"}
    listed[12] = {"id": "too long", "prompt": "word " * 4000}
    listed[13] = {"id": 2**70, "prompt": "a large number"}
    listed[14] = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "model": "m"}}
    text = "".join(json.dumps(one) + "\n" for one in listed) + "no JSON\n"
    (folder / "in.jsonl").write_text(text)


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
async def test_ordered_output_of_nodes_is_that_of_one_machine_to_the_byte(tmp_path: Path, output: str) -> None:
    rows(tmp_path)
    await alone(generate(tmp_path, f"one-{output}", ordered=True))
    await over_nodes(generate(tmp_path, output, ordered=True), 3)
    assert (tmp_path / output).read_bytes() == (tmp_path / f"one-{output}").read_bytes()
    assert not [one for one in os.listdir(tmp_path) if one.endswith((".early", ".journal"))]


async def test_unordered_output_of_nodes_has_the_lines_of_one_machine(tmp_path: Path) -> None:
    rows(tmp_path)
    await alone(generate(tmp_path, "one.jsonl"))
    ranges = await over_nodes(generate(tmp_path))
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert sorted(lines) == sorted((tmp_path / "one.jsonl").read_bytes().splitlines())
    assert sum(map(len, ranges)) == len(lines) - 3  # rows that cannot be read, or whose id has come, go to no node


async def test_a_folder_with_a_file_a_row_is_that_of_one_machine(tmp_path: Path) -> None:
    rows(tmp_path)
    await alone(generate(tmp_path, "one/"))
    await over_nodes(generate(tmp_path, "out/"))
    one, out = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "out"))
    assert one == out


async def test_rows_of_several_files_are_named_with_their_file_where_a_node_cannot_answer(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.jsonl").write_text('"a text"\n"another"\n')
    table = pyarrow.table({"prompt": ["a third", "word " * 4000], "lesson": [1, 2]})
    parquet.write_table(table, tmp_path / "b.parquet")
    options = {"input": f"{tmp_path}/[ab].*", "ordered": True}
    await alone(generate(tmp_path, "one.jsonl", **options))
    await over_nodes(generate(tmp_path, **options))
    lines = (tmp_path / "out.jsonl").read_bytes()
    assert lines == (tmp_path / "one.jsonl").read_bytes()
    assert json.loads(lines.splitlines()[-1])["error"]["file"] == f"{tmp_path}/b.parquet"


async def test_a_run_of_several_models_asks_on_a_node_the_model_that_its_row_names(tmp_path: Path) -> None:
    listed = [{"id": n, "prompt": f"prompt {n}", "model": ("one", "other")[n % 2]} for n in range(12)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    models = {"model": "one=tiny,other=null", "ordered": True}
    await alone(generate(tmp_path, "one.jsonl", **models))
    await over_nodes(generate(tmp_path, **models))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_coordinator_that_stops_leaves_what_a_resumed_run_goes_on_with(tmp_path: Path, ordered: bool) -> None:
    rows(tmp_path, 20)
    await alone(generate(tmp_path, "one.jsonl", ordered=ordered))
    first = await over_nodes(generate(tmp_path, ordered=ordered), leave=6)
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b'{"id": "torn in the mid')
    second = await over_nodes(generate(tmp_path, ordered=ordered, resume=True))
    assert 0 < sum(map(len, second)) < sum(map(len, first))
    found, wanted = ((tmp_path / name).read_bytes() for name in ("out.jsonl", "one.jsonl"))
    assert found == wanted if ordered else sorted(found.splitlines()) == sorted(wanted.splitlines())


async def test_what_one_machine_has_begun_nodes_go_on_with(tmp_path: Path) -> None:
    """Settings are the same with nodes and without, and errors alone are asked again where that is wished."""
    rows(tmp_path)
    await over_nodes(generate(tmp_path, ordered=True))
    before = (tmp_path / "out.jsonl").read_bytes()
    await alone(generate(tmp_path, ordered=True, resume=True))
    again = await over_nodes(generate(tmp_path, ordered=True, resume=True, retry_errors=True))
    assert sum(map(len, again)) == 1  # the prompt that is too long: other errors never come to a node
    assert (tmp_path / "out.jsonl").read_bytes() == before


async def test_a_node_that_is_to_stop_gives_what_is_under_way_and_takes_no_more(tmp_path: Path) -> None:
    rows(tmp_path, 60)
    workload = generate(tmp_path)
    division = workload.division()
    await asyncio.to_thread(division.open)
    ranges = await ranges_of(division, 50)
    node = node_of(workload)
    async with session(node) as infer:

        class StoppingFeed(ListFeed):
            async def take(self, most: int) -> WorkRange | None:
                if self.records:
                    infer.stopping.set()
                return await super().take(min(most, 5))

        feed = StoppingFeed(ranges, node.pack_records)
        async for _ in node.run_ranges(infer, feed):
            pass
    await division.close(False)
    assert 0 < len(feed.records) < sum(map(len, ranges))
    errors = [json.loads(record.line)["error"] for record in feed.records.values() if b'"error"' in record.line]
    assert [one for one in errors if one and one.get("type") == "failed"] == []


async def test_the_input_is_read_no_further_ahead_than_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    """And a silent input keeps nobody from handing in answers: a read that finds nothing gives an empty range."""
    monkeypatch.setattr(generate_division, "AHEAD", 100)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    workload = generate(tmp_path, input=f"/dev/fd/{reading}")
    division = workload.division()
    await asyncio.to_thread(division.open)
    assert len(await division.read(5)) == 0
    assert division.total is None
    written = 0
    while written < 8 << 20:
        try:
            written += os.write(writing, b'"a text that is always the same"\n' * 1000)
        except BlockingIOError:
            await asyncio.sleep(0.01)
            if division.counts.read >= 100:
                break
    held = division.counts.read
    await asyncio.sleep(0)
    assert held == division.counts.read < 100 + 2 * 512
    await division.close(False)
    os.close(writing)
    os.close(reading)


async def test_an_input_of_a_form_that_is_not_read_fails_the_run_and_no_node(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"%PDF-1.7 \x00\xff\n")
    os.close(writing)
    division = generate(tmp_path, input=f"/dev/fd/{reading}").division()
    await asyncio.to_thread(division.open)
    with pytest.raises(WorkError, match="--input"):
        await ranges_of(division)
    await division.close(False)
    os.close(reading)


async def test_lines_that_wait_for_an_earlier_one_are_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(generate_division, "HELD_BYTES", 1000)
    rows(tmp_path, 25)
    workload = generate(tmp_path, ordered=True)
    division = workload.division()
    await asyncio.to_thread(division.open)
    first, second = [await division.read(20) for _ in range(2)]
    assert len(first) == len(second) == 20
    sent = (await on_node(workload, [first, second])).sent
    await division.keep(WorkRange(second.start, second.stop), sent[second.start, second.stop])
    assert len(await division.read(20)) == 0  # the first range is missing
    await division.keep(WorkRange(first.start, first.stop), sent[first.start, first.stop])
    assert len(await division.read(20)) == 20
    await division.close(False)


async def test_a_run_with_more_lines_aside_than_may_wait_goes_on_with_the_first_that_is_missing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Lines of an earlier run wait as soon as they are read, for rows that no node has yet."""
    rows(tmp_path, 25)
    workload = generate(tmp_path, ordered=True)
    division = workload.division()
    await asyncio.to_thread(division.open)
    first, second = [await division.read(20) for _ in range(2)]
    sent = (await on_node(workload, [first, second])).sent
    await division.keep(WorkRange(second.start, second.stop), sent[second.start, second.stop])
    await division.close(False)
    monkeypatch.setattr(generate_division, "HELD_BYTES", 1000)
    division = (workload := generate(tmp_path, ordered=True, resume=True)).division()
    await asyncio.to_thread(division.open)
    work = await division.read(1)
    while not division.counts.ended:  # noqa: ASYNC110 (no event)
        await asyncio.sleep(0)
    (answers,) = (await on_node(workload, [work])).sent.values()
    await division.keep(WorkRange(work.start, work.stop), answers)
    assert len(await division.read(20)) > 0
    await division.close(False)


async def test_a_node_knows_other_weights_by_what_decides_an_answer(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(generate_workload, "model_fingerprint", model_fingerprint)  # other tests have put in another
    rows(tmp_path)
    workload = generate(tmp_path)
    division = workload.division()
    await asyncio.to_thread(division.open)
    assert node_of(workload).deciding("") == division.settings
    assert node_of(generate(tmp_path, model="null")).deciding("") != division.settings
    await division.close(False)


async def test_a_run_of_which_no_row_was_answered_fails_on_the_coordinator(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "' + "word " * 4000 + '"}\n')
    with pytest.raises(WorkError, match="not one of 1 rows was answered"):
        await over_nodes(generate(tmp_path))


async def test_answers_of_another_version_are_refused(tmp_path: Path) -> None:
    rows(tmp_path)
    division = generate(tmp_path).division()
    await asyncio.to_thread(division.open)
    work = await division.read(3)
    assert work is not None
    with pytest.raises(WorkError, match="one version"):
        await division.keep(work, b"something else")
    await division.close(False)


async def test_an_output_of_other_settings_is_refused_before_a_node_is_started(tmp_path: Path) -> None:
    rows(tmp_path)
    await alone(generate(tmp_path))
    with pytest.raises(UsageError, match="made with other settings"):
        generate(tmp_path, resume=True, max_new_tokens=9).division().open()


def seen(division: Division, kept: int) -> Progress:
    """What the coordinator shows once so many units of ranges are kept."""
    return ClusterFigures(0.0).progress(kept, total=division.total, unit="rows", besides=division.progress)


async def of_one(workload: Generate) -> Progress:
    """What one machine shows at the end."""
    async with session(workload) as infer:
        async for progress in workload.run(infer):
            last = progress
    return last


async def test_progress_and_failures_over_nodes_are_those_of_one_machine(tmp_path: Path) -> None:
    """Rows that cannot be read go to no node, and count; so does a row that fails on a node, as soon as it is kept."""
    rows(tmp_path)
    one = await of_one(generate(tmp_path, "one.jsonl", ordered=True))
    workload = generate(tmp_path, ordered=True)
    division = workload.division()
    await asyncio.to_thread(division.open)
    ranges = await ranges_of(division)
    for (start, stop), records in (await on_node(workload, ranges)).sent.items():
        await division.keep(WorkRange(start, stop), records)
    await division.close(True)
    many = seen(division, sum(map(len, ranges)))
    assert (many.done, many.total, many.before, many.failed) == (one.done, one.total, 0, one.failed)
    assert many.failed is not None
    assert many.failed > 3
    assert failures(many, Snapshot(), 0.0) == failures(one, Snapshot(), 0.0)


async def test_a_divided_run_that_goes_on_shows_the_rows_of_the_run_before(tmp_path: Path) -> None:
    rows(tmp_path)
    await over_nodes(generate(tmp_path, ordered=True), leave=2)
    done = (tmp_path / "out.jsonl").read_bytes().count(b"\n")
    division = generate(tmp_path, ordered=True, resume=True).division()
    await asyncio.to_thread(division.open)
    ranges = await ranges_of(division)
    shown = seen(division, 0)
    await division.close(False)
    assert shown.total == 25
    assert shown.before >= done
    assert shown.done == shown.before == 25 - sum(map(len, ranges))


async def test_the_first_failure_says_which_row_it_is(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('"a text"\n\nno JSON\n')
    division = generate(tmp_path).division()
    await asyncio.to_thread(division.open)
    await ranges_of(division)
    await division.close(False)
    assert division.progress.failure.startswith("row 2 (line 3): the row is not JSON")


def test_a_node_begins_no_more_than_its_share_of_a_short_run() -> None:
    """It takes all that it gets at once, and what is begun cannot be released. Nor does loading count as slowness."""
    core = CoordinatorCore(RangePolicy(nodes=2, least=8), total=None)
    core.expect(600)
    unread, given = iter(range(600)), [0, 0]

    def exchange(node: int, now: float) -> int:
        core.heard(node, now, 0, 0, 1280)
        fresh = core.grant(node, now).fresh
        if fresh:
            start = next(unread)
            for _ in range(fresh - 1):
                next(unread)
            core.lease(node, WorkRange(start, start + fresh), now)
            given[node] += fresh
        return fresh

    core.join(0, 0.0, name="first")
    while exchange(0, 0.0):
        pass
    assert given[0] <= 308
    core.join(1, 3.0, name="second")
    while exchange(1, 3.0):
        pass
    assert 250 <= given[1] <= 308


def test_the_time_in_which_a_node_loads_its_model_is_no_part_of_its_rate() -> None:
    core = CoordinatorCore(RangePolicy(nodes=1), total=10_000)
    core.join(0, 0.0, name="loads")
    work = WorkRange(0, core.grant(0, 0.0).fresh)
    core.lease(0, work, 0.0)
    for second in range(1, 60):
        core.heard(0, float(second), 0, len(work))
    core.heard(0, 60.0, 0, 0)
    core.heard(0, 61.0, len(work), 0)
    assert core.nodes[0].rate >= len(work) / 2


def rollouts(out: Path, **options: Any) -> Rollouts:
    given = {"env": "arithmetic", "model": "tiny", "groups": 5, "samples_per_group": 2, "max_new_tokens": 4}
    return Rollouts(Setup(seed=2), **given, batch_size=8, out=out, **options)


def records(out: Path) -> list[Any]:
    """The groups in their order, without their times and what was cached, which no two runs share."""
    plain = [msgspec.json.decode(msgspec.json.encode(group)) for group in read(out)]
    return sorted(map(without_times, plain), key=lambda group: group["number"])


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        timed = ("timing", "cached_tokens", "started", "seconds", "reference_s")
        return {name: without_times(one) for name, one in value.items() if name not in timed}
    return [without_times(one) for one in value] if isinstance(value, list) else value


async def play_over_nodes(workload: Rollouts, leave: int = 0) -> list[WorkRange]:
    """As `over_nodes`, of groups, two a range; a file holds the records of each second range."""
    division = workload.division()
    kept = await asyncio.to_thread(division.open)
    assert node_of(workload).deciding("") == division.settings
    ranges = await ranges_of(division, 2)
    back = [pair for node in range(2) for pair in (await on_node(workload, ranges[node::2])).sent.items()]
    for number, ((start, stop), packed) in enumerate(back[::-1][: len(back) - leave]):
        file = workload.options.out.parent / "range"
        if number % 2:
            file.write_bytes(packed)
        await division.keep(WorkRange(start, stop), file if number % 2 else packed)
        assert not file.exists()
    await division.close(not leave)
    assert sum(stop - start for start, stop in kept) + sum(map(len, ranges)) == division.total
    return ranges


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
async def test_groups_played_on_nodes_are_those_of_one_machine(tmp_path: Path, form: str) -> None:
    await alone(rollouts(tmp_path / "one", format=form))
    await play_over_nodes(rollouts(tmp_path / "out", format=form))
    assert [group["number"] for group in records(tmp_path / "out")] == list(range(5))
    assert records(tmp_path / "out") == records(tmp_path / "one")


async def test_rollouts_that_were_stopped_go_on_with_the_groups_that_are_missing(tmp_path: Path) -> None:
    await alone(rollouts(tmp_path / "one"))
    assert sum(map(len, await play_over_nodes(rollouts(tmp_path / "out"), leave=2))) == 5
    assert 0 < sum(map(len, await play_over_nodes(rollouts(tmp_path / "out", resume=True)))) < 5
    assert records(tmp_path / "out") == records(tmp_path / "one")


async def test_an_opponent_and_a_reference_play_on_nodes_as_on_one_machine(tmp_path: Path) -> None:
    given = {"reference": "inline", "opponent": ["policy=tiny"], "samples_per_group": 1, "groups": 3}

    def made(name: str) -> Rollouts:
        return Rollouts(Setup(seed=2), env="arithmetic", model="tiny", out=tmp_path / name, max_new_tokens=3, **given)

    await alone(made("one"))
    await play_over_nodes(made("out"))
    assert records(tmp_path / "out") == records(tmp_path / "one")


async def test_a_node_plays_the_groups_that_it_has_begun_to_their_end_when_it_is_to_stop(tmp_path: Path) -> None:
    workload = rollouts(tmp_path / "out", groups_in_flight=2)
    node = node_of(workload)
    async with session(node) as infer:

        class StoppingFeed(ListFeed):
            async def take(self, most: int) -> WorkRange | None:
                if self.records:
                    infer.stopping.set()
                    await asyncio.Event().wait()
                return await super().take(most)

        feed = StoppingFeed([WorkRange(0, 5)], node.pack_records)
        async for progress in node.run_ranges(infer, feed):
            assert progress.total is None
    assert 0 < len(feed.records) < 5


def test_a_trainer_and_nodes_are_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Leave --launcher out"):
        rollouts(tmp_path / "out", trainer_seconds=1.0).division()


async def test_groups_of_another_range_are_refused(tmp_path: Path) -> None:
    division = rollouts(tmp_path / "out").division()
    await asyncio.to_thread(division.open)
    for packed in (b'{"number": 3}\n{"number": 4}\n', b"nothing of the kind\n", b""):
        with pytest.raises(WorkError, match="one version"):
            await division.keep(WorkRange(0, 2), packed)
    await division.close(False)


SECONDS = 300  # after which a process that does not come further has failed
COUNT = 1500


class Divided:
    """`gpuinfer generate --ordered` over two local nodes, with rows from a pipe."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.out, self._log = folder / "out.jsonl", (folder / "log").open("ab")
        command = [sys.executable, "-m", "gpuinfer", "generate", "--no-roofline", "--no-live", *NULL]
        command += ["--input", "-", "--output", str(self.out), "--launcher", "local", "-L", "nodes=2", *words]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.seen = psutil.Process(self.process.pid)

    def __enter__(self) -> Divided:
        return self

    def __exit__(self, *error: object) -> None:
        for one in (*self.nodes(), self.process):
            one.kill()
        self.process.wait(SECONDS)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._log.close()

    def give(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def nodes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return [one for one in self.seen.children() if "node" in one.cmdline()]
        return []

    def until_answered(self, rows: int) -> None:
        end = time.monotonic() + SECONDS
        while not self.out.exists() or self.out.read_bytes().count(b"\n") < rows:
            assert self.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(SECONDS)


NULL = ("--model", "null", "--max-new-tokens", "3", "--ordered", "--seed", "4", "--batch-size", "32")


@pytest.fixture(scope="module")
def of_one_machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], bytes]:
    """Rows, and what one machine writes of them."""
    folder = tmp_path_factory.mktemp("plain")
    lines = [json.dumps({"id": n, "prompt": f"prompt {n}"}).encode() + b"\n" for n in range(COUNT)]
    (folder / "in.jsonl").write_bytes(b"".join(lines))
    command = [sys.executable, "-m", "gpuinfer", "generate", "--no-roofline", "--no-live", *NULL]
    command += ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
    return lines, (folder / "out.jsonl").read_bytes()


@pytest.mark.thorough
def test_rows_that_cannot_be_read_fail_a_divided_run_that_allows_none(tmp_path: Path) -> None:
    with Divided(tmp_path, "--max-failures", "0") as run:
        run.give(b'"a text"\nno JSON\n' + b'"another"\n' * 40)
        assert run.end() == 1
    assert "1 of 42 failed (2.4%), and --max-failures allows 0" in (tmp_path / "log").read_text()


@pytest.mark.thorough
def test_a_node_that_is_killed_loses_no_row(tmp_path: Path, of_one_machine: tuple[list[bytes], bytes]) -> None:
    lines, wanted = of_one_machine
    with Divided(tmp_path) as run:
        run.give(b"".join(lines[: COUNT // 2]))
        run.until_answered(COUNT // 4)
        run.nodes()[0].kill()
        run.give(b"".join(lines[COUNT // 2 :]))
        assert run.end() == 0, (tmp_path / "log").read_text()
    assert run.out.read_bytes() == wanted


@pytest.mark.thorough
def test_a_coordinator_that_is_killed_goes_on_with_what_is_on_the_disk_and_leaves_no_node(
    tmp_path: Path, of_one_machine: tuple[list[bytes], bytes]
) -> None:
    lines, wanted = of_one_machine
    with Divided(tmp_path) as run:
        run.give(b"".join(lines[: COUNT // 2]))
        run.until_answered(COUNT // 4)
        nodes = run.nodes()
        run.process.kill()
        assert psutil.wait_procs(nodes, SECONDS)[1] == []
    kept = run.out.read_bytes()
    assert wanted.startswith(kept[: kept.rfind(b"\n") + 1])
    with Divided(tmp_path, "--resume") as again:
        again.give(b"".join(lines))
        assert again.end() == 0, (tmp_path / "log").read_text()
    assert again.out.read_bytes() == wanted
