"""What self-play leaves on disk: whole shards of what was promised, and folders that refuse what does not fit."""

from __future__ import annotations

import json
import os
import zipfile

import numpy as np
import pytest
from matches import arena_of, in_order, played, same

from gpuinfer.datasets import SelfPlayDataset
from gpuinfer.errors import UsageError
from gpuinfer.models.positions import PositionsFolder, checked
from gpuinfer.workloads.selfplay.games.blob import Blob

SETTINGS = {"game": "blob", "seed": 1, "options": {"players": 4}}


@pytest.fixture(scope="module")
def games():
    """Two lots of finished games."""
    arena = arena_of(Blob(), 4)
    return played(arena, range(10)), played(arena, range(10, 16))


@pytest.fixture
def folder(tmp_path, games):
    """A folder with two shards, closed."""
    folder = PositionsFolder(tmp_path / "games")
    folder.open(SETTINGS, resume=False)
    for part in games:
        folder.write(part)
    folder.close(16)
    return folder


def reopened(folder, settings=SETTINGS, resume=True):
    return PositionsFolder(folder.path).open(settings, resume=resume)


def test_a_shard_holds_what_is_documented_and_a_folder_remembers_its_games(folder, games):
    rows, seats = len(games[0]["game"]), 4
    expected = {
        "observation": ("uint8", (rows, 256)),
        "legal": ("bool", (rows, 52)),
        "policy": ("float32", (rows, 52)),
        "value": ("float32", (rows, seats)),
        "player": ("int8", (rows,)),
        "game": ("int64", (rows,)),
        "move": ("int16", (rows,)),
        "finished": ("int64", (10,)),
        "returns": ("float32", (10, seats)),
    }
    found = [dict(np.load(shard, allow_pickle=False)) for shard in folder.shards()]
    first = next(shard for shard in found if 0 in shard["finished"])
    assert {name: (str(array.dtype), array.shape) for name, array in first.items()} == expected
    assert same(in_order([first]), games[0])
    assert reopened(folder) == set(range(16))
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert (manifest["schema"], manifest["settings"], manifest["games"]) == ("gpuinfer.records/1", SETTINGS, 16)
    assert manifest["shards"] == sorted(shard.name for shard in folder.shards())


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_kept_nothing_decides_nothing(tmp_path, resume):
    """Such as one that was refused for its model: the next one has another, and no records to go on with."""
    path = tmp_path / "games"
    failed = PositionsFolder(path)
    failed.open({**SETTINGS, "model": "nets:misspelt"}, resume=False)
    (path / "shard-1.npz.tmp").write_bytes(b"half")
    failed.release()
    folder = PositionsFolder(path)
    assert folder.open(SETTINGS, resume) == set()
    assert [one.name for one in path.iterdir()] == ["manifest.json"]
    assert (folder.manifest() or {})["settings"] == SETTINGS


@pytest.mark.parametrize(
    ("manifest", "settings", "resume", "said"),
    [
        (None, SETTINGS, False, r"holds records already\. Add --resume"),
        (None, {**SETTINGS, "seed": 2, "size": 3}, True, r"\(seed: 1 there, 2 here; size: null there, 3 here\)"),
        (b"{", SETTINGS, True, "is not JSON"),
        (b"\xff", SETTINGS, True, "is not JSON"),
        (b"[]", SETTINGS, True, "is not of schema"),
        (b"{}", SETTINGS, True, "is not of schema"),
        (b'{"schema": "gpuinfer.records/2", "settings": {}}', SETTINGS, True, "is not of schema"),
        (b'{"schema": "gpuinfer.records/1"}', SETTINGS, True, "is not of schema"),
        (b"", SETTINGS, True, r"has shards but no manifest\.json"),
    ],
)
def test_a_folder_of_something_else_is_refused(folder, manifest, settings, resume, said):
    path = folder.path / "manifest.json"
    if manifest:
        path.write_bytes(manifest)
    elif manifest is not None:
        path.unlink()
    with pytest.raises(UsageError, match=said):
        reopened(folder, settings, resume)


def test_two_runs_cannot_write_to_one_folder(folder):
    first, second = PositionsFolder(folder.path), PositionsFolder(folder.path)
    first.open(SETTINGS, resume=True)
    with pytest.raises(UsageError, match=r"is in use by another run\. Wait for it"):
        reopened(folder)
    first.close(16)
    second.open(SETTINGS, resume=True)
    del second  # a run that fails never closes its folder
    reopened(folder)


def damaged(shard, how):
    content = bytearray(shard.read_bytes())
    if how == "flipped":
        with zipfile.ZipFile(shard) as archive:
            middle = archive.getinfo("policy.npy").header_offset + 1000
        content[middle] ^= 0xFF
    shard.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "text": b"no records"}.get(how, content))


@pytest.mark.parametrize("how", ["empty", "cut", "text", "flipped"])
def test_a_damaged_shard_is_named_to_readers_and_its_games_are_played_again(folder, how, caplog):
    shard = next(s for s in folder.shards() if 0 in np.load(s)["finished"])
    damaged(shard, how)
    if how != "flipped":
        with pytest.raises(UsageError, match=r"shard-\w+\.npz cannot be read .* --resume"):
            SelfPlayDataset(folder.path)
    assert reopened(folder) == set(range(10, 16))
    assert not shard.exists()
    assert shard.with_suffix(".broken").exists()
    assert "set aside" in caplog.text


def test_a_shard_with_objects_is_never_unpickled(folder):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(folder.path / "sprung"),)

    trap = np.array([Trap()], dtype=object)
    np.savez(folder.path / "shard-trap.npz", finished=trap, game=trap)
    assert reopened(folder) == set(range(16))
    assert not (folder.path / "sprung").exists()


@pytest.mark.parametrize(
    "pair",
    [
        ([1, 0], [1, 0]),
        ([1, 0, 2], [1, 1]),
        ([0, 1, 2], [1, 0]),  # the mask of legal actions stays
        ([1.0, 0.0, 2.0], [1, 0]),
        [1, 0, 2],
        (["b", "a", "c"], [1, 0]),
    ],
    ids=str,
)
def test_what_is_no_symmetry_is_refused_with_its_number(pair):
    good = ([1, 0, 2], [1, 0])
    assert len(checked([good], 3, 2, "game 'g'")) == 1
    with pytest.raises(UsageError, match="game 'g': symmetry 1 is no permutation of 3 features with one of 2 actions"):
        checked([good, pair], 3, 2, "game 'g'")
