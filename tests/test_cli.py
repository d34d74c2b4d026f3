"""The command as people and scripts meet it: exit codes, streams, what is shown. What is refused: test_refusals.py."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Counting
from packages import install

from gpuinfer.api import Options
from gpuinfer.cli.app import first_sentence
from gpuinfer.cli.building import build, merge
from gpuinfer.cli.flags import anew, spelled
from gpuinfer.config import registry

pytestmark = pytest.mark.usefixtures("count_package")

RUN = ["count", "--backend", "parrot", "--strategy", "at-once"]
MAIN = "from gpuinfer.cli import main; main()"


def process(*words: str, code: str = MAIN, **environment: str):
    """Run the command in a process of its own."""
    own = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
        env=own,
    )


def installed(folder: Path, source: str, **points: dict[str, str]) -> None:
    """Another package, whose plugins are in `bad_module`."""
    install(folder, "bad", points, {"bad_module": source})
    registry.search_again()


HEAVY = """if True:
    import os, sys
    from gpuinfer.cli.app import run
    run(sys.argv[1:])
    print("LOADED", *(name for name in os.environ["HEAVY"].split() if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], "torch numba numpy pydantic count_package"),
        (["docs", "batching"], "torch numba numpy gpuinfer.api count_package"),
    ],
)
def test_help_and_pages_import_nothing_heavy_and_no_plugin(words, heavy):
    child = process(*words, code=HEAVY, HEAVY=heavy)
    assert child.stdout.splitlines()[-1].split() == ["LOADED"], child.stderr


BAD = "raise OSError('no luck')"
SHOWN = [
    ("--help", "plugins|doctor|config|selfplay|Counts to a number and asks for each."),
    ("count --help", "--games|how many [at most]|[default: 3]|up|down|--no-resume|--backend|--roofline"),
    ("bench --help", "Counts to a number and asks for each."),
    ("bench count --help", "--games|--backend|--apply"),
    ("tune --help", "Counts to a number and asks for each."),
    ("tune count --help", "--games|--backend|--apply"),
    ("plugins list --load", "✓ parrot|gpuinfer-count 1.2|Answers each row with itself.|✗ bad|OSError: no luck"),
    ("plugins show backend parrot", "gpuinfer-count 1.2|count_package:Parrot|-B seconds=|that one batch takes"),
]


@pytest.mark.parametrize(("line", "said"), SHOWN, ids=[row[0] for row in SHOWN])
def test_what_is_shown(gpuinfer, count_package, line, said):
    installed(count_package, BAD, backends={"bad": "bad_module:X"})
    code, out, _ = gpuinfer(*line.split())
    assert code == 0
    assert [word for word in said.split("|") if word not in " ".join(out.split())] == []


@pytest.mark.parametrize(
    ("line", "share"), [("generate", "1"), ("rollouts", "1"), ("selfplay", "0"), ("bench generate", "1")]
)
def test_help_tells_the_share_that_may_fail_as_the_workload_has_it(gpuinfer, line, share):
    out = " ".join(gpuinfer(*line.split(), "--help")[1].replace("│", " ").split())
    assert re.search(r"--max-failures SHARE (.*?)\[default: (.*?)\]", out)[2] == share


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("count_package:Count", "Counts to a number and asks for each."),
        ("count_package:Elsewhere", "A workload, a backend and a strategy that a third party could have written."),
        ("gpuinfer.backends.inprocess:InProcess", "Runs the model in this process, on one device or a copy on each of "
         "several."),
        ("absent.package:Class", ""),
    ],
)  # fmt: skip
def test_one_line_about_a_plugin_is_known_without_importing_it(target, sentence):
    assert first_sentence(target) == sentence
    assert "count_package" not in sys.modules


def test_plugins_list_imports_none(count_package):
    installed(count_package, "raise SystemExit", backends={"bad": "bad_module:X"}, workloads={"seed": "bad_module:X"})
    done = process("plugins", "list")
    assert done.returncode == 0
    for words in ("· parrot", "Answers each row with itself.", "· bad", "✗ seed", "has the name of a setting"):
        assert words in done.stdout


@pytest.mark.thorough
def test_a_plugin_whose_import_ends_the_process_harms_no_other(gpuinfer, count_package):
    installed(count_package, "import os; os._exit(7)", backends={"bad": "bad_module:X"})
    code, out, _ = gpuinfer("plugins", "list", "--load")
    assert code == 0
    for words in ("✗ bad", "importing it ended the process (exit code 7)", "✓ parrot", "✓ inprocess", "✓ count"):
        assert words in out


# A run


@pytest.mark.parametrize(
    ("words", "code", "status", "done", "shown", "said"),
    [
        pytest.param([], 0, "done", 3, "3 of 3 games", "", id="done"),
        pytest.param(["--quiet"], 0, "done", 3, "3 of 3 games", "", id="quiet leaves the result alone"),
        pytest.param(["--games", "9", "--signal-at", "2"], 3, "partial", None, "Stopped", "", id="stopped"),
        pytest.param(["--fail-at", "2"], 1, "failed", None, "", "the work broke. Try fewer games.", id="failed"),
    ],
)
def test_a_run_ends_with_its_exit_code_and_its_report(gpuinfer, words, code, status, done, shown, said):
    ended, out, err = gpuinfer(*RUN, *words, "--json", "r.json")
    report = json.loads(Path("r.json").read_text())
    assert (ended, report["status"]) == (code, status)
    assert done is None or report["progress"]["done"] == done
    assert shown in out
    assert err == "" if "--quiet" in words else said in err


def test_the_report_on_standard_output_stands_there_alone(gpuinfer):
    code, out, err = gpuinfer(*RUN, "--json", "-", "--games", "5")
    report = json.loads(out)
    assert (code, report["schema"], report["progress"]["done"]) == (0, "gpuinfer.report/1", 5)
    assert "5 of 5 games" in err


def test_a_full_disk_is_an_error_of_the_work_and_ctrl_c_before_the_start_is_none(gpuinfer, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpuinfer.cli.output.replace_file", full)
    code, _, err = gpuinfer(*RUN, "--json", "r.json")
    assert (code, "No space left on device. Make room there" in err) == (1, True)
    monkeypatch.setattr("gpuinfer.cli.workload.build", interrupted)
    assert gpuinfer(*RUN)[::2] == (3, "")


LOUD = """
    import logging
    from gpuinfer.api import Workload
    class Loud(Workload):
        async def run(self, infer):
            log = logging.getLogger("gpuinfer.loud")
            log.warning("mind the gap")
            log.info("all is well")
            return
            yield
"""


def test_warnings_reach_people_and_more_with_v(gpuinfer, count_package):
    installed(count_package, LOUD, workloads={"loud": "bad_module:Loud"})
    words = ["loud", *RUN[1:], "--quiet"]
    assert gpuinfer(*words)[2] == "gpuinfer: mind the gap\n"
    assert gpuinfer(*words, "-v")[2] == "gpuinfer: mind the gap\ngpuinfer: all is well\n"


# Streams and signals


def test_a_standard_file_that_is_closed_becomes_no_pipe():
    """Whatever is opened later would be taken for it."""
    code = (
        "import os, sys\n"
        "from gpuinfer.host.process import open_standard_files\n"
        "open_standard_files()\n"
        "print('lost', flush=True)\n"
        "print(*os.pipe(), *map(os.get_inheritable, (0, 1)), file=sys.stderr)"
    )
    words = ["sh", "-c", 'exec "$@" >&- <&-', "sh", sys.executable, "-c", code]
    *pipe, first, second = subprocess.run(words, stderr=subprocess.PIPE, text=True).stderr.split()
    assert (min(map(int, pipe)) > 2, first, second) == (True, "True", "True")


@pytest.mark.sample
@pytest.mark.parametrize(
    ("words", "code", "encoding"),
    [
        pytest.param(RUN, 0, "ascii", id="a run"),
        pytest.param([*RUN, "--json", "r-\udcff東.json", "--quiet"], 0, "utf-8", id="a file whose name is no text"),
        pytest.param(["docs", "workers"], 0, "ascii", id="a page"),
        pytest.param(["plugins", "list"], 0, "latin-1", id="a table"),
        pytest.param(["count", "--help"], 0, "ascii", id="help"),
        pytest.param(["naïve→東"], 2, "latin-1", id="an error"),
    ],
)
def test_what_the_terminal_s_encoding_lacks_is_no_failure(words, code, encoding):
    child = process(*words, code="from gpuinfer.__main__ import main; main()", PYTHONIOENCODING=encoding)
    assert child.returncode == code, child.stderr
    assert "Traceback" not in child.stderr
    assert "not foreseen" not in child.stderr


def test_a_report_in_ascii_says_the_same_by_escapes():
    words = [*RUN, "--json", "-", "--trace", "naïve→東.trace"]
    child = process(*words, code="from gpuinfer.__main__ import main; main()", PYTHONIOENCODING="ascii")
    assert child.returncode == 0, child.stderr
    assert child.stdout.isascii()
    assert json.loads(child.stdout)["settings"]["trace"] == words[-1]


def test_a_terminal_gets_a_live_view():
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, *RUN, "--games", "20", "-B", "seconds=30ms"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's end, once the child is gone
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert child.wait(timeout=60) == 0
    assert b"of 20 games" in shown
    assert "╰─".encode() in shown


def test_a_reader_that_goes_away_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", MAIN, *RUN, "--json", "-", "--quiet"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, "Traceback" in done.stderr, "BrokenPipe" in done.stderr) == (1, False, False)


STRUCK = """if True:
    import os, signal, sys

    class Strikes:
        def find_spec(self, name, path=None, target=None):
            if name == os.environ["AT"]:
                sys.meta_path.remove(self)
                os.kill(os.getpid(), signal.Signals[os.environ["SENT"]])

    sys.meta_path.insert(0, Strikes())
    from gpuinfer.__main__ import main
    main()
"""
LATE = """if True:
    import atexit, os, signal, threading
    number = signal.Signals[os.environ["SENT"]]
    def late():
        threading.main_thread().join()
        os.kill(os.getpid(), number)
    if os.environ["AT"] == "exit":
        atexit.register(os.kill, os.getpid(), number)
    else:
        threading.Thread(target=late).start()
    from gpuinfer.__main__ import main
    main()
"""


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("at", ["selectors", "gpuinfer.cli", "typer", "gpuinfer.cli.building", "gpuinfer.runtime.run"])
def test_a_signal_at_any_instant_of_the_start_exits_3(sent, at):
    child = process(*RUN, "--json", "r.json", code=STRUCK, AT=at, SENT=sent)
    assert (child.returncode, child.stderr) == (3, "")
    assert not Path("r.json").exists()


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("at", ["exit", "threads"])
def test_a_signal_once_all_is_said_does_not_change_the_exit_code(sent, at):
    child = process("no-such-command", code=LATE, AT=at, SENT=sent)
    assert (child.returncode, "no command named" in child.stderr, "Traceback" in child.stderr) == (2, True, False)


# Settings → build


def test_flags_reach_the_plugins_as_typed_options():
    values = {"games": "2k", "resume": True, "backend": "parrot", "strategy": "at-once", "dtype": "bfloat16"}
    plan = build("count", merge("count", {**values, "backend_options": ["seconds=5ms"]}))
    assert (plan.workload.options.games, plan.workload.options.resume) == (2000, True)
    assert plan.backend.options.seconds == 0.005
    assert (plan.backend.setup.dtype, plan.backend.setup.processes) == ("bfloat16", 1)


def test_the_command_line_is_spelled_again_without_what_is_about_output():
    values = {"games": "5", "games_in_flight": "2", "resume": False, "live": True, "json": "-", "verbose": 1}
    again = spelled("count", {**values, "backend_options": ["a=b c"], "seed": None})
    assert again == "gpuinfer count --games 5 --games-in-flight 2 --no-resume -B 'a=b c'"


class Keeping(Counting):
    """A workload that keeps what it does."""

    class Options(Options):
        out: str | None = None
        output: str | None = None
        resume: bool = False

    goes_on_by, writes_to = ("resume",), ("out", "output")


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        pytest.param({"out": "records", "resume": True}, "--out records-3", id="to a place of its own"),
        pytest.param({"out": "new.d"}, "--out new-2.d", id="beside what this very run will write"),
        pytest.param({"output": "-"}, "--output -", id="to a stream as before"),
        pytest.param({"output": "/dev/null"}, "--output /dev/null", id="to a device as before"),
    ],
)
def test_the_same_work_anew_is_refused_by_nothing_that_was_written(given, flags):
    Path("records").mkdir()
    Path("records-2").mkdir()
    assert anew("count", given, Keeping(**given)) == f"gpuinfer count {flags}"
    assert anew("count", {"resume": None}, Keeping(resume=True)) == "gpuinfer count --no-resume"


NEEDY = """
    from gpuinfer.api import Options, Progress, Workload
    class Needy(Workload):
        class Options(Options):
            place: str
            names: list[str] = []
            counts: list[int] = [1]
        async def run(self, infer):
            yield Progress(len(self.options.names), note=self.options.place)
"""


def test_config_tells_each_value_and_its_origin(gpuinfer, count_package, monkeypatch):
    installed(count_package, NEEDY, workloads={"needy": "bad_module:Needy"})
    Path("gpuinfer.toml").write_text("seed = 4\n[count]\ngames = 5")
    monkeypatch.setenv("GPUINFER_DEVICE", "cpu")
    code, out, _ = gpuinfer("config", "--json")
    shown = {key: (one["value"], one["origin"]) for key, one in json.loads(out).items()}
    assert code == 0
    assert shown["seed"] == (4, "gpuinfer.toml seed")
    assert shown["device"] == ("cpu", "GPUINFER_DEVICE")
    assert shown["count.games"] == (5, "gpuinfer.toml [count] games")
    assert shown["count.order"] == ("up", "default")
    assert shown["needy.place"] == (None, "required, not set")
    assert shown["needy.counts"] == ([1], "default")
    assert "GPUINFER_DEVICE" in gpuinfer("config")[1]


@pytest.mark.parametrize(
    ("flags", "variables", "toml"),
    [
        pytest.param("--names a,b --counts 1,4k", {}, "", id="one flag"),
        pytest.param("--names a --names b --counts 1 --counts 4000", {}, "", id="a flag for each"),
        pytest.param("", {"NAMES": '["a", "b"]', "COUNTS": "[1, 4000]"}, "", id="JSON in the environment"),
        pytest.param("", {"NAMES": "a,b", "COUNTS": "1,4k"}, "", id="text in the environment"),
        pytest.param("", {}, 'names = ["a", "b"]\ncounts = [1, 4000]', id="an array in the file"),
    ],
)
def test_lists_can_be_given_in_every_way(gpuinfer, count_package, flags, variables, toml, monkeypatch):
    installed(count_package, NEEDY, workloads={"needy": "bad_module:Needy"})
    Path("gpuinfer.toml").write_text(f"[needy]\nplace = 'here'\n{toml}")
    for name, text in variables.items():
        monkeypatch.setenv(f"GPUINFER_NEEDY__{name}", text)
    code, out, _ = gpuinfer("needy", *flags.split(), "--backend", "parrot", "--json", "-")
    settings = json.loads(out)["settings"]["needy"]
    assert (code, settings["names"], settings["counts"]) == (0, ["a", "b"], [1, 4000])


# Completion


@pytest.mark.sample
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("co", {"config", "count"}),
        ("count --ga", {"--games"}),
        ("count --backend par", {"parrot"}),
        ("count --order ", {"up", "down"}),
        ("count --backend parrot -B ", {"seconds=", "max_rows="}),
        ("plugins show backend par", {"parrot"}),
    ],
)
def test_bash_completes(line, offered):
    words = ["gpuinfer", *line.split(" ")]
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert set(process(_GPUINFER_COMPLETE="complete_bash", **asked).stdout.split()) == offered


def test_bash_takes_the_completion_script():
    script = process(_GPUINFER_COMPLETE="source_bash").stdout
    words = ["bash", "-c", f"{script}\ncomplete -p gpuinfer"]
    check = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stderr
    assert "gpuinfer" in check.stdout
