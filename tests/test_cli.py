"""The command as people and scripts meet it: exit codes, messages, streams, completion."""

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
from gpuinfer.host import process as standard_files

pytestmark = pytest.mark.usefixtures("count_package")

RUN = ["count", "--backend", "parrot", "--strategy", "at-once"]


def process(*words: str, code: str = "from gpuinfer.cli import main; main()", **environment: str):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


# Listing costs nothing


def test_help_imports_nothing_heavy_and_no_plugin():
    code = """if True:
        import sys
        from gpuinfer.cli.app import run
        run(sys.argv[1:])
        heavy = ("torch", "numba", "numpy", "pydantic", "count_package")
        print("LOADED", *(name for name in heavy if name in sys.modules))
    """
    child = process("--help", code=code)
    assert child.stdout.splitlines()[-1].split() == ["LOADED"], child.stderr


def test_help_lists_our_commands_and_a_third_partys_workload(gpuinfer):
    _, out, _ = gpuinfer("--help")
    for words in ("plugins", "doctor", "config", "selfplay", "Counts to a number and asks for each."):
        assert words in out


def test_a_workloads_help_shows_its_options_and_the_common_flags(gpuinfer):
    code, out, _ = gpuinfer("count", "--help")
    assert code == 0
    for words in ("--games", "how many [at most]", "[default: 3]", "up|down", "--no-resume", "--backend", "--roofline"):
        assert words in out


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["generate"], "1"),
        (["rollouts"], "1"),
        (["selfplay"], "0"),
        (["bench", "generate"], "1"),
    ],
)
def test_help_tells_the_share_that_may_fail_as_the_workload_has_it(gpuinfer, words, share):
    out = " ".join(gpuinfer(*words, "--help")[1].replace("│", " ").split())
    assert re.search(r"--max-failures SHARE (.*?)\[default: (.*?)\]", out)[2] == share


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        pytest.param("count_package:Count", "Counts to a number and asks for each.", id="of the class"),
        pytest.param(
            "count_package:Elsewhere",
            "A workload, a backend and a strategy that a third party could have written.",
            id="of the module, when the class is not there",
        ),
        pytest.param(
            "gpuinfer.backends.inprocess:InProcess",
            "Runs the model in this process, on one device or a copy on each of several.",
            id="a sentence that ends within a line",
        ),
        pytest.param("absent.package:Class", "", id="nothing, when there is no such package"),
    ],
)
def test_one_line_about_a_plugin_is_known_without_importing_it(target, sentence):
    assert first_sentence(target) == sentence
    assert "count_package" not in sys.modules


# Bad usage: one to three lines, the nearest name, exit code 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["cuont"], "no command named 'cuont'. Did you mean 'count'?", id="unknown command"),
        pytest.param(["count", "--gamse", "3"], "no flag '--gamse'. Did you mean '--games'?", id="unknown flag"),
        pytest.param(["--vresion"], "no flag '--vresion'. Did you mean '--version'?", id="unknown flag of no command"),
        pytest.param(["count", "more"], "See gpuinfer count --help.", id="a word too many"),
        pytest.param(["count", "--games"], "'--games' requires an argument", id="a flag without its value"),
        pytest.param([*RUN, "--games", "x"], "--games: 'x' is not a whole number", id="ill-typed option"),
        pytest.param([*RUN, "--games", "0"], "--games: '0' is less than 1. Give 1 or more.", id="out of range"),
        pytest.param([*RUN, "--order", "upp"], "Did you mean 'up'? Choose from up, down.", id="no choice"),
        pytest.param([*RUN, "--dtype", "float17"], "Did you mean 'float16'?", id="no common choice"),
        pytest.param([*RUN, "--device", "gpu"], "--device: 'gpu' is not of the right form", id="no device"),
        pytest.param(["count", "--backend", "parot"], "Did you mean 'parrot'? Installed:", id="unknown backend"),
        pytest.param([*RUN, "--strategy", "atonce"], "Did you mean 'at-once'?", id="unknown strategy"),
        pytest.param([*RUN, "-B", "secnds=1"], "-B secnds: backend 'parrot' has no option", id="unknown -B key"),
        pytest.param([*RUN, "-B", "seconds=-1"], "-B seconds: '-1' is less than 0.", id="ill-valued -B key"),
        pytest.param([*RUN, "-B", "seconds"], "Write -B seconds=VALUE.", id="-B without a value"),
        pytest.param([*RUN, "-S", "x=1"], "strategy 'at-once' has no option 'x'. Options: none.", id="unknown -S key"),
        pytest.param([*RUN, "--games", "13"], "13 brings bad luck. Try --games 12.", id="the workload refuses"),
        pytest.param([*RUN, "--json", "no/where.json"], "Create it (mkdir -p no).", id="no folder for the report"),
        pytest.param([*RUN, "--json", "."], "this is a folder", id="a folder for the report"),
        pytest.param([*RUN, "--config", "absent.toml"], "no settings file absent.toml", id="no settings file"),
        pytest.param(["plugins", "show", "bakend", "x"], "Did you mean 'backends'?", id="unknown kind"),
        pytest.param(["plugins", "show", "backend", "parot"], "Did you mean 'parrot'?", id="unknown plugin"),
        pytest.param(["plugins", "check", "gpuinfer-cuont"], "Did you mean 'gpuinfer-count'?", id="unknown package"),
        pytest.param(["plugins", "lsit"], "lsit", id="unknown subcommand"),
    ],
)
def test_bad_usage_is_explained_in_three_lines_at_most(gpuinfer, words, said):
    code, out, err = gpuinfer(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("gpuinfer: ")
    assert len(err.splitlines()) <= 3
    assert "Traceback" not in err


def test_a_wrong_variable_or_file_is_explained_alike(gpuinfer, monkeypatch):
    Path("gpuinfer.toml").write_text("[count]\ngamse = 3")
    code, _, err = gpuinfer(*RUN)
    assert code == 2
    assert "gpuinfer.toml [count] gamse: workload 'count' has no option 'gamse'. Did you mean 'games'?" in err
    monkeypatch.setenv("GPUINFER_SEDE", "1")
    assert "Did you mean 'GPUINFER_SEED'?" in gpuinfer(*RUN)[2]


def test_a_traceback_comes_only_with_two_vs(gpuinfer):
    assert "Traceback" in gpuinfer(*RUN, "--games", "13", "-vv")[2]
    assert "Traceback" not in gpuinfer(*RUN, "--games", "13", "-v")[2]


def test_a_workload_with_an_option_that_is_a_common_flag_is_refused_and_harms_no_other(gpuinfer, count_package):
    source = """
        from gpuinfer.api import Workload, Options
        class Bad(Workload):
            class Options(Options):
                seed: int = 1
    """
    install(count_package, "bad", {"workloads": {"bad": "bad_module:Bad"}}, {"bad_module": source})
    registry.search_again()
    assert "Rename the option." in gpuinfer("bad", "--help")[2]
    assert gpuinfer("count", "--help")[0] == 0


# A run


def test_the_report_on_standard_output_stands_there_alone(gpuinfer):
    code, out, err = gpuinfer(*RUN, "--json", "-", "--games", "5")
    report = json.loads(out)
    assert (code, report["schema"], report["progress"]["done"]) == (0, "gpuinfer.report/1", 5)
    assert "5 of 5 games" in err


def test_quiet_leaves_the_result_alone(gpuinfer):
    code, out, err = gpuinfer(*RUN, "--quiet")
    assert (code, err) == (0, "")
    assert "3 of 3 games" in out


def test_a_standard_file_that_is_closed_becomes_no_pipe():
    """Whatever is opened later would be taken for it."""
    code = (
        "import os, sys\n"
        "from gpuinfer.host.process import open_standard_files\n"
        "open_standard_files()\n"
        "print('lost', flush=True)\n"
        "print(*os.pipe(), *map(os.get_inheritable, (0, 1)), file=sys.stderr)"
    )
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- <&-', "sh", sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    )
    *pipe, first, second = run.stderr.split()
    assert (min(map(int, pipe)) > 2, first, second) == (True, "True", "True")


def test_a_report_for_a_closed_standard_output_is_refused_before_any_work(gpuinfer, monkeypatch):
    monkeypatch.setattr(standard_files, "closed", {"stdout"})
    code, _, err = gpuinfer(*RUN, "--json", "-")
    assert (code, "standard output is closed. Give a file" in err) == (2, True)


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
    child = subprocess.run(
        [sys.executable, "-m", "gpuinfer", *words],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert child.returncode == code, child.stderr
    assert b"Traceback" not in child.stderr
    assert b"not foreseen" not in child.stderr


def test_a_report_in_ascii_says_the_same_by_escapes():
    named = "naïve→東.trace"
    words = [*RUN, "--json", "-", "--trace", named]
    child = process(*words, code="from gpuinfer.__main__ import main; main()", PYTHONIOENCODING="ascii")
    assert child.returncode == 0, child.stderr
    assert child.stdout.isascii()
    assert json.loads(child.stdout)["settings"]["trace"] == named


def test_a_terminal_gets_a_live_view():
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", "from gpuinfer.cli import main; main()", *RUN, "--games", "20", "-B", "seconds=30ms"],
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


def test_a_run_that_is_stopped_exits_3_and_reports_what_is_done(gpuinfer):
    code, _, _ = gpuinfer(*RUN, "--games", "9", "--signal-at", "2", "--json", "r.json")
    report = json.loads(Path("r.json").read_text())
    assert (code, report["status"]) == (3, "partial")
    assert 2 <= report["progress"]["done"] < 9


def test_a_run_that_fails_exits_1_and_leaves_its_report(gpuinfer):
    code, _, err = gpuinfer(*RUN, "--fail-at", "2", "--json", "r.json")
    assert (code, json.loads(Path("r.json").read_text())["status"]) == (1, "failed")
    assert "gpuinfer: the work broke. Try fewer games." in err


def test_a_reader_that_goes_away_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.Popen(
        [sys.executable, "-c", "from gpuinfer.cli import main; main()", *RUN, "--json", "-", "--quiet"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_warnings_reach_people_and_more_with_v(gpuinfer, count_package):
    source = """
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
    install(count_package, "bad", {"workloads": {"loud": "bad_module:Loud"}}, {"bad_module": source})
    registry.search_again()
    words = ["loud", *RUN[1:], "--quiet"]
    assert gpuinfer(*words)[2] == "gpuinfer: mind the gap\n"
    assert gpuinfer(*words, "-v")[2] == "gpuinfer: mind the gap\ngpuinfer: all is well\n"


def test_a_full_disk_is_an_error_of_the_work(gpuinfer, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("gpuinfer.cli.output.replace_file", full)
    code, _, err = gpuinfer(*RUN, "--json", "r.json")
    assert code == 1
    assert "No space left on device. Make room there" in err


def test_ctrl_c_before_the_start_exits_3(gpuinfer, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpuinfer.cli.workload.build", interrupted)
    code, _, err = gpuinfer(*RUN)
    assert (code, err) == (3, "")


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
STARTS = ["selectors", "gpuinfer.cli", "typer", "gpuinfer.cli.building", "gpuinfer.runtime.run"]


@pytest.mark.parametrize("at", STARTS)
@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT"])
def test_a_signal_at_any_instant_of_the_start_exits_3(sent, at):
    child = process(*RUN, "--json", "r.json", code=STRUCK, AT=at, SENT=sent)
    assert (child.returncode, child.stderr) == (3, "")
    assert not Path("r.json").exists()


@pytest.mark.parametrize(
    "arranged",
    [
        pytest.param("atexit.register(os.kill, os.getpid(), number)", id="interpreter taken apart"),
        pytest.param("threading.Thread(target=late, args=(number,)).start()", id="threads waited for"),
    ],
)
@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT"])
def test_a_signal_once_all_is_said_does_not_change_the_exit_code(sent, arranged):
    code = f"""if True:
        import atexit, os, signal, threading
        number = signal.{sent}
        def late(number):
            threading.main_thread().join()
            os.kill(os.getpid(), number)
        {arranged}
        from gpuinfer.__main__ import main
        main()
    """
    child = process("no-such-command", code=code)
    assert child.returncode == 2
    assert "no command named" in child.stderr
    assert "Traceback" not in child.stderr


# Settings → build


def test_flags_reach_the_plugins_as_typed_options():
    values = {"games": "2k", "resume": True, "backend": "parrot", "strategy": "at-once", "dtype": "bfloat16"}
    plan = build("count", merge("count", {**values, "backend_options": ["seconds=5ms"]}))
    assert plan.workload.options.games == 2000
    assert plan.workload.options.resume is True
    assert plan.backend.options.seconds == 0.005
    assert (plan.backend.setup.dtype, plan.backend.setup.processes) == ("bfloat16", 1)


def test_the_command_line_is_spelled_again_without_what_is_about_output():
    values = {"games": "5", "games_in_flight": "2", "resume": False, "live": True, "json": "-", "verbose": 1}
    again = spelled("count", {**values, "backend_options": ["a=b c"], "seed": None})
    assert again == "gpuinfer count --games 5 --games-in-flight 2 --no-resume -B 'a=b c'"


def test_several_devices_are_refused_before_anything_starts(gpuinfer):
    code, _, said = gpuinfer(*RUN, "--device", "cuda:0,cuda:1")
    assert code == 2
    assert "--device names 2 devices (cuda:0, cuda:1), and only one can be served. Name one" in said


class Keeping(Counting):
    """A workload that keeps what it does."""

    class Options(Options):
        out: str | None = None
        output: str | None = None
        resume: bool = False

    goes_on_by, writes_to = ("resume",), ("out", "output")


@pytest.mark.parametrize(
    ("given", "command"),
    [
        pytest.param({"out": "records", "resume": True}, "gpuinfer count --out records-3", id="to a place of its own"),
        pytest.param({"out": "new.d"}, "gpuinfer count --out new-2.d", id="beside what this very run will write"),
        pytest.param({"output": "-"}, "gpuinfer count --output -", id="to a stream as before"),
        pytest.param({"output": "/dev/null"}, "gpuinfer count --output /dev/null", id="to a device as before"),
    ],
)
def test_the_same_work_anew_is_refused_by_nothing_that_was_written(tmp_path, monkeypatch, given, command):
    monkeypatch.chdir(tmp_path)
    for there in ("records", "records-2"):
        (tmp_path / there).mkdir()
    assert anew("count", given, Keeping(**given)) == command


def test_the_same_work_anew_goes_on_with_nothing_even_where_the_environment_says_so():
    assert anew("count", {"resume": None}, Keeping(resume=True)) == "gpuinfer count --no-resume"


# The report's file


# The other commands


def test_plugins_list_shows_origin_and_reason(gpuinfer, count_package):
    install(count_package, "bad", {"backends": {"bad": "bad_module:X"}}, {"bad_module": "raise OSError('no luck')"})
    registry.search_again()
    code, out, _ = gpuinfer("plugins", "list", "--load")
    assert code == 0
    for words in ("✓ parrot", "gpuinfer-count 1.2", "Answers each row with itself.", "✗ bad", "OSError: no luck"):
        assert words in out


def test_a_plugin_whose_import_ends_the_process_harms_no_other(gpuinfer, count_package):
    install(count_package, "bad", {"backends": {"bad": "bad_module:X"}}, {"bad_module": "import os; os._exit(7)"})
    registry.search_again()
    code, out, _ = gpuinfer("plugins", "list", "--load")
    assert code == 0
    for words in ("✗ bad", "importing it ended the process (exit code 7)", "✓ parrot", "✓ inprocess", "✓ count"):
        assert words in out


def test_plugins_list_imports_none(count_package):
    source = "raise SystemExit('imported')"
    install(
        count_package,
        "bad",
        {"backends": {"bad": "bad_module:X"}, "workloads": {"seed": "bad_module:X"}},
        {"bad_module": source},
    )
    done = process("plugins", "list")
    assert done.returncode == 0
    for words in ("· parrot", "Answers each row with itself.", "· bad", "✗ seed", "has the name of a setting"):
        assert words in done.stdout


def test_plugins_show_tells_options_and_origin(gpuinfer):
    _, out, _ = gpuinfer("plugins", "show", "backend", "parrot")
    for words in ("gpuinfer-count 1.2", "count_package:Parrot", "-B seconds=", "that one batch takes"):
        assert words in out


def test_config_tells_each_value_and_its_origin(gpuinfer, monkeypatch):
    Path("gpuinfer.toml").write_text("seed = 4\n[count]\ngames = 5")
    monkeypatch.setenv("GPUINFER_DEVICE", "cpu")
    code, out, _ = gpuinfer("config", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["seed"] == {"value": 4, "origin": "gpuinfer.toml seed"}
    assert shown["device"] == {"value": "cpu", "origin": "GPUINFER_DEVICE"}
    assert shown["count.games"] == {"value": 5, "origin": "gpuinfer.toml [count] games"}
    assert shown["count.order"] == {"value": "up", "origin": "default"}
    assert "GPUINFER_DEVICE" in gpuinfer("config")[1]


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


@pytest.fixture
def needy(count_package):
    install(count_package, "needy", {"workloads": {"needy": "bad_module:Needy"}}, {"bad_module": NEEDY})
    registry.search_again()


def test_config_bears_a_workload_with_an_option_that_must_be_given(gpuinfer, needy):
    shown = json.loads(gpuinfer("config", "--json")[1])
    assert shown["needy.place"] == {"value": None, "origin": "required, not set"}
    assert shown["needy.counts"] == {"value": [1], "origin": "default"}
    Path("gpuinfer.toml").write_text("[needy]\nplace = 'here'")
    assert json.loads(gpuinfer("config", "--json")[1])["needy.place"]["value"] == "here"


@pytest.mark.parametrize(
    ("flags", "variable", "toml"),
    [
        pytest.param(["--names", "a,b", "--counts", "1,4k"], {}, "", id="one flag"),
        pytest.param(
            ["--names", "a", "--names", "b", "--counts", "1", "--counts", "4000"], {}, "", id="a flag for each"
        ),
        pytest.param([], {"NAMES": '["a", "b"]', "COUNTS": "[1, 4000]"}, "", id="JSON in the environment"),
        pytest.param([], {"NAMES": "a,b", "COUNTS": "1,4k"}, "", id="text in the environment"),
        pytest.param([], {}, 'names = ["a", "b"]\ncounts = [1, 4000]', id="an array in the file"),
    ],
)
def test_lists_can_be_given_in_every_way(gpuinfer, needy, flags, variable, toml, monkeypatch):
    Path("gpuinfer.toml").write_text(f"[needy]\nplace = 'here'\n{toml}")
    for name, text in variable.items():
        monkeypatch.setenv(f"GPUINFER_NEEDY__{name}", text)
    code, out, _ = gpuinfer("needy", *flags, "--backend", "parrot", "--json", "-")
    settings = json.loads(out)["settings"]["needy"]
    assert (code, settings["names"], settings["counts"]) == (0, ["a", "b"], [1, 4000])


def test_a_backend_of_rows_is_not_given_prompts(gpuinfer):
    code, _, err = gpuinfer("generate", "--model", "null", "--input", os.devnull, "--backend", "parrot")
    assert code == 2
    assert "generate has a model of text, and the backend 'parrot' serves rows." in err


# Completion


def completed(*words: str) -> list[str]:
    child = process(
        code="from gpuinfer.cli import main; main()",
        _GPUINFER_COMPLETE="complete_bash",
        COMP_WORDS=" ".join(["gpuinfer", *words]),
        COMP_CWORD=str(len(words)),
    )
    return child.stdout.split()


@pytest.mark.sample
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        pytest.param(["co"], {"config", "count"}, id="commands"),
        pytest.param(["count", "--ga"], {"--games"}, id="flags"),
        pytest.param(["count", "--backend", "par"], {"parrot"}, id="plugin names"),
        pytest.param(["count", "--order", ""], {"up", "down"}, id="choices"),
        pytest.param(["count", "--backend", "parrot", "-B", ""], {"seconds=", "max_rows="}, id="options of a plugin"),
        pytest.param(["plugins", "show", "backend", "par"], {"parrot"}, id="plugins to show"),
    ],
)
def test_bash_completes(words, offered):
    assert set(completed(*words)) == offered


def test_bash_takes_the_completion_script():
    script = process(_GPUINFER_COMPLETE="source_bash").stdout
    check = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p gpuinfer"], capture_output=True, text=True, timeout=60
    )
    assert check.returncode == 0, check.stderr
    assert "gpuinfer" in check.stdout
