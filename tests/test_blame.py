"""An error of a plugin names the plugin, its package and the method, also where its words raise or cannot be written
down; a run in which too much failed has failed.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest
from evil import Evil, Far, Few, install_evil
from helpers import AtOnce, Doubler

from gpuinfer.api import Backend, Limits
from gpuinfer.config import blame, registry
from gpuinfer.errors import BackendError, StrategyError, UsageError, WorkError, WorkloadError
from gpuinfer.host import error_text
from gpuinfer.host.error_text import error_from_wire, error_to_wire
from gpuinfer.report import report
from gpuinfer.runtime.run import run
from gpuinfer.testing import check_backend


@pytest.fixture
def installed(tmp_path, monkeypatch):
    install_evil(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    registry.search_again()
    yield
    registry.search_again()


def go(workload=None, backend=None, strategy=None, **arguments):
    return run(workload or Few(), backend or Evil(), strategy or AtOnce(), roofline=False, update_s=0.02, **arguments)


def near(**options):
    return Far(seconds=0.0, **options)


@pytest.mark.parametrize(
    ("plugins", "kind", "says"),
    [
        *(
            ({"backend": Evil(fail=name)}, BackendError, f"backend 'evil'.*: {name} raised")
            for name in ("start", "infer")
        ),
        ({"backend": Evil(fail="connect"), "workload": Few(workers=1)}, BackendError, "connect raised"),
        ({"backend": Evil(fail="block"), "workload": Few(fail="block")}, BackendError, "block raised"),
        *(
            ({"strategy": near(fail=name)}, StrategyError, f"strategy 'far'.*: {name} raised")
            for name in ("cut_at", "select", "reason", "account")
        ),
        ({"workload": Few(fail="run")}, WorkloadError, "workload 'few'.*: run raised"),
    ],
)
def test_what_a_plugin_raises_names_it_its_package_and_its_method(plugins, kind, says, installed):
    with pytest.raises(kind, match=says) as caught:
        go(**plugins)
    said = str(caught.value)
    assert "(package evil-pkg 0.1)" in said
    assert "raised RuntimeError: evil" in said
    assert said.endswith("or check it with `gpuinfer plugins check evil-pkg`.")
    assert len(said.splitlines()) == 1
    assert caught.value.report["status"] == "failed"


@pytest.mark.parametrize(
    "plugins",
    [{"backend": Evil(fail="device")}, {"backend": Evil(fail="close")}, {"strategy": near(fail="observe")}],
)
def test_what_harms_no_request_is_told_once(plugins, installed, caplog):
    assert go(Few(questions=5), **plugins)["status"] == "done"
    assert len([message for message in caplog.messages if "(package evil-pkg 0.1): " in message]) == 1


def test_errors_of_ours_speak_for_themselves_and_so_does_the_first_of_a_group():
    with pytest.raises(UsageError, match=r"^a bad flag"), blame.blaming(Evil(), "start"):
        raise UsageError("a bad flag. Use a good one.")
    with pytest.raises(ExceptionGroup), blame.blaming(Evil(), "start"):
        raise ExceptionGroup("two", [UsageError("a bad flag. Use a good one."), ValueError("more")])
    with pytest.raises(WorkError, match="raised ValueError: first"), blame.blaming(Evil(), "start"):
        raise ExceptionGroup("two", [ValueError("first"), ValueError("more")])


def test_a_plugin_of_ours_is_to_be_reported_and_one_of_no_package_names_its_module():
    from gpuinfer.strategies.dynamic import Dynamic

    assert blame.who(Dynamic).startswith("strategy 'dynamic' (package gpuinfer")
    assert blame.cure_for(Dynamic()).endswith("report it.")
    assert blame.who(Doubler()) == "backend 'Doubler' (module helpers)"


def test_the_first_failure_stands_in_the_report():
    made = go(Few(questions=6, fail="nothing"), Evil(fail="infer", every=3))
    jsonschema.validate(made, report.schema())
    assert made["status"] == "done"
    assert made["errors"]["failed"] == 2
    assert {**made["failures"], "first": ""} == {"count": 2, "of": 6, "share": 1 / 3, "allowed": 1.0, "first": ""}
    assert "infer raised RuntimeError: evil infer." in made["failures"]["first"]


@pytest.mark.parametrize(
    ("allowed", "code", "status"),
    [
        ((), 1, "failed"),
        (("--max-failures", "0.2"), 1, "failed"),
        (("--max-failures", "0.4"), 0, "done"),
    ],
)
def test_the_exit_code_says_whether_too_many_failed(allowed, code, status, installed, gpuinfer, tmp_path):
    words = ("few", "--questions", "6", "--fail", "nothing", "--backend", "evil", "-B", "fail=infer", "-B", "every=3")
    ended, shown, said = gpuinfer(*words, *allowed, "--json", str(tmp_path / "report.json"))
    assert ended == code
    assert json.loads((tmp_path / "report.json").read_text())["status"] == status
    assert "2 failed" in shown
    assert "the first" in shown
    assert ("2 of 6 failed (33.3%), and --max-failures allows" in said) == bool(code)


def test_a_module_is_of_the_package_that_installed_it():
    """As the standard library says it, which takes many times as long."""
    of_one = {top: names[0] for top, names in metadata.packages_distributions().items() if len(set(names)) == 1}
    told = {top: blame.owner_of(top) for top in ("pydantic", "typing_extensions", "msgspec", "gpuinfer", "torch")}
    assert told == {top: f"package {of_one[top]} {metadata.version(of_one[top])}" for top in told}
    assert blame.owner_of("test_blame") == __file__
    assert blame.owner_of("nowhere_at_all") == ""


# Exceptions and objects whose words raise

EVIL = """
class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("nobody may say it")
    __repr__ = __str__
"""
made = {}
exec(EVIL, made)  # noqa: S102  as the modules below have it
Unspeakable = made["Unspeakable"]


class Leaving(Exception):
    def __str__(self):
        sys.exit(3)


class Numeric(Exception):
    def __str__(self):
        return 5


class Loud(str):
    def __str__(self):
        return self

    def strip(self, *arguments):
        raise RuntimeError("let me be")


class Ours(BackendError):
    """Of a stranger, and of our kind."""

    __str__ = Unspeakable.__str__


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("one\ntwo."), "ValueError: one"),
        (ValueError(), "ValueError"),
        (Unspeakable(), "Unspeakable: <Unspeakable whose str() raises RuntimeError>"),
        (Leaving(), "Leaving: <Leaving whose str() raises SystemExit>"),
        (Numeric(), "Numeric: <Numeric whose str() raises TypeError>"),
        (ValueError(Loud("loud")), "ValueError: loud"),
        (ValueError("half \ud800"), "ValueError: half ?"),
        (KeyError(Unspeakable()), "KeyError: <KeyError whose str() raises RuntimeError>"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_exception_is_told_in_one_line_whatever_its_words_do(error, words):
    assert error_text.short_message(error) == words


def test_words_without_end_are_cut_and_an_error_that_a_stranger_derived_goes_over_the_wire():
    assert len(error_text.safe_str(ValueError("x" * 10_000_000))) < 2 * error_text.LONGEST_TEXT
    told = error_from_wire(json.loads(json.dumps(error_to_wire(Ours("x")))))
    assert isinstance(told, BackendError)
    assert "whose str() raises" in str(told)


class Silent(Backend):
    limits = Limits(8)

    async def infer(self, batch):
        raise Unspeakable


def test_a_run_names_the_plugin_that_raised_it_and_the_kit_goes_on_to_its_end():
    with pytest.raises(BackendError, match="infer raised Unspeakable"):
        run(Few(), Silent(), AtOnce(), roofline=False, update_s=0.02)
    assert "start raised Unspeakable" in str(blame.raised_by(Silent(), "start", Unspeakable()))
    findings = check_backend(Silent)
    assert "raised Unspeakable" in str([finding.detail for finding in findings])
    assert findings[-1].name == "closes"


SOURCES = {
    "at its import": f"{EVIL}\nraise Unspeakable",
    "when it is built": f"{EVIL}\ndef made(*_, **__):\n    raise Unspeakable",
}


@pytest.mark.sample
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(
    "line",
    [
        "selfplay --model unspeakable:made --games 1 --no-roofline",
        "selfplay --game unspeakable:made --model uniform",
        "rollouts --env unspeakable:made --model null",
    ],
)
def test_a_module_that_raises_it_ends_a_command_as_any_other(line, source, tmp_path: Path, monkeypatch, gpuinfer):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "unspeakable", raising=False)
    Path("unspeakable.py").write_text(source)
    code, _, said = gpuinfer(*line.split())
    assert code in (1, 2), said
    assert "\ngpuinfer: " in f"\n{said}"
    assert "Traceback" not in said
