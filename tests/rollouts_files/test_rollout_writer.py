"""What a run of rollouts leaves on the disk: each group once, whatever ended the run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from record_draws import group_of, groups

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.rollouts import header, read
from gpuinfer.rollouts.files import Writer, parquet, shards
from gpuinfer.rollouts.record import Game, Group, Trajectory, Turn

HEADER = {"env": "toy", "seed": 1, "model": {"fingerprint": "f00d"}}
FORMS = ["jsonl", "parquet"]


def written(folder, numbers, form="jsonl", resume=False, on_the_way=lambda: None, **more):
    """What a run that plays these groups leaves; those that it found. `on_the_way` comes before it is closed."""

    async def run():
        writer = Writer(folder, form, HEADER, resume=resume, **more)
        found = writer.done
        for number in numbers:
            if number not in found:
                await writer.add(group_of(number))
        await writer.flush()
        on_the_way()
        await writer.close()
        return found

    return asyncio.run(run())


def in_folder(folder):
    return {group.number: group for group in read(folder)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shard_bytes", [1, 3000, 64 << 20], ids=["a shard a group", "some shards", "one shard"])
def test_what_was_added_is_read_in_its_order(tmp_path, form, shard_bytes):
    written(tmp_path, [3, 1, 2, 7, 5], form, shard_bytes=shard_bytes)
    assert list(read(tmp_path)) == [group_of(number) for number in (3, 1, 2, 7, 5)]
    assert header(tmp_path) == {**HEADER, "format": form}
    assert not list(tmp_path.glob("*.journal"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["groups"] == 5
    assert manifest["shards"] == sorted(path.name for path in tmp_path.glob("shard-*"))


async def test_a_folder_can_be_read_meanwhile_and_has_one_writer_with_the_same_settings(tmp_path):
    writer = Writer(tmp_path, "jsonl", HEADER)
    await writer.add(group_of(4))
    await writer.flush()
    assert list(read(tmp_path)) == [group_of(4)]
    with pytest.raises(ValueError, match="group 4 is there already"):
        await writer.add(group_of(4))
    with pytest.raises(UsageError, match="in use by another run"):
        Writer(tmp_path, "jsonl", HEADER, resume=True)
    await writer.close()
    with pytest.raises(UsageError, match=r"\(horizon: null there, 3 here; seed: 1 there, 2 here\)"):
        Writer(tmp_path, "jsonl", {**HEADER, "seed": 2, "horizon": 3}, resume=True)
    await Writer(tmp_path, "jsonl", HEADER, resume=True).close()


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(50))
@given(share=st.floats(0, 1))
def test_a_journal_that_ends_at_any_byte_gives_its_whole_groups(tmp_path_factory, form, share):
    folder = tmp_path_factory.mktemp("torn")
    killed = folder / "killed"
    written(folder / "all", range(4), form, on_the_way=lambda: shutil.copytree(folder / "all", killed))
    (journal,) = killed.glob("*.journal")
    left = journal.read_bytes()[: int(share * journal.stat().st_size)]
    journal.write_bytes(left)
    whole = set(range(left.count(b"\n")))
    assert set(in_folder(killed)) == whole
    assert written(killed, range(5), form, resume=True) == whole
    assert in_folder(killed) == {number: group_of(number) for number in range(5)}


PLAYER = """
import asyncio, sys
sys.path[:0] = {path!r}
from record_draws import group_of
from gpuinfer.rollouts.files import Writer

async def run():
    writer = Writer({folder!r}, {form!r}, {header!r}, resume={resume!r}, shard_bytes=20_000)
    for number in range({count}):
        if number not in writer.done:
            await writer.add(group_of(number, tokens=100))
            print(number, flush=True)
    await writer.close()

asyncio.run(run())
"""


@pytest.mark.parametrize("form", FORMS)
def test_each_group_is_there_once_after_kill_9(tmp_path, form):
    folder, count = tmp_path / "out", 40
    for kill, resume in ((9, False), (20, True), (None, True)):
        facts = {"path": sys.path, "folder": str(folder), "form": form, "header": HEADER}
        code = PLAYER.format(**facts, resume=resume, count=count)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        if kill is None:
            assert child.wait(60) == 0
        else:
            while int(child.stdout.readline()) < kill:
                pass
            os.kill(child.pid, signal.SIGKILL)
            child.wait(60)
        child.stdout.close()
    assert [group.number for group in read(folder)] == list(range(count))
    assert all(group == group_of(group.number, tokens=100) for group in read(folder))


def test_a_journal_whose_shard_is_whole_counts_for_nothing(tmp_path):
    """A run was killed between the two."""
    kept = tmp_path / "kept"
    written(tmp_path / "out", range(3), "parquet", on_the_way=lambda: shutil.copytree(tmp_path / "out", kept))
    (journal,) = kept.glob("*.journal")
    shutil.copy(journal, tmp_path / "out")
    assert len(list(read(tmp_path / "out"))) == 3
    assert written(tmp_path / "out", range(4), "parquet", resume=True) == {0, 1, 2}
    assert [group.number for group in read(tmp_path / "out")] == list(range(4))
    assert not list((tmp_path / "out").glob("*.journal"))


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path, form):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(
            WorkError, match=r"What was finished before is kept\. Free some space, then run again"
        ) as told:
            written(tmp_path, range(50), form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert str(tmp_path) in str(told.value)
    kept = set(in_folder(tmp_path))
    assert kept == set(range(len(kept)))
    assert len(kept) > 1
    assert written(tmp_path, range(50), form, resume=True) == kept
    assert in_folder(tmp_path) == {number: group_of(number) for number in range(50)}


@pytest.mark.parametrize(("form", "kept"), [("jsonl", {0, 2}), ("parquet", set())])
def test_what_is_damaged_is_set_aside_and_its_groups_are_played_again(tmp_path, form, kept):
    """A damaged line costs its own group alone, a damaged table all of its groups."""
    written(tmp_path, range(3), form)
    shard = tmp_path / f"shard-000000.{form}"
    data = bytearray(shard.read_bytes())
    data[data.index(b"\n") + 40 if form == "jsonl" else len(data) // 3] ^= 0xFF
    shard.write_bytes(data)
    with pytest.raises(UsageError, match=r"line 2: this is no group|is damaged .*--resume"):
        list(read(tmp_path))
    assert written(tmp_path, range(3), form, resume=True) == kept
    assert in_folder(tmp_path) == {number: group_of(number) for number in range(3)}
    assert (tmp_path / "shard-000000.broken").exists()


async def test_what_no_file_holds_is_named(tmp_path):
    writer = Writer(tmp_path, "jsonl", HEADER)
    group = group_of(3)
    game = replace(group.games[1], metrics={"m": float("nan")})
    await writer.add(replace(group, games=(game,)))
    with pytest.raises(WorkError, match="a metric of group 3, sample 1 is not finite"):
        await writer.flush()
    with pytest.raises(WorkError):
        await writer.close()


@settings(max_examples=examples(40))
@given(st.lists(groups, min_size=1, max_size=3))
def test_groups_come_back_from_lines_and_from_a_table_as_they_were(tmp_path_factory, some):
    for group in some:
        line = shards.encode(group)
        assert (line.count(b"\n"), shards.decode(line)) == (1, group)
    path = tmp_path_factory.mktemp("table") / "shard.parquet"
    with path.open("wb") as file:
        parquet.write_groups(file, some)
    assert list(parquet.read_groups(path)) == some
    columns = set(parquet.table_schema().names)
    prefixes = {"group": Group, "game": Game, "trajectory": Trajectory, "": Turn}
    inner = {"group_games", "group_failed", "game_trajectories", "trajectory_turns"}
    named = {f"{prefix}_{name}".lstrip("_") for prefix, part in prefixes.items() for name in part.__struct_fields__}
    assert columns == (named - inner) | {"failed", "game", "trajectory", "turn"}  # all that is recorded


def test_parquet_without_its_package_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'gpuinfer\[parquet\]'"):
        written(tmp_path, [0], "parquet")
    assert not list(tmp_path.iterdir())
