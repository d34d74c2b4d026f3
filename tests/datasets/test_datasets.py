"""Records as datasets of PyTorch and as Parquet: every position and sample once, and clear words for all else."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from rollouts_files.record_draws import group_of
from torch.utils.data import DataLoader
from train.train_models import positions

from gpuinfer import datasets
from gpuinfer.datasets import FIELDS, RolloutsDataset, SelfPlayDataset
from gpuinfer.errors import UsageError
from gpuinfer.models.positions import PositionsFolder, checked
from gpuinfer.rollouts.export.samples import samples
from gpuinfer.rollouts.files import Writer, parquet

LOTS = [positions(60, seed=1), positions(1, seed=2), positions(90, seed=3)]


def written(path, lots=LOTS, game="made up"):
    """A folder with a shard for each lot."""
    folder = PositionsFolder(path)
    folder.open({"game": game, "game_options": {}}, resume=False)
    for lot in lots:
        folder.write(lot)
    folder.close(1)
    return path


def rollouts_in(path, numbers=range(3), form="jsonl"):
    async def write():
        writer = Writer(path, form, {"env": "toy"})
        for number in numbers:
            await writer.add(group_of(number, tokens=2))
        await writer.close()

    asyncio.run(write())
    return path


@pytest.fixture
def games(tmp_path):
    return written(tmp_path / "games")


def rows_of(folder):
    """All rows of its shards, in the order of the files."""
    shards = [np.load(shard, allow_pickle=False) for shard in sorted(folder.glob("*.npz"))]
    return {name: np.concatenate([shard[name] for shard in shards]) for name in FIELDS}


def stacked(items):
    return {name: torch.stack([item[name] for item in items]).numpy() for name in items[0]}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and (found[name] == wanted[name]).all() for name in found
    )


@pytest.mark.parametrize("most", [1, 256], ids=["a file open at a time", "all files open"])
def test_each_position_is_an_item(games, monkeypatch, most):
    monkeypatch.setattr(datasets, "OPEN_SHARDS", most)
    records = SelfPlayDataset(games)
    assert len(records) == 151
    order = np.random.default_rng(0).permutation(151)
    wanted = rows_of(games)
    assert same(stacked([records[int(at)] for at in order]), {name: array[order] for name, array in wanted.items()})
    assert same(stacked([records[-1]]), {name: array[-1:] for name, array in wanted.items()})
    with pytest.raises(IndexError):
        records[151]
    item = records[0]
    item["policy"] += 1  # an item is its owner's: files and other items stay as they are
    assert same(stacked([records[0]]), {name: array[:1] for name, array in wanted.items()})


def test_fields_folders_and_files_can_be_chosen(games, tmp_path):
    other = written(tmp_path / "more", LOTS[:1])
    shard = next(other.glob("*.npz"))
    both = SelfPlayDataset([games, other], fields=["policy", "value"])
    assert (len(both), set(both[0])) == (211, {"policy", "value"})
    assert len(SelfPlayDataset(shard)) == 60
    with np.load(shard) as found:
        np.savez_compressed(tmp_path / "packed.npz", **dict(found))
    packed, plain = SelfPlayDataset(tmp_path / "packed.npz"), SelfPlayDataset(shard)
    assert same(stacked(list(packed)), stacked(list(plain)))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_loader_gets_each_position_once(games, workers):
    context = "spawn" if workers else None
    loader = DataLoader(SelfPlayDataset(games), 16, shuffle=True, num_workers=workers, multiprocessing_context=context)
    batches = list(loader)
    found = {name: torch.cat([batch[name] for batch in batches]).numpy() for name in FIELDS}
    rows = [np.concatenate([array.reshape(151, -1).astype("f8") for array in part.values()], 1) for part in
            (found, rows_of(games))]  # fmt: skip
    assert sorted(map(tuple, rows[0])) == sorted(map(tuple, rows[1]))


def test_a_dataset_travels_to_loader_processes_without_its_files(games):
    records = SelfPlayDataset(games)
    packed = pickle.dumps(records)
    assert len(packed) < 2000
    assert same(stacked(list(pickle.loads(packed))), rows_of(games))  # noqa: S301


def flip(shard):
    content = bytearray(shard.read_bytes())
    content[content.index(b"policy.npy") + 145] ^= 0xFF
    shard.write_bytes(content)


REFUSED = {
    "nothing is there": (lambda path: path / "nowhere", "there is no .*nowhere. Give the folder"),
    "an empty folder": (lambda path: path, "holds no records. Write some with"),
    "nothing is named": (lambda path: [], "no records are named"),
    "rollouts": (lambda path: rollouts_in(path / "played"), "holds no records"),
    "a file of another kind": (lambda path: (path / "a.npz").write_bytes(b"PK") and path / "a.npz", "cannot be read"),
    "an array of another kind": (lambda path: np.savez(path / "a.npz", x=np.zeros(3)) or path / "a.npz", "cannot be"),
    "two games": (
        lambda path: [written(path / "one"), written(path / "two", game="another")],
        "hold different games",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_holds_no_positions_is_refused(tmp_path, make, message):
    with pytest.raises(UsageError, match=message):
        SelfPlayDataset(make(tmp_path))


def test_a_field_that_there_is_not_is_named(games):
    with pytest.raises(UsageError, match=r"no field 'reward'. Fields: observation, legal, policy, value"):
        SelfPlayDataset(games, fields=["reward"])


@pytest.mark.parametrize("place", [0, 2], ids=["the first file", "the last file"])
def test_a_damaged_file_is_named_at_the_latest_when_it_is_read(games, gpuinfer, tmp_path, place):
    shard = sorted(games.glob("*.npz"), key=lambda path: path.stat().st_size)[place]
    flip(shard)
    with pytest.raises(UsageError, match=rf"{shard.name} cannot be read \(.*policy.npy.*--resume"):
        list(SelfPlayDataset(games))
    code, _, said = gpuinfer("selfplay", "export", str(games), "--out", str(tmp_path / "out.parquet"))
    assert (code, shard.name in said) == (2, True)
    assert not list(tmp_path.glob("out.parquet*"))


def test_a_file_of_another_game_among_them_is_named(games):
    odd = positions(5)
    odd["observation"] = np.zeros((5, 99), np.uint8)
    np.savez(games / "shard-zzz.npz", **odd)
    with pytest.raises(UsageError, match=r"shard-zzz\.npz holds positions of another game"):
        list(SelfPlayDataset(games))


# Parquet


def test_positions_go_to_parquet(games, gpuinfer, tmp_path):
    folder = PositionsFolder(games)
    features, actions = list(range(24)), list(range(7))
    features[22:], actions[:] = [23, 22], actions
    folder.declare(checked([(features, actions)], 24, 7, "made up"))
    out = tmp_path / "games.parquet"
    code, _, said = gpuinfer("selfplay", "export", str(games), "--to", "parquet", "--out", str(out))
    assert (code, "holds 151 positions" in said) == (0, True), said
    from pyarrow import parquet as reader

    table, wanted = reader.read_table(out), rows_of(games)
    assert [f"{one.name}: {one.type}" for one in table.schema] == [
        "game: int64",
        "move: int16",
        "player: int8",
        "observation: fixed_size_list<element: uint8>[24]",
        "legal: fixed_size_list<element: bool>[7]",
        "policy: fixed_size_list<element: float>[7]",
        "value: fixed_size_list<element: float>[2]",
    ]
    found = {name: np.array(table[name].to_pylist(), wanted[name].dtype) for name in wanted}

    def in_order(rows):
        order = np.lexsort((*rows["observation"].T, rows["move"], rows["game"]))
        return {name: array[order] for name, array in rows.items()}

    assert same(in_order(found), in_order(wanted))
    told = {name.decode().removeprefix("gpuinfer."): one.decode() for name, one in table.schema.metadata.items()}
    assert (told["schema"], json.loads(told["settings"])["game"]) == ("gpuinfer.records/1", "made up")
    assert json.loads(told["symmetries"])["features"] == [features]
    assert reader.ParquetFile(out).num_row_groups == 3


EXPORTS = {
    "selfplay export nowhere --out x": "nowhere holds no records",
    "selfplay export games --out x --to csv": "no format named 'csv'",
    "selfplay export games --out there": "there exists already",
    "selfplay export games --out no/x": "there is no folder no",
    "rollouts export games --out x --to parquet": "games",
    "rollouts export nowhere --out x --to parquet": "holds no rollouts",
    "export games --to parquet": "gpuinfer selfplay export DIR",
}


@pytest.mark.parametrize(("words", "message"), EXPORTS.items())
def test_an_export_that_cannot_be_is_refused(gpuinfer, empty_folder, words, message):
    written(empty_folder / "games")
    (empty_folder / "there").touch()
    code, out, err = gpuinfer(*words.split())
    assert (code, out, message in " ".join(err.split())) == (2, "", True), err
    assert not (empty_folder / "x").exists()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rollouts_go_to_parquet(gpuinfer, tmp_path, form):
    folder, out = rollouts_in(tmp_path / "played", form=form), tmp_path / "out.parquet"
    code, _, said = gpuinfer("rollouts", "export", str(folder), "--to", "parquet", "--out", str(out))
    assert (code, "holds 3 groups" in said) == (0, True), said
    assert list(parquet.read_groups(out)) == [group_of(number, tokens=2) for number in range(3)]


# Rollouts


def test_each_sample_of_rollouts_is_an_item(tmp_path):
    records = RolloutsDataset(rollouts_in(tmp_path / "played"))
    wanted = [sample for number in range(3) for sample in samples(group_of(number, tokens=2))]
    assert len(records) == len(wanted) > 3
    for item, sample in zip(records, wanted, strict=True):
        before = [0] * len(sample.prompt)
        assert item["tokens"].tolist() == [*sample.prompt, *sample.response]
        assert item["mask"].tolist() == [*before, *sample.mask]
        assert item["logprobs"].tolist() == pytest.approx([*before, *sample.logprobs])
        assert item["advantage"].item() == pytest.approx(sample.advantage)
        assert (item["reward"].item(), item["group"].item()) == (sample.trajectory.reward, sample.group.number)
    with pytest.raises(IndexError):
        records[len(records)]


def test_groups_in_memory_are_the_samples_of_their_record(tmp_path):
    """As a trainer has them from a stream."""
    written, held = RolloutsDataset(rollouts_in(tmp_path / "played")), RolloutsDataset(map(group_of_two, range(3)))
    assert len(held) == len(written)
    for one, other in zip(held, written, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(UsageError, match="what is in memory holds nothing"):
        RolloutsDataset([])


def group_of_two(number):
    return group_of(number, tokens=2)


def test_samples_of_several_lengths_make_a_batch(tmp_path):
    records = RolloutsDataset(rollouts_in(tmp_path / "played"))
    items = [records[0], {name: one[:3] if one.dim() else one for name, one in records[1].items()}]
    batch = RolloutsDataset.collate(items, pad=99)
    longest = len(items[0]["tokens"])
    assert batch["attention"].sum(1).tolist() == [longest, 3]
    assert batch["tokens"][1].tolist() == [*items[1]["tokens"].tolist(), *[99] * (longest - 3)]
    assert batch["mask"][1, 3:].sum() == 0
    assert (batch["mask"].dtype, batch["reward"].shape) == (torch.float32, (2,))
    batches = list(DataLoader(records, 4, collate_fn=RolloutsDataset.collate))
    assert sum(len(one["tokens"]) for one in batches) == len(records)


@pytest.mark.parametrize("how", ["nothing", "games", "damaged"])
def test_what_holds_no_samples_is_refused(tmp_path, games, how):
    folder = games if how == "games" else tmp_path / "played"
    if how == "damaged":
        rollouts_in(folder)
        [shard] = folder.glob("shard-*.jsonl")
        shard.write_bytes(b"?" + shard.read_bytes())
    said = {"damaged": r"line 1: this is no group", "nothing": "holds no rollouts", "games": "games"}[how]
    with pytest.raises(UsageError, match=re.compile(said)):
        RolloutsDataset(folder)
    shutil.rmtree(folder, ignore_errors=True)
