"""`dist/gpuinfer` and `dist/gpuinfer-python`, as `make binary` has built them, used where there is nothing else."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_file import LOADER, ROOT, kept, told

pytestmark = [pytest.mark.binary, pytest.mark.timeout(2000)]
FILE = ROOT / "dist/gpuinfer"
SMALLER = ROOT / "dist/gpuinfer-python"
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
LIMIT_S = 900.0  # of a busy machine
SOON = {"GPUINFER_ROOFLINE": "false"}
C_LIBRARY = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the file has been started once; what it compiles is kept there too."""
    home = tmp_path_factory.mktemp("home")
    first = run(home, "--version")
    assert first.returncode == 0, first.stderr
    assert first.stderr.startswith("gpuinfer: unpacking ")
    return home


@pytest.fixture(scope="module")
def inside(home):
    """The folder that it has unpacked."""
    return next(path for path in kept(home).iterdir() if path.is_dir())


def run(home: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return said([FILE, *words], {**told(home, environment), **SOON})


def said(words, environment) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def report(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PLAYING = ("selfplay", "--model", "blobnet-small", "--seed", "1", "--quiet", "--json", "-")


def test_it_plays_where_there_is_no_python(home):
    told = report(run(home, *PLAYING, "--games", "20", "--workers", "2"))
    assert (told["status"], told["settings"]["selfplay"]["games"]) == ("done", 20)
    assert told["environment"]["python"] == platform.python_version()


def test_a_second_start_unpacks_nothing(home, inside):
    before = inside.stat().st_ctime_ns
    second = run(home, "--help")
    assert (second.returncode, second.stderr) == (0, "")
    assert "selfplay" in second.stdout
    assert inside.stat().st_ctime_ns == before


def test_another_python_of_the_environment_does_not_reach_it(home, tmp_path):
    for name in ("encodings", "torch", "gpuinfer", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('evil')")
    evil = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "torch.py")}
    assert run(home, "--version", **evil).returncode == 0


@pytest.mark.parametrize("backend", [["central"], ["fleet", "-B", "replicas=2"]], ids=["central", "fleet"])
def test_its_children_run_from_it(home, backend):
    told = report(run(home, *PLAYING, "--games", "10", "--workers", "2", "--backend", *backend))
    assert (told["status"], told["backend"]) == ("done", backend[0])


def test_the_loop_runs_its_commands_from_it(home, tmp_path):
    sizes = ["--games", "8", "--simulations", "4", "--training-steps", "4", "--evaluation-games", "4"]
    done = run(home, "loop", "--iterations", "1", *sizes, "--model", "blobnet-small", "--out", tmp_path / "loop")
    assert done.returncode == 0, done.stderr


def test_nothing_of_the_system_but_its_c_library_is_used(home, tmp_path):
    """In a root folder with no shell, no program, no other library and no Python."""
    root = tmp_path / "root"
    same = str(home).strip("/")  # where it is outside: kernels are known by their path, and compiled already
    for name in ("proc", "dev", "tmp", same, LOADER.strip("/").rpartition("/")[0]):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(LOADER, root / LOADER.strip("/"))
    for name in C_LIBRARY:
        place = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        (folder := root / f"lib/{platform.machine()}-linux-gnu").mkdir(parents=True, exist_ok=True)
        shutil.copy(place.stdout.strip(), folder / name)
    (root / "gpuinfer").touch()
    mounts = (
        f"mount --bind {FILE} {root}/gpuinfer && mount --bind {home} {root}/{same} && mount --rbind /proc {root}/proc"
    )
    mounts += f" && mount --rbind /dev {root}/dev"
    if said(["unshare", "--mount", "/bin/sh", "-c", mounts], None).returncode:
        pytest.skip("nothing may be mounted here")
    words = " ".join([*PLAYING, "--games", "4"])
    alone = f"env -i HOME={home} GPUINFER_ROOFLINE=false {shutil.which('chroot')} {root} /gpuinfer {words}"
    assert report(said(["unshare", "--mount", "/bin/sh", "-c", f"{mounts} && exec {alone}"], None))["status"] == "done"
    assert sorted(path.name for path in (root / "lib").iterdir()) == [f"{platform.machine()}-linux-gnu"]


def test_pip_and_setuptools_are_inside_for_plugins(home, inside):
    python = inside / f"bin/{VERSION}"
    for words in (["-m", "pip", "--version"], ["-c", "import setuptools.build_meta"]):
        assert said([python, *words], told(home, {})).returncode == 0


def test_a_plugin_is_installed_without_network_and_runs(home, tmp_path):
    source, plugins = tmp_path / "gpuinfer-echo", tmp_path / "plugins"
    shutil.copytree(ROOT / "plugins/gpuinfer-echo", source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    there = {"GPUINFER_PLUGINS": str(plugins)}
    done = run(home, "plugins", "install", source, "--yes", "--no-index", **there)
    assert done.returncode == 0, done.stderr
    played = report(run(home, "ping", "--rows", "20", "--backend", "echo", "--quiet", "--json", "-", **there))
    assert (played["workload"], played["backend"]) == ("ping", "echo")


def test_tls_trusts_somebody(home, inside):
    """The paths that libssl was built with are those of the building machine's system."""
    code = "import ssl; print(len(ssl.create_default_context().get_ca_certs()))"
    assert int(said([inside / f"bin/{VERSION}", "-c", code], told(home, {})).stdout) > 0


def test_every_module_of_the_library_that_is_there_can_be_imported(home, inside):
    """So their shared libraries are there too, and none of them is the system's."""
    code = """
import importlib, pathlib, sys
for path in (pathlib.Path(sys.prefix) / "lib" / sys.argv[1] / "lib-dynload").glob("*.so"):
    importlib.import_module(path.name.partition(".")[0])
print(*{line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}, sep="\\n")
"""
    done = said([inside / f"bin/{VERSION}", "-c", code, VERSION], told(home, {}))
    assert done.returncode == 0, done.stderr
    mapped = {Path(line) for line in done.stdout.split()}
    system = {path.name for path in mapped if not path.is_relative_to(inside)}
    assert system <= {*C_LIBRARY, Path(LOADER).name}


def test_its_papers_name_what_is_inside(inside):
    for name in ("gpuinfer.cdx.json", "gpuinfer.licences.txt"):
        assert (inside / name).read_bytes() == (ROOT / "dist" / name).read_bytes()
    bill = json.loads((inside / "gpuinfer.cdx.json").read_bytes())
    parts = {part["name"].lower() for part in bill["components"]}
    site = inside / f"lib/{VERSION}/site-packages"
    packages = {path.name.partition("-")[0].lower() for path in site.glob("*.dist-info")} - {"gpuinfer"}
    assert {name.replace("-", "_").replace(".", "_") for name in parts} >= packages
    assert {"cpython", "libssl3", "libzstd-dev"} <= parts
    assert bill["metadata"]["component"]["name"] == "gpuinfer"
    terms = (inside / "gpuinfer.licences.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in terms
    assert "From PyTorch:" in terms


@pytest.fixture(scope="module")
def machine(inside, tmp_path_factory):
    """A Python that has torch and what that needs, and nothing else: its program."""
    farm = tmp_path_factory.mktemp("machine")
    site = farm / f"lib/{VERSION}/site-packages"
    site.mkdir(parents=True)
    (farm / "bin").mkdir()
    shutil.copy(inside / f"bin/{VERSION}", farm / "bin")
    for there in [*(inside / "lib").iterdir(), *(inside / "lib" / VERSION).iterdir()]:
        here = farm / there.relative_to(inside)
        if not here.exists() and there.name != "sitecustomize.py":
            here.symlink_to(there)
    for pattern in (
        "torch*",
        "functorch",
        "sympy*",
        "mpmath*",
        "networkx*",
        "fsspec*",
        "filelock*",
        "typing_extensions*",
    ):
        for there in (inside / f"lib/{VERSION}/site-packages").glob(pattern):
            (site / there.name).symlink_to(there)
    return farm / "bin" / VERSION


def test_the_smaller_one_computes_with_the_torch_of_the_machine(home, machine):
    """In a process of its own, the central server, too. No games: their kernels would be compiled anew at its place."""
    environment = {"HOME": str(home), "PATH": f"{machine.parent}:/usr/bin:/bin", **SOON}
    asking = ("load", "--requests", "50", "--model", "blobnet-small", "--quiet", "--json", "-")
    for backend in ("inprocess", "central"):
        told = report(said([SMALLER, *asking, "--backend", backend], environment))
        assert (told["status"], told["backend"]) == ("done", backend)


def test_the_smaller_one_is_smaller_and_without_torch():
    assert SMALLER.stat().st_size < FILE.stat().st_size
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", SMALLER], capture_output=True, text=True, check=True
    )
    assert ".deps/numba-" in listing.stdout
    assert "libtorch" not in listing.stdout
    assert os.access(SMALLER, os.X_OK)
