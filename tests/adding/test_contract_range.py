"""For which versions of gpuinfer a package is: told by its metadata, and named before anything of it is imported."""

from __future__ import annotations

import sys

import pytest
from packages import install

from gpuinfer import __version__
from gpuinfer.config import registry
from gpuinfer.errors import PluginError

NEVER = "raise SystemExit('imported')"


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


@pytest.fixture
def site(tmp_path, monkeypatch):
    """With a package for another contract, of which nothing may be imported."""
    monkeypatch.setenv(registry.DISABLED, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {"backends": {"later": "acme_later:X"}, "workloads": {"chore": "acme_later:X"}}
    install(tmp_path, "acme", points, {"acme_later": NEVER})
    metadata = tmp_path / "acme-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: gpuinfer>=9,<10\n")
    yield tmp_path
    assert "acme_later" not in sys.modules


COMPLAINT = rf"acme 1\.0 is for gpuinfer >=9,<10, and this is gpuinfer {__version__}\. Install a version of it"


def test_a_plugin_for_another_contract_is_named_before_it_is_imported(site):
    with pytest.raises(PluginError, match=f"backend 'later': {COMPLAINT}"):
        registry.load("backends", "later")


@pytest.mark.parametrize(
    "words", [("selfplay", "--backend", "later"), ("chore",), ("plugins", "show", "backend", "later")]
)
def test_the_command_says_so_too(site, gpuinfer, words):
    code, _, err = gpuinfer(*words)
    assert code == 2
    assert "acme 1.0 is for gpuinfer >=9,<10" in err
