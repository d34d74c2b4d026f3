"""What `make dist` has built, installed where there is nothing else, and used as people do."""

from __future__ import annotations

import json

import pytest
from installing import HERE, PYTHONS, find_python, install

pytestmark = [pytest.mark.dist, pytest.mark.timeout(2000)]
POINTS = """
import json
from importlib.metadata import distribution
told = {}
for name in ("gpuinfer", "gpuinfer-echo", "gpuinfer-diplomacy", "gpuinfer-openspiel"):
    for point in distribution(name).entry_points:
        try:
            point.load()
            told[f"{point.group}:{point.name}"] = ""
        except ImportError as error:
            told[f"{point.group}:{point.name}"] = error.name or str(error)
print(json.dumps(told))
"""
FILES = """
import json, sys
from importlib.metadata import files
print(json.dumps([str(path.locate().resolve()) for path in files("gpuinfer") if path.locate().is_file()]))
"""
PLAYING = ("selfplay", "--game", "connect-four", "--games", "2", "--simulations", "8", "--quiet", "--json", "-")


def _ways():
    for version in PYTHONS:
        yield pytest.param((version, False), id=version, marks=pytest.mark.xdist_group(version))
    yield pytest.param((HERE, True), id=f"{HERE}-lowest", marks=pytest.mark.xdist_group("lowest"))


@pytest.fixture(scope="session", params=_ways())
def there(request, tmp_path_factory):
    version, lowest = request.param
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here: nothing was tried with it")
    return install(tmp_path_factory.mktemp("dist"), python, lowest=lowest)


def test_every_entry_point_loads(there):
    done = there.run("python", "-I", "-c", POINTS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    groups = {name.partition(":")[0] for name in told}
    kinds = {"backends", "strategies", "workloads", "games", "environments", "decoders", "routing", "launchers"}
    assert groups == {"console_scripts", *(f"gpuinfer.{kind}" for kind in kinds)}
    assert {error for error in told.values() if error} <= (set() if there.torch else {"torch"})
    assert list(told.values()).count("") > 20


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        pytest.param(["--help"], "selfplay", id="the commands"),
        pytest.param(["selfplay", "--help"], "--games", id="the options of one"),
        pytest.param(["docs", "resume"], "--resume", id="a page"),
        pytest.param(["plugins", "list"], "openspiel", id="the plugins"),
    ],
)
def test_it_answers(there, words, shown):
    done = there.run("gpuinfer", *words)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_it_plays(there):
    model = "blobnet-small" if there.torch else "uniform"
    done = there.run("gpuinfer", *PLAYING, "--model", model)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"


def test_it_generates(there):
    if not there.torch:
        pytest.skip("torch for this Python comes with CUDA alone: DIST_TORCH=1 fetches it all the same")
    done = there.run("gpuinfer", "generate", "--model", "tiny", "--prompt", "The sea was", "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_plugin_of_another_wheel_runs(there):
    done = there.run("gpuinfer", "ping", "--rows", "20", "--backend", "echo", "--quiet", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["workload"], report["backend"]) == ("ping", "echo")


def test_what_belongs_to_it_lies_where_it_is_looked_for(there):
    """Manual pages and completion beside `bin`, where man and the shells look; types and schemas in the package."""
    done = there.run("python", "-I", "-c", FILES)
    assert done.returncode == 0, done.stderr
    lie = set(json.loads(done.stdout))
    place = there.place.resolve()
    for name in (
        "share/man/man1/gpuinfer-selfplay.1",
        "share/bash-completion/completions/gpuinfer",
        "share/zsh/site-functions/_gpuinfer",
        "share/fish/vendor_completions.d/gpuinfer.fish",
    ):
        assert str(place / name) in lie
    assert {"py.typed", "report.schema.json", "memory.schema.json"} <= {
        path.rpartition("/gpuinfer/")[2] for path in lie if "/site-packages/gpuinfer/" in path
    }
