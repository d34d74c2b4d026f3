"""`gpuinfer selfplay` at the command line: what goes in, what comes out, and bad input of every kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import torch
from command import records_of, selfplay
from complaints import complaint
from safetensors.torch import save_file

from gpuinfer.report import report

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
QUICK = ["--games", 4, "--workers", 1, "--simulations", 4, "--no-roofline", "--quiet"]


def refused(*words, cwd, **options):
    """The complaint of a command that ends with exit code 2 and says nothing on standard output."""
    done = selfplay(*words, cwd=cwd, **options)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    return complaint(done)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--game", "blab"], "no game named 'blab'. Did you mean 'blob'?", id="game"),
        pytest.param(["--model", "blobnte"], "no model named 'blobnte'. Did you mean 'blobnet'?", id="model"),
        pytest.param(["--model", "unifrom"], "Did you mean 'uniform'?", id="model in the kernel"),
        pytest.param(["--backend", "inproces"], "Did you mean 'inprocess'?", id="backend"),
        pytest.param(["--strategy", "dynamo"], "Did you mean 'dynamic'?", id="strategy"),
        pytest.param(["--gamess", 3], "Did you mean '--games'?", id="flag"),
        pytest.param(["--trump", "cups"], "Choose from turned, clubs, diamonds, hearts, spades, none.", id="trump"),
        pytest.param(["-B", "max_row=3"], "Did you mean 'max_rows'?", id="-B key"),
        pytest.param(["-S", "wait=1"], "Did you mean 'max_wait'?", id="-S key"),
        pytest.param(["-B", "max_rows=many"], "-B max_rows: 'many' is not a whole number", id="-B of another type"),
        pytest.param(["-S", "max_wait=soon"], "-S max_wait: 'soon' is not a number", id="-S of another type"),
        pytest.param(["--games", 0], "--games: '0' is less than 1", id="no games"),
        pytest.param(["--players", 8, "--cards", 7], "--players: 8 is more than 7", id="8 players × 7 cards"),
        pytest.param(["--players", 7, "--cards", 8], "7 players × 8 cards and a card to turn need 57", id="7 × 8"),
        pytest.param(["--cards", 13], "Try --cards 12.", id="the whole deck with a card to turn"),
        pytest.param(["--game", "connect-four", "--cards", 5], "has no option 'cards'", id="option of another game"),
        pytest.param(["--game-options", "players"], "Write key=value,key=value.", id="option without a value"),
        pytest.param(["--resume"], "Add --out DIR.", id="resume of nothing"),
        pytest.param(["--weights", "nowhere"], "no file 'nowhere'", id="weights that are not there"),
        pytest.param(["--concentration", "inf"], "--concentration: 'inf' is more than", id="endless noise"),
        pytest.param(["--temperature", "nan"], "--temperature: 'nan'", id="temperature that is no number"),
        pytest.param(["--game", "nowhere:Game"], "No module named 'nowhere'", id="game module"),
        pytest.param(["--game", "strange_models:plain"], "Derive it from that class", id="game that is none"),
    ],
)
def test_bad_usage_is_refused_at_once(words, message):
    assert message in refused(*words, cwd=HERE)


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        pytest.param("raises", "the factory raised RuntimeError: no such data", id="raises"),
        pytest.param("no_module", "returned int, not a torch.nn.Module", id="returns no module"),
        pytest.param("absent", "no factory in module 'strange_models' named 'absent'", id="is not there"),
        pytest.param("wrong_shapes", "with [2, 51] and [2, 4]. Let it return policy logits [2, 52]", id="wrong shapes"),
        pytest.param("not_a_number", "answered with NaN in output 0 [2, 52]", id="answers NaN"),
    ],
)
def test_a_model_factory_that_fails_is_named(factory, message):
    assert message in refused(*QUICK, "--model", f"strange_models:{factory}", cwd=HERE)


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        pytest.param("spoils", "holds NaN", id="NaN after a while"),
        pytest.param("hopeless", "-inf among its values", id="values of -inf"),
    ],
)
def test_answers_that_no_search_can_use_fail_the_run(tmp_path, factory, message):
    shutil.copy(HERE / "strange_models.py", tmp_path)
    done = selfplay(*QUICK, "--model", f"strange_models:{factory}", "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 1
    assert message in complaint(done)
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "failed"


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize("kind", ["another network", "not weights"])
def test_weights_that_do_not_fit_are_refused(tmp_path, kind):
    if kind == "another network":
        save_file({"first.weight": torch.zeros(3, 3)}, str(tmp_path / "weights.safetensors"))
    else:
        (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    words = ["--model", "blobnet-small", "--weights", "weights.safetensors"]
    assert "weights.safetensors" in refused(*QUICK, *words, cwd=tmp_path)


@pytest.mark.sample
@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere"])
def test_an_out_that_cannot_be_written_is_refused(tmp_path, out):
    (tmp_path / "file").write_text("in the way")
    message = refused(*QUICK, "--model", "uniform", "--out", out, cwd=tmp_path)
    assert "cannot be written" in message
    assert message.endswith("Give another folder with --out.")


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
    assert (made["status"], made["workload"]) == ("done", "selfplay")
    assert made["progress"] == {"done": 20, "total": 20, "unit": "games", "before": 0}
    assert made["throughput"]["simulations_per_s"] > 0
    assert made["roofline"] is None
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


@pytest.mark.sample
@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("no python", "importing 'mine' raised SyntaxError", id="cannot be imported"),
        pytest.param("class Mine: pass", "Derive it from that class", id="is not a Game"),
        pytest.param(
            "from gpuinfer.workloads.selfplay.game import Game\nclass Mine(Game): rules = 'mine'",
            "does not say its seats, actions",
            id="does not say how large it is",
        ),
        pytest.param(
            "from nim import Nim\nclass Mine(Nim): rules = 'nowhere'",
            "a game's rules cannot be imported",
            id="has no rules",
        ),
        pytest.param(
            "from nim import Nim, deal\nclass Mine(Nim): rules = 'mine'",
            "mine has no compiled function 'to_move'",
            id="has half of the rules",
        ),
        pytest.param(
            "from nim import Nim\nclass Mine(Nim):\n    rules = 'nim'\n"
            "    def __init__(self, *given, **options):\n        super().__init__(*given, **options)\n"
            "        self.words = 4",
            "reaches for number 4 where words = 4 says how many there are. Declare words = 5 or more.",
            id="is larger than it says",
        ),
    ],
)
def test_a_game_that_is_none_is_refused(tmp_path, source, message):
    shutil.copy(EXAMPLES / "nim.py", tmp_path)
    (tmp_path / "mine.py").write_text(source)
    assert message in refused(*QUICK, "--model", "uniform", "--game", "mine:Mine", cwd=tmp_path)


@pytest.mark.parametrize("model", ["uniform", "rollout"])
def test_another_backend_refuses_an_evaluator_inside_the_kernel(model, tmp_path):
    done = selfplay("--model", model, "--backend", "echo", "--games", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "Leave --backend out" in done.stderr
