"""`gpuinfer.SelfPlay` as a program uses it: the same records as the command writes, iteration, stopping, bad input."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from forking import own_environment
from torch import nn
from torch.utils.data import DataLoader

import gpuinfer
from gpuinfer.config import registry
from gpuinfer.errors import Closed, GpuinferError, UsageError
from gpuinfer.library.selfplay import ARGUMENTS, RunOptions, SelfPlayOptions, TrainOptions, WatchOptions
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "selfplay"))  # its games and models

from in_python import Wager  # noqa: E402 (found by the line above)
from strange_models import wrong_shapes  # noqa: E402

pytestmark = pytest.mark.usefixtures("children_forked")

ENDLESS = 10**6  # games: such a run is stopped


class Net(nn.Module):
    """Small, with a dropout that must be off."""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Dropout(0.5))
        self.policy, self.value = nn.Linear(16, actions), nn.Linear(16, seats)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(features)
        return self.policy(hidden), torch.tanh(self.value(hidden))


@pytest.fixture
def games():
    """Connect Four in this process, without a network."""
    with gpuinfer.SelfPlay("connect-four", model="uniform", simulations=4, workers=0) as made:
        yield made


def connect_four(**options):
    return gpuinfer.SelfPlay("connect-four", simulations=4, deterministic=True, **options)


def alike(one: gpuinfer.GameRecords, other: gpuinfer.GameRecords) -> bool:
    first, second = one.arrays(), other.arrays()
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name]) for name in first
    )


# Records


@pytest.mark.sample
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "uniform", "workers": 1}, "--model uniform --workers 0"),
        ({"model": "uniform", "workers": 0, "seed": 7}, "--model uniform --workers 1 --seed 7"),
        ({"model": "blobnet-small", "workers": 0, "deterministic": True}, "--model blobnet-small --deterministic"),
        ({"model": "rollout", "workers": 1, "resign": 0.5}, "--model rollout --workers 1 --resign 0.5"),
    ],
)
def test_the_records_are_those_that_the_command_writes(options, words, gpuinfer_command, tmp_path):
    told = f"--game connect-four --games 6 --simulations 4 --no-roofline --quiet --out {tmp_path / 'command'} {words}"
    assert gpuinfer_command("selfplay", *told.split())[0] == 0
    records = gpuinfer.SelfPlay("connect-four", simulations=4, **options).play(6, out=tmp_path / "program")
    assert alike(records, gpuinfer.GameRecords(tmp_path / "command"))


@pytest.fixture
def gpuinfer_command(request):
    return request.getfixturevalue("gpuinfer")


def test_each_game_has_what_the_files_have_of_it(games):
    records = games.play(5)
    whole = records.arrays()
    assert (len(records), [game.number for game in records]) == (5, list(range(5)))
    for game in records:
        rows = whole["game"] == game.number
        assert len(game) == rows.sum() == len(game.players) == len(game.observations)
        assert np.array_equal(game.moves, np.sort(game.moves))
        assert np.array_equal(game.policies, whole["policy"][rows])
        assert np.array_equal(game.returns, whole["returns"][game.number])
        assert np.array_equal(game.values[0], np.roll(game.returns, -game.players[0]))
    assert f"{records[3]!r}".startswith("<PlayedGame 3: ")
    with pytest.raises(IndexError, match="no game 5 among these 5"):
        records[5]
    structured = records.positions()
    assert structured.dtype.names == ("observation", "legal", "policy", "value", "player", "game", "move")
    assert np.array_equal(structured["policy"], whole["policy"])


def test_a_dataset_keeps_the_temporary_folder_that_goes_with_its_records(games):
    records = games.play(4)
    place, rows = records.path, sum(map(len, records))
    dataset = records.dataset()
    games._records = None
    del records
    assert sum(len(batch["game"]) for batch in DataLoader(dataset, batch_size=8)) == rows
    assert place.is_dir()
    del dataset
    assert not place.exists()


def test_another_process_reads_records_that_it_is_sent(games):
    records = games.play(3)
    assert alike(copy.copy(records), records)  # which is made as for another process
    with pytest.raises(UsageError, match="were not played here: there is no report"):
        copy.copy(records).report()


def test_saved_records_are_gone_on_with(games, tmp_path):
    saved = games.play(4).save(tmp_path / "kept")
    more = games.play(7, out=tmp_path / "kept", resume=True)
    assert (len(saved), len(more), saved.save(tmp_path / "kept") is saved) == (7, 7, True)
    assert alike(more, games.play(7))
    with pytest.raises(UsageError, match=r"kept holds records already\. Save these to another folder"):
        games.play(2).save(tmp_path / "kept")


def test_games_come_as_they_finish_and_leaving_early_keeps_what_is_finished(games):
    seen = []
    for game in games.stream(ENDLESS):
        seen.append(game.number)
        if len(seen) == 3:
            break
    assert games.report()["status"] == "partial"
    assert set(seen) <= {game.number for game in games.records}
    assert len({game.number for game in games.stream(9)}) == len(games.records) == 9
    assert games.report()["status"] == "done"


def test_the_run_says_where_its_time_went_also_while_it_goes_on(games, capfd):
    stream = games.stream(ENDLESS, live=True, progress=True)
    with pytest.raises(UsageError, match="nothing has been played yet"):
        games.stats()
    playing = iter(stream)
    next(playing)
    assert games.report()["status"] == "partial"
    assert games.stats()["progress"]["total"] == ENDLESS
    playing.close()
    records = games.play(3)
    assert records.stats()["throughput"]["games_per_min"] > 0
    assert str(records.verdict()).startswith("finished     3 of 3 games")
    assert f"/{ENDLESS}" in capfd.readouterr().err


def test_figures_go_to_a_function_and_one_that_raises_harms_nothing(games, caplog):
    seen = {}
    games.play(40, on_figures=lambda step, figures: seen.update(figures))
    assert seen["throughput/games_per_min"] > 0
    assert len(games.play(40, on_figures=lambda step, figures: seen["no such figure"])) == 40
    assert "on_figures raised KeyError: 'no such figure': it is called no more." in caplog.text


# Coroutines, threads, signals


async def test_a_coroutine_plays_while_its_loop_goes_on(games):
    turns = 0

    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    turning = asyncio.create_task(turn())
    assert len(await games.play_async(5)) == 5
    before = turns
    async for game in games.stream(ENDLESS):
        assert len(game.returns) == 2
        break
    turning.cancel()
    assert turns > before > 3


async def test_a_cancelled_coroutine_stops_its_run_in_order(games):
    playing = asyncio.create_task(games.play_async(ENDLESS))
    while games._records is None or not len(games.records):  # noqa: ASYNC110 (another thread plays)
        await asyncio.sleep(0.02)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert games.report()["status"] == "partial"
    assert len(games.records) == games.report()["progress"]["done"] > 0


def test_it_plays_where_an_event_loop_runs_as_in_a_notebook_and_in_a_thread(games):
    async def cell():
        return len(games.play(3))  # blocks, as a cell does

    assert asyncio.run(cell()) == 3
    found = []
    thread = threading.Thread(target=lambda: found.append(len(games.play(4))))
    thread.start()
    thread.join(60)
    assert found == [4]


PROGRAM = """
import os, signal, sys, threading, time
import gpuinfer

games = gpuinfer.SelfPlay("connect-four", model="uniform", simulations=4, workers=0)
before = signal.getsignal(signal.SIGINT)
"""


def program(text, tmp_path, *words, stdin=None):
    """A user's program of its own process: exit code, output, errors."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM + textwrap.dedent(text))
    told = [sys.executable, str(file), *words] if stdin is None else [sys.executable, "-"]
    done = subprocess.run(
        told,
        cwd=tmp_path,
        env=own_environment(),
        input=None if stdin is None else file.read_text(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
def test_ctrl_c_stops_in_order_and_raises_with_the_records_kept(tmp_path):
    code, out, err = program(
        f"""
        def interrupt():
            while games._records is None or not len(games.records):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            games.play({ENDLESS})
        except KeyboardInterrupt:
            print(len(games.records) == games.report()["progress"]["done"] > 0, games.report()["status"])
            print(signal.getsignal(signal.SIGINT) is before)
        """,
        tmp_path,
    )
    assert (code, out) == (0, "True partial\nTrue\n"), err


@pytest.mark.thorough
def test_a_program_that_ends_in_the_midst_keeps_what_is_finished_and_does_not_hang(tmp_path):
    code, out, err = program(
        f"""
        stream = iter(games.stream({ENDLESS}, out="kept"))
        print(next(stream).number >= 0)
        """,
        tmp_path,
    )
    assert (code, out) == (0, "True\n"), err
    assert len(gpuinfer.GameRecords(tmp_path / "kept")) > 0
    assert '"games"' in (tmp_path / "kept" / "manifest.json").read_text()  # which is written at an orderly end


@pytest.mark.thorough
def test_a_program_without_a_guard_is_told_of_it(tmp_path):
    code, _, err = program("games.play(3, workers=1)", tmp_path)
    assert code == 1
    assert "starts worker processes whenever it is imported" in err.splitlines()[-1]
    assert "if __name__ == '__main__':" in err


OWN_GAME = """
from gpuinfer.workloads.selfplay.python_game import OVER, PythonGame

class Coin(PythonGame):
    hidden = False
    def __init__(self, setup=None, /, **options):
        super().__init__(setup, **options)
        self.seats, self.actions, self.max_legal, self.max_moves, self.features = 1, 2, 2, 1, 3
    def deal(self, draw): return ()
    def to_move(self, position): return OVER if position else 0
    def legal(self, position): return [0, 1]
    def apply(self, position, action): return (action,)
    def returns(self, position): return [float(position[0])]
    def observe(self, position, row): row[0] = 1

class Net(torch.nn.Module):
    def __init__(self, features, actions, seats):
        super().__init__()
        self.policy, self.value = torch.nn.Linear(features, actions), torch.nn.Linear(features, seats)
    def forward(self, x): return self.policy(x), self.value(x)

coins = gpuinfer.SelfPlay(Coin, model=Net, simulations=4)
print(len(coins.play(3)), type(coins.train(coins.records, steps=2, picture=False)).__name__)
for options in ({"workers": 1}, {"workers": 1, "model": "uniform"}):
    try:
        coins.play(3, **options)
    except gpuinfer.errors.UsageError as error:
        print(error)
"""


@pytest.mark.thorough
def test_game_and_network_of_a_notebook_are_played_in_its_process(tmp_path):
    code, out, err = program("import torch, gpuinfer.errors\n" + OWN_GAME, tmp_path, stdin=True)
    assert code == 0, err
    played, *refused = out.splitlines()
    assert played == "3 Net"
    assert [line.endswith("workers=0.") for line in refused] == [True, True], refused
    assert all("is defined in a notebook" in line for line in refused), refused


# Games and models as objects


def test_a_game_may_be_a_class_or_an_object_of_one():
    options = {"model": "uniform", "simulations": 4, "workers": 0}
    named = gpuinfer.SelfPlay("connect-four", **options).play(3)
    assert alike(named, gpuinfer.SelfPlay(ConnectFour, **options).play(3))
    assert alike(named, gpuinfer.SelfPlay(ConnectFour(), **options).play(3))
    blob = type(registry.load("games", "blob")(None, players=3, cards=3))
    of_object = gpuinfer.SelfPlay(blob(None, players=3, cards=3), **options).play(3)
    assert alike(of_object, gpuinfer.SelfPlay("blob", players=3, cards=3, **options).play(3))
    assert len(gpuinfer.SelfPlay(Wager, model="uniform", simulations=2).play(3, workers=1)) == 3


def test_a_game_of_this_process_alone_is_played_here():
    class Local(Wager):
        pass

    class Wrong(Wager):
        def returns(self, position):
            return [float("nan")]

    assert len(gpuinfer.SelfPlay(Local, model="uniform", simulations=2).play(3)) == 3
    with pytest.raises(UsageError, match=r"is defined inside of a function, .* play in this process: workers=0"):
        gpuinfer.SelfPlay(Local, model="uniform", workers=2)
    with pytest.raises(UsageError, match=r"is not played, since .* Give each seat a finite number"):
        gpuinfer.SelfPlay(Wrong, model="uniform").play(3)


def test_a_network_is_an_object_in_this_process_and_in_workers_and_is_left_as_it_is():
    network = Net(91, 7, 2)
    weights = {name: one.clone() for name, one in network.state_dict().items()}
    games = connect_four(model=network)
    here = games.play(4, workers=0)
    assert alike(here, games.play(4, workers=2))
    assert network.training
    assert all(torch.equal(one, weights[name]) for name, one in network.state_dict().items())
    with torch.no_grad():
        network.policy.bias += 3.0 * torch.arange(7)
    assert not alike(here, games.play(4, workers=0)), "a run has the weights that the object has when it begins"


@pytest.mark.thorough
def test_two_networks_that_are_objects_play_each_other(tmp_path):
    new, old = Net(91, 7, 2), Net(91, 7, 2)
    games = connect_four(model=new, opponent_model=old)
    here = games.play(4, workers=0, out=tmp_path / "games")
    assert games.report()["strength"]["games"] == 4
    assert [one["name"] for one in games.report()["models"]] == ["own Net", "Net"]
    assert {tuple(sorted(game.more["sides"])) for game in here} == {(False, True)}
    assert alike(here, games.play(4, workers=2))
    with pytest.raises(UsageError, match="the source of the opponent's network: changed since"):
        games.play(6, workers=0, out=tmp_path / "games", resume=True, opponent_model=Net(91, 7, 2))


@pytest.mark.thorough
def test_a_run_that_is_over_keeps_no_copy_of_the_network():
    games = connect_four(model=Net(91, 7, 2))
    kept = [games.play(1, workers=workers) for workers in (0, 1)]
    gc.collect()
    assert len(kept) == 2
    assert [one for one in gc.get_objects() if type(one).__name__ == "PortableModel"] == []


def test_a_class_is_made_with_what_the_game_says_and_a_local_one_is_played_with_here():
    class Local(Net):
        pass

    assert len(connect_four(model=Net).play(2, workers=0)) == 2
    assert len(connect_four(model=Local).play(2)) == 2
    assert len(connect_four(model=lambda features, actions, seats: Net(features, actions, seats)).play(2)) == 2
    assert len(connect_four(model=lambda features: (features[:, :7], features[:, :2])).play(2)) == 2
    with pytest.raises(UsageError, match=r"made inside a function.*play in this process: workers=0"):
        connect_four(model=Local(91, 7, 2), workers=1)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("blobnet-small", id="named", marks=pytest.mark.thorough),
        pytest.param(Net(91, 7, 2), id="an object"),
    ],
)
def test_a_network_learns_from_records_and_plays_on(model, tmp_path):
    games = connect_four(model=model, workers=0)
    records = games.play(6)
    trained = games.train(records, steps=4, warmup_steps=1, batch_size=16, picture=False, out=tmp_path / "run")
    assert not trained.training
    assert games.report()["workload"] == "train"
    same = games.train([records], steps=4, warmup_steps=1, batch_size=16, picture=False)
    assert all(torch.equal(one, same.state_dict()[name]) for name, one in trained.state_dict().items())
    kept = records.save(tmp_path / "kept")
    assert not alike(kept, games.play(6, model=trained))
    if isinstance(model, str):
        named = games.play(6, weights=tmp_path / "run" / "weights.safetensors")
        assert alike(named, games.play(6, model=trained))
    with pytest.raises(UsageError, match="was made with other settings"):
        games.play(8, model=trained, out=tmp_path / "kept", resume=True)


# Bad input


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"game": "conect-four"}, "Did you mean 'connect-four'?"),
        ({"game": 3}, "Give a name such as \"connect-four\", 'module:Class', or a class"),
        ({"game": int}, "or a class that derives from gpuinfer.workloads.selfplay.python_game.PythonGame."),
        ({"simulation": 3}, "there is no option 'simulation'. Did you mean 'simulations'?"),
        ({"device": "cpu"}, "Did you mean 'devices'?"),
        ({"simulations": 0}, "simulations=0: 0 is less than 1. Give 1 or more."),
        ({"model": "blobnte"}, "Did you mean 'blobnet'?"),
        ({"model": 3}, "is neither a torch.nn.Module nor a function"),
        ({"weights": "nowhere"}, "no file 'nowhere'"),
        ({"model": torch.nn.Identity(), "weights": __file__}, "weights go with the name of a model"),
        ({"opponent_model": torch.nn.Identity(), "opponent_weights": __file__}, "opponent_weights go with the name"),
        ({"opponent_model": 3}, "is neither a torch.nn.Module nor a function"),
        ({"backend": "centrl"}, "Did you mean 'central'?"),
        ({"backend": "central", "model": "uniform"}, "Leave it out, or name a model."),
        ({"backend_options": {"max_row": 3}}, "Did you mean 'max_rows'?"),
        ({"strategy": "dynamo"}, "Did you mean 'dynamic'?"),
        ({"strategy_options": {"x": 1}, "strategy": gpuinfer.Dynamic()}, "an object with options of its own"),
        ({"dtype": "int8"}, "Choose from float32, bfloat16, float16."),
        ({"seed": -1}, "seed=-1: -1 is less than 0. Give 0 or more."),
        ({"model": "uniform", "resign": 0.9, "simulations": 1}, "Ask for simulations=2 or more."),
        ({"resign_check": 0.2}, "nobody resigns. Add resign=0.9."),
        ({"players": 3}, "has no option 'players'"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(options, cure):
    options = {"game": "connect-four", **options}
    with pytest.raises(UsageError) as refused:
        gpuinfer.SelfPlay(**options)
    assert cure in str(refused.value)
    assert "--" not in str(refused.value)


def of_another_run(games, folder):
    games.play(2, out=folder)
    return games


@pytest.mark.parametrize(
    ("play", "cure"),
    [
        (lambda games, folder: games.play(0), "games=0: 0 is less than 1"),
        (lambda games, folder: games.play(2, simulatoins=3), "Did you mean 'simulations'?"),
        (lambda games, folder: games.play(2, resume=True), 'Add out="folder".'),
        (lambda games, folder: of_another_run(games, folder).play(3, out=folder), "Add resume=True to go on with them"),
        (
            lambda games, folder: of_another_run(games, folder).play(3, out=folder, resume=True, simulations=5),
            "simulations: 4 there, 5 here",
        ),
        (
            lambda games, folder: of_another_run(games, folder).play(1, out=folder, resume=True),
            "more than games=1. Ask for 2 or more.",
        ),
        (lambda games, folder: games.play(2, out="/proc/x"), "Give another folder with out."),
        (lambda games, folder: games.records, "nothing has been played yet"),
        (lambda games, folder: gpuinfer.GameRecords(folder), "there is no folder"),
        (lambda games, folder: games.train(games.play(1).path / "shard", model="blobnet-small"), "holds no records"),
        (lambda games, folder: games.train(folder), 'model="uniform" has nothing to learn'),
        (lambda games, folder: games.train(folder, model="blobnet-small"), "holds no records"),
        (lambda games, folder: games.train(folder, model="blobnet-small", step=3), "Did you mean 'steps'?"),
        (lambda games, folder: games.play(2, track="tensorbord=x"), "Did you mean 'tensorboard'?"),
        (
            lambda games, folder: games.play(2, model=wrong_shapes),
            "Let it return policy logits [2, 7] and values [2, 2] as a tuple.",
        ),
        (
            lambda games, folder: games.play(2, model="strange_models:wrong_shapes"),
            "Let it return policy logits [2, 7] and values [2, 2] as a tuple.",
        ),
        (lambda games, folder: games.play(2, model=Net(5, 7, 2)), "It was given features [2, 91] of float32"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_cure(play, cure, games, tmp_path):
    with pytest.raises(GpuinferError) as refused:
        play(games, tmp_path / "folder")
    assert cure in str(refused.value)
    assert "--" not in str(refused.value)


def test_what_is_closed_says_so(games):
    stream = games.stream(2)
    assert len(list(stream)) == 2
    with pytest.raises(Closed, match="its games are in `records`"):
        list(stream)
    endless = iter(games.stream(ENDLESS))
    first = next(endless)
    games.close()
    assert len([first, *endless]) == len(games.records), "what was finished by then is still read"
    with pytest.raises(Closed, match="Make another one"):
        games.play(2)


def test_a_fork_reads_records_and_is_told_that_it_cannot_play(games):
    records = games.play(2)
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        said = []
        try:
            games.play(2)
        except UsageError as error:
            said = [str(error), len(list(records))]
        os.write(theirs, json.dumps(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        said, count = json.load(file)
    assert "is a fork of it. Make one here" in said
    assert count == len(list(records)) == 2


def test_its_options_are_those_of_the_commands():
    """Each is typed: a checker of types knows what a program may say."""
    options = {name: set(registry.load("workloads", name).Options.model_fields) for name in ("selfplay", "train")}
    assert set(SelfPlayOptions.__annotations__) == options["selfplay"] - set(ARGUMENTS)
    arguments = {"records", "steps", "out", "resume"}
    assert set(TrainOptions.__annotations__) - set(WatchOptions.__annotations__) == options["train"] - arguments
    assert set(SelfPlayOptions.__annotations__) < set(RunOptions.__annotations__)


@pytest.mark.parametrize("seed", [-1, 1.5, "x", 2**70])
def test_the_seed_of_a_run_is_checked_as_any(seed):
    games = gpuinfer.SelfPlay("connect-four", model="uniform", simulations=2, workers=0)
    with pytest.raises(UsageError, match="seed"):
        games.play(1, seed=seed)


def test_each_of_two_threads_waits_for_its_own_run(tmp_path):
    games = gpuinfer.SelfPlay("connect-four", model="uniform", simulations=2, workers=0)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(games.play, count, out=tmp_path / str(count)) for count in (3, 5)]
        assert [len(one.result(120)) for one in runs] == [3, 5]


def test_records_without_a_folder_travel_as_a_copy():
    records = gpuinfer.SelfPlay("connect-four", model="uniform", simulations=2, workers=0).play(4)
    moves = [game.moves.tolist() for game in records]
    copied = pickle.loads(pickle.dumps(records))  # noqa: S301 (its own)
    del records
    gc.collect()
    assert [game.moves.tolist() for game in copied] == moves
