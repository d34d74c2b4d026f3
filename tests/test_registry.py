"""Plugins come by entry point; none harms another."""

from __future__ import annotations

import sys

import pytest
from packages import install

from gpuinfer.api import Backend
from gpuinfer.config import registry
from gpuinfer.errors import PluginError, UnknownName

GOOD = """
    from gpuinfer.api import Backend, Limits
    class Good(Backend):
        limits = Limits(1)
        async def infer(self, batch):
            return [request.payload for request in batch]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path to install packages into; what they import is forgotten afterwards."""
    monkeypatch.setenv(registry.DISABLED, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


def record_of(name: str, kind: str = "backends") -> registry.PluginRecord:
    return next(record for record in registry.listing(kind) if record.name == name)


def test_our_own_plugins_come_by_the_same_road():
    assert {"inprocess"} <= set(registry.names("backends"))
    assert record_of("inprocess").distribution == "gpuinfer"


def test_listing_imports_nothing(site):
    install(site, "acme", {"backends": {"good": "acme_listed:Good"}}, {"acme_listed": GOOD})
    assert record_of("good").package == "acme 1.0"
    assert "acme_listed" not in sys.modules


@pytest.mark.parametrize("kind", ["backend", "backends"])
def test_a_third_partys_class_is_loaded_by_name(site, kind):
    install(site, "acme", {"backends": {"good": "acme:Good"}}, {"acme": GOOD})
    assert issubclass(registry.load(kind, "good"), Backend)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("raise RuntimeError('no GPU here')", "RuntimeError: no GPU here", id="raises"),
        pytest.param("import sys; sys.exit('bye')", "SystemExit: bye", id="exits"),
        pytest.param("def broken(:", "SyntaxError", id="is no Python"),
        pytest.param("import surely_not_installed", "surely_not_installed", id="needs what is not there"),
        pytest.param("Other = 1", "AttributeError", id="lacks the class"),
        pytest.param("Good = 7", "is no subclass of gpuinfer.api.Backend", id="names no class"),
        pytest.param("class Good: pass", "is no subclass of gpuinfer.api.Backend", id="names a class of another kind"),
        pytest.param("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd", id="raises a BaseException"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_listed_with_its_reason_and_harms_no_other(site, source, reason):
    install(site, "bad", {"backends": {"bad": "bad_module:Good"}}, {"bad_module": source})
    install(site, "acme", {"backends": {"good": "acme:Good"}}, {"acme": GOOD})
    bad, good = registry.inspect(record_of("bad")), registry.inspect(record_of("good"))
    assert (bad.ok, good.ok) == (False, True)
    assert reason in bad.reason
    with pytest.raises(PluginError, match=r"'bad' of bad 1\.0"):
        registry.load("backends", "bad")


def test_ctrl_c_during_an_import_is_no_plugin_error(site):
    install(site, "slow", {"backends": {"slow": "slow_module:Good"}}, {"slow_module": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        registry.load("backends", "slow")


@pytest.fixture
def clash(site):
    install(site, "acme", {"backends": {"good": "acme:Good", "sole": "acme:Good"}}, {"acme": GOOD})
    install(site, "zeta", {"backends": {"good": "zeta:Good"}}, {"zeta": GOOD}, version="2.0")


def test_two_packages_with_one_name_are_an_error_that_names_both(clash):
    with pytest.raises(PluginError) as caught:
        registry.load("backends", "good")
    assert "acme 1.0 (acme:Good) and zeta 2.0 (zeta:Good)" in str(caught.value)
    assert 'disabled_plugins = ["zeta"]' in str(caught.value)


@pytest.mark.parametrize(("off", "module"), [("zeta", "acme"), ("acme", "zeta")])
def test_switching_one_package_off_ends_the_clash(clash, off, module):
    registry.switch_off([off])
    assert registry.load("backends", "good").__module__ == module


def test_the_same_package_found_twice_is_no_clash(site, tmp_path_factory, monkeypatch):
    again = tmp_path_factory.mktemp("again")
    install(site, "acme-tools", {"backends": {"good": "acme:Good"}}, {"acme": GOOD})
    install(again, "acme_tools", {"backends": {"good": "acme:Good"}}, metadata="egg-info")
    monkeypatch.syspath_prepend(str(again))
    assert registry.load("backends", "good").__name__ == "Good"


@pytest.mark.parametrize("entry", ["acme", "backends.good"])
def test_what_is_switched_off_is_listed_as_such_and_not_used(site, entry):
    install(site, "acme", {"backends": {"good": "acme:Good"}}, {"acme": GOOD})
    registry.switch_off([entry])
    assert "good" not in registry.names("backends")
    assert registry.inspect(record_of("good")).reason == "switched off by disabled_plugins"
    with pytest.raises(PluginError, match=r"switched off.*disabled_plugins"):
        registry.load("backends", "good")


def test_an_unknown_name_suggests_the_nearest_and_lists_what_is_installed(site):
    install(site, "acme", {"backends": {"good": "acme:Good"}}, {"acme": GOOD})
    with pytest.raises(UnknownName, match=r"no backend named 'god'\. Did you mean 'good'\? Installed: .*inprocess"):
        registry.load("backends", "god")


WORK = """
    from gpuinfer.api import Progress, Workload
    class Work(Workload):
        async def run(self, infer):
            yield Progress(1, 1)
"""


@pytest.mark.parametrize("name", ["bench", "config", "seed", "disabled-plugins"])
def test_a_workload_named_like_a_command_or_a_setting_is_refused_by_name_and_harms_no_other(site, name):
    install(site, "acme", {"workloads": {name: "acme:Work", "harmless": "acme:Work"}}, {"acme": WORK})
    assert registry.load("workloads", "harmless").__name__ == "Work"
    assert name not in registry.names("workloads")
    assert (record_of(name, "workloads").ok, record_of("harmless", "workloads").ok) == (False, None)
    with pytest.raises(PluginError, match=rf"workload '{name}' of acme 1\.0 has the name of a .* Rename its entry"):
        registry.load("workloads", name)
