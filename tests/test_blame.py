"""An error of a plugin names the plugin, its package and the method; a run in which too much failed has failed."""

import json
from importlib import metadata

import jsonschema
import pytest
from evil import Evil, Far, Few, install_evil
from helpers import AtOnce, Doubler

from gpuinfer.config import blame, registry
from gpuinfer.errors import BackendError, StrategyError, UsageError, WorkError, WorkloadError
from gpuinfer.report import report
from gpuinfer.runtime.run import run


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
        pytest.param({"backend": Evil(fail="start")}, BackendError, "backend 'evil'.*: start raised", id="start"),
        pytest.param({"backend": Evil(fail="infer")}, BackendError, "backend 'evil'.*: infer raised", id="infer"),
        pytest.param(
            {"backend": Evil(fail="connect"), "workload": Few(workers=1)}, BackendError, "connect raised", id="connect"
        ),
        pytest.param(
            {"backend": Evil(fail="block"), "workload": Few(fail="block")}, BackendError, "block raised", id="block"
        ),
        pytest.param({"strategy": near(fail="cut_at")}, StrategyError, "strategy 'far'.*: cut_at raised", id="cut_at"),
        pytest.param({"strategy": near(fail="select")}, StrategyError, "select raised", id="select"),
        pytest.param({"strategy": near(fail="reason")}, StrategyError, "reason raised", id="reason"),
        pytest.param({"strategy": near(fail="account")}, StrategyError, "account raised", id="account"),
        pytest.param({"workload": Few(fail="run")}, WorkloadError, "workload 'few'.*: run raised", id="run"),
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
    [
        pytest.param({"backend": Evil(fail="device")}, id="device"),
        pytest.param({"backend": Evil(fail="close")}, id="close"),
        pytest.param({"strategy": near(fail="observe")}, id="observe"),
    ],
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


# Too many failures


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
        pytest.param((), 1, "failed", id="none by default"),
        pytest.param(("--max-failures", "0.2"), 1, "failed", id="fewer than there were"),
        pytest.param(("--max-failures", "0.4"), 0, "done", id="as many"),
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
