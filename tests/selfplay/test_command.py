"""`gpuinfer selfplay` at the command line: what goes in, what comes out, and bad input of every kind."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from command import records_of, selfplay, shards
from complaints import complaint
from safetensors.torch import save_file

from gpuinfer.report import report

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
QUICK = "--games 4 --workers 1 --simulations 4 --no-roofline --quiet"
NET = f"{QUICK} --game connect-four --model blobnet-small"

pytestmark = pytest.mark.usefixtures("children_forked")


@pytest.fixture
def refused(gpuinfer, tmp_path, monkeypatch):
    """The complaint of a command in this process that ends with this code and says nothing on standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(words, code=2):
        found, out, err = gpuinfer("selfplay", *words.split())
        assert (found, out) == (code, ""), err
        said = " ".join(err.split())
        assert "Traceback" not in said
        assert said.endswith(".")
        return said

    return run


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("--game blab", "no game named 'blab'. Did you mean 'blob'?"),
        ("--model blobnte", "no model named 'blobnte'. Did you mean 'blobnet'?"),
        ("--model unifrom", "Did you mean 'uniform'?"),
        ("--backend inproces", "Did you mean 'inprocess'?"),
        ("--strategy dynamo", "Did you mean 'dynamic'?"),
        ("--gamess 3", "Did you mean '--games'?"),
        ("--trump cups", "Choose from turned, clubs, diamonds, hearts, spades, none."),
        ("-B max_row=3", "Did you mean 'max_rows'?"),
        ("-S wait=1", "Did you mean 'max_wait'?"),
        ("-B max_rows=many", "-B max_rows: 'many' is not a whole number"),
        ("-S max_wait=soon", "-S max_wait: 'soon' is not a number"),
        ("--games 0", "--games: '0' is less than 1"),
        ("--players 8 --cards 7", "--players: 8 is more than 7"),
        ("--players 7 --cards 8", "7 players × 8 cards and a card to turn need 57"),
        ("--cards 13", "Try --cards 12."),
        ("--game connect-four --cards 5", "has no option 'cards'"),
        ("--game-options players", "Write key=value,key=value."),
        ("--resume", "Add --out DIR."),
        ("--weights nowhere", "no file 'nowhere'"),
        ("--concentration inf", "--concentration: 'inf' is more than"),
        ("--temperature nan", "--temperature: 'nan'"),
        ("--game nowhere:Game", "No module named 'nowhere'"),
        ("--game strange_models:plain", "Derive it from that class"),
        ("--model uniform --backend echo", "Leave --backend out"),
        ("--model rollout --backend echo", "Leave --backend out"),
        # two networks
        (f"--opponent-weights {__file__}", "Name one with --opponent-model"),
        (f"--opponent-model uniform --opponent-weights {__file__}", "uniform has no weights"),
        ("--opponent-model blobnet --opponent-weights nowhere", "--opponent-weights: no file 'nowhere'"),
        ("--opponent-model blobnte", "Did you mean 'blobnet'?"),
        ("--opponent-model no_such_module:make", "set PYTHONPATH"),
        ("--model rollout --opponent-model blobnet", "Name the network with --model; rollout may be the opponent."),
        # who resigns
        ("--resign 0.9", "game 'blob' has 4 players, and who resigns loses to the one other. Leave --resign out."),
        ("--resign 0.9 --game in_python:Wager", "has 1 player"),
        ("--resign 0.9 --game in_python:Kuhn", "Set won_or_lost = True in its class"),
        ("--resign 0.9 --game connect-four --simulations 1", "Ask for --simulations 2 or more."),
        ("--resign-check 0.2 --game connect-four", "--resign-check 0.2: nobody resigns. Add --resign 0.9."),
        # models that fail
        (f"{QUICK} --model strange_models:raises", "the factory raised RuntimeError: no such data"),
        (f"{QUICK} --model strange_models:no_module", "returned int, not a torch.nn.Module"),
        (f"{QUICK} --model strange_models:absent", "no factory in module 'strange_models' named 'absent'"),
        (f"{QUICK} --model strange_models:wrong_shapes", "[2, 51] and [2, 4]. Let it return policy logits [2, 52]"),
        (f"{QUICK} --model strange_models:not_a_number", "answered with NaN in output 0 [2, 52]"),
        (f"{NET} --weights other.safetensors", "other.safetensors do not fit"),
        (f"{NET} --weights text.safetensors", "cannot read weights from text.safetensors"),
        (f"{NET} --opponent-model strange_models:wrong_shapes", "Let it return policy logits [2, 7]"),
        (f"{NET} --opponent-model strange_models:raises", "the factory raised RuntimeError"),
        (f"{NET} --opponent-model blobnet-small --opponent-weights other.safetensors", "other.safetensors do not fit"),
        *[
            (f"{QUICK} --model uniform --out {out}", "Give another folder with --out.")
            for out in ("text.safetensors", "/proc/x")
        ],
    ],
)
def test_bad_usage_is_refused_with_the_cure(words, cure, refused, tmp_path):
    save_file({"first.weight": torch.zeros(3, 3)}, "other.safetensors")
    (tmp_path / "text.safetensors").write_bytes(b"no weights")
    assert cure in refused(words)


GAMES = [
    ("no python", "raised SyntaxError"),
    ("class Mine: pass", "Derive it from that class"),
    (
        "from gpuinfer.workloads.selfplay.game import Game\nclass Mine(Game): rules = 'x'",
        "does not say its seats, actions",
    ),
    ("from nim import Nim\nclass Mine(Nim): rules = 'nowhere'", "a game's rules cannot be imported"),
    ("from nim import Nim, deal\nclass Mine(Nim): rules = __name__", "has no compiled function 'to_move'"),
    (
        "import nim\nclass Mine(nim.Nim):\n    rules = 'nim'\n    def __init__(self, *given, **options):\n"
        "        super().__init__(*given, **options)\n        self.words = 4",
        "Declare words = 5 or more.",
    ),
]


@pytest.mark.parametrize(("number", "source", "cure"), [(number, *one) for number, one in enumerate(GAMES)])
def test_a_game_that_is_none_is_refused(refused, tmp_path, number, source, cure):
    (tmp_path / f"mine{number}.py").write_text(source)
    assert cure in refused(f"{QUICK} --model uniform --game mine{number}:Mine")
    sys.modules.pop(f"mine{number}", None)


@pytest.mark.parametrize(("factory", "said"), [("spoils", "holds NaN"), ("hopeless", "-inf among its values")])
def test_answers_that_no_search_can_use_fail_the_run(refused, tmp_path, factory, said):
    assert said in refused(f"{QUICK} --model strange_models:{factory} --json r.json", code=1)
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "failed"


@pytest.mark.sample
@pytest.mark.parametrize(
    ("game", "code", "said"),
    [
        ("NanReturns", 2, "is not played, since it does what it must not: `returns` gave [nan, 1.0] for seats = 2"),
        ("Endless", 2, "is not played, since it does what it must not: a game goes on after 42 moves"),
        ("NanAtLast", 2, "game 'NanAtLast': `returns` gave [nan, 1.0] for seats = 2"),  # after the rehearsal
        ("Graded", 2, "won_or_lost = True says that they are 1 and -1, or 0 for both. Give those"),
    ],
)
def test_a_faulty_game_in_python_ends_the_run_before_it_records_anything_of_it(refused, tmp_path, game, code, said):
    words = "--model uniform --games 500 --simulations 4 --workers 1 --out out --quiet --no-roofline"
    words += " --resign 1 --resign-check 1" if game == "Graded" else ""
    assert said in refused(f"--game broken_in_python:{game} {words}", code)
    assert all(np.isfinite(np.load(path)["returns"]).all() for path in shards(tmp_path / "out"))


@pytest.mark.thorough
def test_a_full_disk_ends_the_run_and_room_mends_it(tmp_path):
    words = ["--model", "uniform", "--games", 100, "--workers", 2, "--out", "games"]
    done = selfplay(*words, cwd=tmp_path, limit=100_000)
    assert done.returncode == 1
    assert complaint(done).endswith("then run again with --resume.")
    assert [path.name for path in (tmp_path / "games").iterdir()] == ["manifest.json"]
    assert selfplay(*words, "--resume", cwd=tmp_path).returncode == 0
    assert records_of(tmp_path / "games")["finished"].tolist() == list(range(100))


@pytest.mark.sample
@pytest.mark.parametrize("model", ["uniform", "rollout", "blobnet-small"])
def test_the_report_alone_is_on_standard_output(tmp_path, model):
    done = selfplay("--model", model, "--games", 20, "--simulations", 6, "--no-roofline", "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    jsonschema.validate(made, report.schema())
    assert (made["status"], made["workload"], made["roofline"]) == ("done", "selfplay", None)
    assert made["progress"] == {"done": 20, "total": 20, "unit": "games", "before": 0}
    assert made["throughput"]["simulations_per_s"] > 0
    assert sum(made["time_s"].values()) == pytest.approx(made["wall_s"] * made["lanes"], rel=0.05, abs=0.1)


@pytest.mark.thorough
def test_a_game_of_ones_own_plays(tmp_path):
    """The example, as its docstring says, from a folder that Python does not search by itself."""
    shutil.copy(EXAMPLES / "nim.py", tmp_path)
    words = ["--game", "nim:Nim", "--game-options", "largest=4", "--model", "rollout", "--games", 30, "--workers", 1]
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "script.py"
    script.write_text("if __name__ == '__main__':\n    from gpuinfer.cli import main\n\n    main()\n")
    done = selfplay(*words, "--out", "games", cwd=tmp_path, program=str(script))
    assert done.returncode == 0, done.stderr
    records = records_of(tmp_path / "games")
    assert records["finished"].tolist() == list(range(30))
    assert records["observation"].shape[1] == 15
    assert (records["returns"].sum(axis=1) == 0).all()
