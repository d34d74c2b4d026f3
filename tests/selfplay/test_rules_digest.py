"""Records of one game's rules and one network's source are not mixed with those of others under the same names; what
does not decide how a game goes is no other.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from command import selfplay

from gpuinfer.workloads.selfplay import games, rules_digest
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour

FILES = {
    "rules.py": """
OVER_AFTER = 4

def pay(position):
    return 1.0 if sum(position) % 2 else -1.0
""",
    "pick.py": """
from gpuinfer.workloads.selfplay.python_game import OVER, PythonGame
from rules import OVER_AFTER, pay

class Pick(PythonGame):
    hidden = False

    def __init__(self, setup=None, /, **options):
        super().__init__(setup, **options)
        self.seats, self.actions, self.max_legal, self.max_moves, self.features = 2, 3, 3, 4, 5

    def deal(self, draw): return ()
    def to_move(self, position): return OVER if len(position) == OVER_AFTER else len(position) % 2
    def legal(self, position): return [0, 1, 2]
    def apply(self, position, action): return (*position, action)
    def returns(self, position): return [pay(position), -pay(position)]
    def observe(self, position, row): row[0], row[1] = len(position), sum(position)
""",
    "net.py": """
import torch

class Net(torch.nn.Module):
    def __init__(self, features, actions, seats):
        super().__init__()
        self.body = torch.nn.Linear(features, 8)
        self.policy, self.value = torch.nn.Linear(8, actions), torch.nn.Linear(8, seats)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.policy(hidden), torch.tanh(self.value(hidden))
""",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.thorough
def test_a_run_goes_on_only_with_the_same_rules_and_the_same_network(folder):
    command = (
        "--game pick:Pick --model net:Net --simulations 4 --workers 1 --no-roofline --quiet --out games --device cpu"
    )

    def run(number, code=0):
        done = selfplay(*command.split(), "--games", number, *(() if number == 4 else ["--resume"]), cwd=folder)
        assert done.returncode == code, done.stderr
        return " ".join(done.stderr.split())

    def change(file, old, new):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    run(4)
    for file, old, new, said in (
        ("pick.py", "return [pay(position)", "return [-pay(position)", "the game's rules"),
        ("rules.py", "if sum", "if not sum", "the game's rules"),  # which the game imports
        ("pick.py", "2, 3, 3, 4, 5", "2, 4, 3, 4, 6", "the game's rules or its sizes"),
        ("net.py", "torch.relu", "torch.sigmoid", "the source of the network"),
    ):
        change(file, old, new)
        refused = run(8, 2)
        change(file, new, old)
        assert said in refused
        assert "changed since" in refused
        assert (file == "net.py") == ("the source of the network" in refused)
    change("pick.py", "hidden = False", "# said by everybody\n    hidden = False")
    run(8)

    manifest = json.loads((folder / "games" / "manifest.json").read_text())
    for name in ("rules", "network", "opponent_network"):
        del manifest["settings"][name]
    (folder / "games" / "manifest.json").write_text(json.dumps(manifest))
    assert "the game's rules or its sizes: not noted there, as an earlier gpuinfer wrote it" in run(12, 2)


def test_our_own_games_have_a_version_and_sizes_and_our_networks_their_names():
    one, other = ConnectFour(), ConnectFour()
    assert rules_digest.game_digest(one) == rules_digest.game_digest(other)
    other.features += 1
    assert rules_digest.game_digest(one) != rules_digest.game_digest(other)
    assert rules_digest.network_digest("blobnet") is rules_digest.network_digest(None) is None
    assert not rules_digest.source_of(["gpuinfer.models.blobnet"])


def test_compiled_rules_are_told_apart_by_what_they_reach(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "examples" / "nim.py").read_text()
    found = []
    monkeypatch.syspath_prepend(str(tmp_path))
    for heaps, comment in ((3, ""), (3, "# three\n"), (4, "")):
        (tmp_path / "own_nim.py").write_text(comment + text.replace("HEAPS = 3", f"HEAPS = {heaps}"))
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        sys.modules.pop("own_nim", None)
        found.append(rules_digest.game_digest(games.build_game("own_nim:Nim", {})))
    sys.modules.pop("own_nim", None)
    assert found[0] == found[1] != found[2]
