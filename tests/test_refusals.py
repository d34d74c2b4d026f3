"""Every command refuses what cannot be in at most three lines, which name it and end with the cure: one table."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from packages import install, install_count

from gpuinfer.config import registry
from gpuinfer.host import process

RUN = "count --backend parrot --strategy at-once"
SHORT = {
    "RUN": RUN,
    "BENCH": f"bench {RUN} --seconds 0.3 --warmup 0",
    "PEERS": "bench generate --model tiny --repeats 2 --new-tokens 4 --batch-sizes 1,2 --compare batched,vllm",
    "GENERATE": "generate --model tiny --prompt a",
}
# command line | exit code | what the message names … and its cure
TABLE = """
cuont | 2 | no command named 'cuont' … 'count'
count --gamse 3 | 2 | no flag '--gamse' … '--games'
--vresion | 2 | no flag '--vresion' … '--version'
count more | 2 | See gpuinfer count --help.
count --games | 2 | '--games' requires an argument
RUN --games x | 2 | --games: 'x' is not a whole number
RUN --games 0 | 2 | --games: '0' is less than 1 … Give 1 or more.
RUN --games 13 | 2 | 13 brings bad luck … --games 12
RUN --order upp | 2 | 'up'? Choose from up, down.
RUN --dtype float17 | 2 | 'float16'
RUN --device gpu | 2 | --device: 'gpu' is not of the right form
RUN --device cuda:0,cuda:1 | 2 | names 2 devices (cuda:0, cuda:1), and only one can be served
count --backend parot | 2 | 'parrot'? Installed:
RUN --strategy atonce | 2 | 'at-once'
RUN -B secnds=1 | 2 | -B secnds: backend 'parrot' has no option
RUN -B seconds=-1 | 2 | -B seconds: '-1' is less than 0.
GENERATE -B compile=fast | 2 | 'fast' is not one of the choices. Choose from true, false, default, reduce-overhead,
GENERATE --profile-seconds 2 | 2 | --profile-seconds has no effect without --profile. Add --profile DIR
rollouts --env here:Other --model tiny --kl-coef 0.1 | 2 | --kl-coef has no effect … Add --reference inline
memory --model blobnet-small --no-probe -B checkpoint_segments=2 | 2 | -B checkpoint_segments has no … Add --training
RUN -B seconds | 2 | Write -B seconds=VALUE.
RUN -S x=1 | 2 | strategy 'at-once' has no option 'x'. Options: none.
RUN --json no/where.json | 2 | Create it (mkdir -p no).
RUN --json . | 2 | this is a folder
RUN --config absent.toml | 2 | no settings file absent.toml … Give --config a file
generate --model null --input /dev/null --backend parrot | 2 | model of text … serves rows
selfplay --backend later | 2 | backend 'later' … acme 1.0 is for gpuinfer >=9,<10 … Install a version of it
chore | 2 | acme 1.0 is for gpuinfer >=9,<10
bad --help | 2 | an option 'seed' … Rename the option.

plugins lsit | 2 | lsit
plugins show bakend x | 2 | 'backends'
plugins show backend parot | 2 | 'parrot'
plugins show backend later | 2 | acme 1.0 is for gpuinfer >=9,<10
plugins check gpuinfer-cuont | 2 | 'gpuinfer-count'
plugins install echo | 2 | --yes
plugins upgrade --all | 2 | --yes
plugins uninstall echo | 2 | --yes
plugins upgrade --yes | 2 | gpuinfer plugins upgrade NAME, or --all
plugins upgrade echo --all --yes | 2 | gpuinfer plugins upgrade NAME, or --all
plugins install echo --yes --find-links nowhere | 2 | Give one that holds packages
plugins new strategy dynamic | 2 | is there already, from gpuinfer … such as my-dynamic.
plugins new workload selfplay | 2 | is there already … such as my-selfplay.
plugins new workload bench | 2 | a command or a setting … such as my-bench.
plugins new workload give-up | 2 | a command or a setting … such as my-give-up.
plugins new backend echo | 2 | from gpuinfer-echo … such as my-echo.
plugins new game echo | 2 | gpuinfer-echo 0.1.0 is installed already … such as my-echo.
docs serve#nothing | 2 | headers
docs zzyzxqq | 2 | `gpuinfer docs` lists the pages.
docs --n_ctx | 2 | Here it is '--context'.

bench cuont | 2 | no target named 'cuont' … 'count'
BENCH --compare gmes=1,2 | 2 | 'games'
BENCH --compare json=a,b | 2 | no setting to compare named 'json'
BENCH --compare workers= | 2 | --compare workers=a,b
BENCH --compare order=up,down --order up | 2 | --compare and --order both name values of 'order'
BENCH --compare seconds=1,2 -B seconds=1 | 2 | --compare and -B both name values of 'seconds'
BENCH --compare parrot,inprocess | 2 | --compare and --backend
bench count --compare parrot -B parot.seconds=1 | 2 | no backend named 'parot' … 'parrot'
bench count --backend parot -B seconds=0,1ms | 2 | no backend named 'parot' … 'parrot'
bench count --compare parrot,inprocess -B seconds | 2 | -B seconds=VALUE
BENCH --seconds soon | 2 | --seconds: 'soon' is no time
BENCH --repeats 0 | 2 | --repeats
BENCH --seed 1,2 | 2 | --seed: '1,2' is not a whole number
BENCH --out games | 2 | keeps none. Leave it out.
BENCH --report /dev/null/x | 2 | Give a folder that can be written to
BENCH --json no/where.json | 2 | Create it (mkdir -p no).
BENCH --fail-under nan | 2 | nothing could fail that
BENCH --fail-under 0.000001 -S max_wait=1,2 --repeats 1 | 2 | none of these can run here
tune count --budget 1s | 2 | no time of 10 s or more
tune count --backend , | 2 | names no backend … --backend inprocess,central
tune count --resume | 2 | keeps none. Leave it out.
PEERS --temperature 1 | 2 | --temperature is no part of a comparison of generators
PEERS --seconds 3 | 2 | --seconds is no part of a comparison of generators
PEERS --batch-sizes 1,x | 2 | --batch-sizes 1,x: not whole numbers
PEERS --new-tokens 100000 | 2 | Take a smaller --new-tokens
PEERS --prompts none.jsonl | 2 | --prompts none.jsonl: there is no such file
PEERS --prompts odd.jsonl | 2 | --prompts odd.jsonl, row 2:
PEERS --python vllm | 2 | Write --python vllm=/path/to/python
PEERS --python vllm=/nowhere | 2 | /nowhere is no program
PEERS --python vlm=/bin/true | 2 | no peer named 'vlm' … 'vllm'
PEERS --model nothing | 2 | nothing

serve --max-model-len 4096 | 2 | '--context'
serve --quantization awq | 2 | How weights are quantised is read from their files.
serve --max-num-seqs 8 | 2 | '-B slots=N'
serve --num-replicas 3 | 2 | '--replicas'
serve m/llama | 2 | --model m/llama?
serve --model m/llama | 2 | no such model in … To fetch it, add --download.
GENERATE -c 99 | 2 | '--context'
GENERATE -ngl 99 | 2 | no flag '-ngl' … '--device cuda'
GENERATE --n_predict 9 | 2 | '--max-new-tokens'
GENERATE --max_new_tokens 9 | 2 | '--max-new-tokens'
GENERATE -B max_num_seqs=4 | 2 | 'slots'
GENERATE 'two words' | 2 | Did you mean --prompt
generate here.jsonl | 2 | --input here.jsonl?
generate --prompt a --output o.jsonl --model m/llama | 2 | no such model in … add --download
rollouts --env arithmetic --model m/llama | 2 | no such model in … add --download
bench generate --model m/llama | 2 | no such model in … add --download
verify --model m/llama@v2 | 2 | 'm/llama@v2' … add --download
memory --model m/llama | 2 | no such model in … add --download
generate --prompt a --model blobnet-x --download | 2 | is no name of the hub … --model OWNER/NAME
generate --prompt a --model m/llama --download | 1 | HF_HUB_OFFLINE … Unset it
generate --prompt a --model a=tiny,b=tiny | 2 | --prompt names no model, and there are several. Give --input
GENERATE --revision main | 2 | OWNER/NAME@REVISION
GENERATE --cache-dir x | 2 | HF_HOME
selfplay --uct_c 2 | 2 | '--exploration'
selfplay --sim 2 | 2 | '--simulations'
selfplay connect-four | 2 | --game connect-four?
selfplay --game gomoku | 2 | Give --game gomoku:Gomoku.
selfplay --game gomoku.py | 2 | Give --game gomoku:Gomoku.
selfplay --game here | 2 | no game named 'here'.
train --tensorboard runs | 2 | --track tensorboard=DIR
doctor --max-model-len 9 | 2 | Other commands have it as '--context'.
doctor --xyzzy | 2 | no flag '--xyzzy'. See gpuinfer doctor --help.
run-batch x | 2 | 'gpuinfer generate'
pull m/llama | 2 | --model OWNER/NAME … --download
"""
ROWS = [tuple(line.split(" | ")) for line in TABLE.splitlines() if line]
NEVER = "raise SystemExit('imported')"
BAD = """
    from gpuinfer.api import Workload, Options
    class Bad(Workload):
        class Options(Options):
            seed: int = 1
"""


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """A folder with some files, and packages on the path: `count`, one for another contract, one with a bad option."""
    from huggingface_hub import constants  # noqa: F401  keeps what HF_HUB_OFFLINE was when it was imported

    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("here")
    install_count(site)
    install(site, "bad", {"workloads": {"bad": "bad_module:Bad"}}, {"bad_module": BAD})
    later = {"backends": {"later": "acme_later:X"}, "workloads": {"chore": "acme_later:X"}}
    install(site, "acme", later, {"acme_later": NEVER}, requires=["gpuinfer>=9,<10"])
    (folder / "gomoku.py").write_text("import a.b\nclass Board: pass\nclass Gomoku(a.b.PythonGame): pass\n")
    (folder / "here.py").write_text("class Other: pass\n")
    (folder / "here.jsonl").write_text('"a"\n')
    (folder / "odd.jsonl").write_text('{"prompt": "one"}\n{"promt": "two"}\n')
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("GPUINFER_")]:
            patch.delenv(variable)
        patch.setenv(registry.DISABLED, "")
        patch.setenv("COLUMNS", "120")
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.syspath_prepend(str(site))
        patch.chdir(folder)
        registry.search_again()
        yield folder


def refused(gpuinfer, line: str, code: int, said: str) -> None:
    words = [word for part in shlex.split(line) for word in shlex.split(SHORT.get(part, shlex.quote(part)))]
    ended, out, errors = gpuinfer(*words)
    assert (ended, out) == (code, ""), errors
    message = errors[errors.index("gpuinfer: ") :]
    assert len(message.splitlines()) <= 3
    assert "Traceback" not in errors
    for part in said.split(" … "):
        assert part in " ".join(message.split())


@pytest.mark.parametrize(("line", "code", "said"), ROWS, ids=[row[0] for row in ROWS])
def test_refused(gpuinfer, line, code, said):
    refused(gpuinfer, line, int(code), said)


# what the settings file or a variable says | command line | what the message names
SETTINGS = """
[count]\\ngamse = 3 | RUN | gpuinfer.toml [count] gamse: workload 'count' has no option 'gamse' … 'games'
[count]\\nout = "games" | BENCH | gpuinfer.toml [count] out: … Add --out none.
devise = 1 | RUN | gpuinfer.toml devise … 'device'
[coumt]\\na = 1 | RUN | 'count'
[backends.parot]\\na = 1 | RUN | gpuinfer.toml [backends] parot … 'parrot'
count = 3 | RUN | gpuinfer.toml count: 3 is no table
seed = 1\\nx =\\n | RUN | line 2 … Correct that line.
seed = 'x' | RUN | gpuinfer.toml seed: 'x' is not a whole number … default: 0
seed = -1 | RUN | -1 is less than 0. Give 0 or more.
dtype = 'float31' | RUN | 'float32'? Choose from float32, bfloat16
device = 'gpu' | RUN | 'gpu' is not of the right form … cuda:1
live = 'maybe' | RUN | 'maybe' is neither true nor false
GPUINFER_SEDE=1 | RUN | 'GPUINFER_SEED' … unset GPUINFER_SEDE.
GPUINFER_COUMT__GAMES=1 | RUN | GPUINFER_COUNT__…
GPUINFER_BACKENDS__PAROT__SECONDS=1 | RUN | no such backend … 'parrot'
GPUINFER_BACKENDS=parrot | RUN | GPUINFER_BACKENDS: 'parrot' is no table
GPUINFER_SEED=many | RUN | GPUINFER_SEED: 'many' is not a whole number
"""
GIVEN = [tuple(line.split(" | ")) for line in SETTINGS.splitlines() if line]


@pytest.mark.parametrize(("given", "line", "said"), GIVEN, ids=[row[0] for row in GIVEN])
def test_what_a_file_or_a_variable_says_is_refused_with_its_place(gpuinfer, tmp_path, monkeypatch, given, line, said):
    monkeypatch.chdir(tmp_path)
    if given.startswith("GPUINFER_"):
        monkeypatch.setenv(*given.split("="))
    else:
        Path("gpuinfer.toml").write_text(given.replace("\\n", "\n"))
    refused(gpuinfer, line, 2, said)


def test_an_idle_setting_of_a_file_or_a_variable_fails_no_run(gpuinfer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpuinfer.toml").write_text("profile_seconds = 2")
    assert gpuinfer(*RUN.split(), "--games", "2")[0] == 0
    monkeypatch.setenv("GPUINFER_PROFILE_SECONDS", "3")
    assert gpuinfer(*RUN.split(), "--games", "2")[0] == 0


def test_a_report_for_a_closed_standard_output_is_refused_before_any_work(gpuinfer, monkeypatch):
    monkeypatch.setattr(process, "closed", {"stdout"})
    refused(gpuinfer, "RUN --json -", 2, "standard output is closed. Give a file")


def test_a_traceback_comes_only_with_two_vs(gpuinfer):
    assert "Traceback" in gpuinfer(*RUN.split(), "--games", "13", "-vv")[2]
    assert "Traceback" not in gpuinfer(*RUN.split(), "--games", "13", "-v")[2]
