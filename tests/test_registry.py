"""Plugins come by entry point; none harms another, and none for another contract is imported."""

from __future__ import annotations

import sys

import pytest
from packages import install

from gpuinfer import __version__
from gpuinfer.api import Backend
from gpuinfer.config import registry
from gpuinfer.errors import PluginError, UnknownName

GOOD = """
    from gpuinfer.api import Backend, Limits, Progress, Workload
    class Good(Backend):
        limits = Limits(1)
        async def infer(self, batch):
            return [request.payload for request in batch]
    class Work(Workload):
        async def run(self, infer):
            yield Progress(1, 1)
"""
ONE = {"backends": {"good": "acme:Good"}}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path with the package acme; what it imports is forgotten afterwards."""
    monkeypatch.setenv(registry.DISABLED, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("bad_module", None)  # other files' tests have one too
    before = set(sys.modules)
    install(tmp_path, "acme", ONE, {"acme": GOOD})
    yield tmp_path
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


def record_of(name: str, kind: str = "backends") -> registry.PluginRecord:
    return next(record for record in registry.listing(kind) if record.name == name)


def test_ours_and_a_third_partys_come_by_the_same_road_and_listing_imports_nothing(site):
    assert record_of("inprocess").distribution == "gpuinfer"
    assert record_of("good").package == "acme 1.0"
    assert {"inprocess", "good"} <= set(registry.names("backends"))
    assert "acme" not in sys.modules
    for kind in ("backend", "backends"):
        assert issubclass(registry.load(kind, "good"), Backend)
    with pytest.raises(UnknownName, match=r"no backend named 'god'\. Did you mean 'good'\? Installed: .*inprocess"):
        registry.load("backends", "god")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no GPU here')", "RuntimeError: no GPU here"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("def broken(:", "SyntaxError"),
        ("import surely_not_installed", "surely_not_installed"),
        ("Other = 1", "AttributeError"),
        ("Good = 7", "is no subclass of gpuinfer.api.Backend"),
        ("class Good: pass", "is no subclass of gpuinfer.api.Backend"),
        ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_listed_with_its_reason_and_harms_no_other(site, source, reason):
    install(site, "bad", {"backends": {"bad": "bad_module:Good"}}, {"bad_module": source})
    bad, good = registry.inspect(record_of("bad")), registry.inspect(record_of("good"))
    assert (bad.ok, good.ok) == (False, True)
    assert reason in bad.reason
    with pytest.raises(PluginError, match=r"'bad' of bad 1\.0"):
        registry.load("backends", "bad")


def test_ctrl_c_during_an_import_is_no_plugin_error(site):
    install(site, "slow", {"backends": {"slow": "slow_module:Good"}}, {"slow_module": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        registry.load("backends", "slow")


@pytest.mark.parametrize(
    ("entry", "module"), [("zeta", "acme"), ("acme", "zeta"), ("backends.good", None), ("", "two packages")]
)
def test_one_name_of_two_packages_and_what_is_switched_off(site, entry, module):
    install(site, "zeta", {"backends": {"good": "zeta:Good"}}, {"zeta": GOOD}, version="2.0")
    registry.switch_off([entry] if entry else [])
    if module in ("acme", "zeta"):
        assert registry.load("backends", "good").__module__ == module
        return
    with pytest.raises(PluginError) as caught:
        registry.load("backends", "good")
    if entry:
        assert "switched off" in str(caught.value)
        assert "good" not in registry.names("backends")
        assert registry.inspect(record_of("good")).reason == "switched off by disabled_plugins"
    else:
        assert "acme 1.0 (acme:Good) and zeta 2.0 (zeta:Good)" in str(caught.value)
        assert 'disabled_plugins = ["zeta"]' in str(caught.value)


def test_the_same_package_found_twice_is_no_clash(site, tmp_path_factory, monkeypatch):
    again = tmp_path_factory.mktemp("again")
    install(again, "acme", ONE, metadata="egg-info")
    monkeypatch.syspath_prepend(str(again))
    assert registry.load("backends", "good").__name__ == "Good"


@pytest.mark.parametrize("name", ["bench", "config", "seed", "disabled-plugins"])
def test_a_workload_named_like_a_command_or_a_setting_is_refused_by_name_and_harms_no_other(site, name):
    install(site, "zeta", {"workloads": {name: "zeta:Work", "harmless": "zeta:Work"}}, {"zeta": GOOD})
    assert registry.load("workloads", "harmless").__name__ == "Work"
    assert name not in registry.names("workloads")
    assert (record_of(name, "workloads").ok, record_of("harmless", "workloads").ok) == (False, None)
    with pytest.raises(PluginError, match=rf"workload '{name}' of zeta 1\.0 has the name of a .* Rename its entry"):
        registry.load("workloads", name)


# For which versions of gpuinfer a package is


@pytest.mark.parametrize(
    ("requires", "wanted"),
    [
        pytest.param(None, None, id="nothing is said"),
        pytest.param(["numpy>=2", "gpuinfer-echo>=3"], None, id="only others are needed"),
        pytest.param(["gpuinfer"], "", id="any version"),
        pytest.param(["GPUInfer >=0.1 , <0.2"], ">=0.1,<0.2", id="a range"),
        pytest.param(["gpuinfer[vllm]<0.2,>=0.1"], ">=0.1,<0.2", id="with an extra, the lower end first"),
        pytest.param(["numpy", "gpuinfer>=9; extra == 'dev'"], None, id="only for an extra"),
        pytest.param(["gpuinfer>=9; python_version<'3'", "gpuinfer>=0.1"], ">=0.1", id="by the marker"),
        pytest.param(["gpuinfer (>=0.1)"], ">=0.1", id="as old packages say it"),
    ],
)
def test_what_a_package_wants(requires, wanted):
    assert registry.wanted_versions(requires) == wanted


@pytest.mark.parametrize(
    ("wanted", "version", "fits"),
    [
        (None, "0.1.0", True),
        ("", "0.1.0", True),
        (">=0.1,<0.2", "0.1.7", True),
        (">=0.1,<0.2", "0.2.0", False),
        (">=0.2", "0.2.0.dev3", False),
        (">=0.1", "0.2.0.dev3", True),
        (">=9", registry.UNKNOWN_VERSION, True),
    ],
)
def test_whether_a_version_is_wanted(wanted, version, fits):
    assert registry.fits_version(wanted, version) is fits


@pytest.mark.parametrize(
    ("version", "span"), [("0.1.0", ">=0.1,<0.2"), ("0.12.3.dev1", ">=0.12,<0.13"), ("2.3.4", ">=2.3,<3")]
)
def test_the_versions_that_keep_a_contract(version, span):
    assert registry.contract_range(version) == span
    assert registry.fits_version(span, version.partition(".dev")[0])


def test_a_plugin_for_another_contract_is_named_before_it_is_imported(site):
    never, points = "raise SystemExit('imported')", {"backends": {"later": "acme_later:X"}}
    install(site, "later", points, {"acme_later": never}, requires=["gpuinfer>=9,<10"])
    said = (
        rf"backend 'later': later 1\.0 is for gpuinfer >=9,<10, and this is gpuinfer {__version__}\. Install a version"
    )
    with pytest.raises(PluginError, match=said):
        registry.load("backends", "later")
    assert "acme_later" not in sys.modules
