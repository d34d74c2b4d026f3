"""For all tests: one numeric thread in each process, `helpers` importable everywhere, how many examples properties try,
Ctrl-C as at a terminal, `async def` tests, and which files are read at all.
"""

import asyncio
import inspect
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
if (here := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, here)  # multiprocessing hands sys.path down

import marked  # noqa: E402 (found by the line above)
from counts import SOAK, examples  # noqa: E402

# The same examples each time but in `make soak`, and however long a busy machine takes to draw them: what is refused is
# refused for a reason, and again the next time.
hypothesis.settings.register_profile(
    "counted",
    max_examples=examples(100),
    deadline=None,
    derandomize=not SOAK,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("counted")
# A shell that starts something in the background has it ignore Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that cannot hold what `-m` asks for is not imported."""
    if not collection_path.match("test_*.py") or marked.may_hold(collection_path, config.option.markexpr):
        return None
    return True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Properties try more examples in `make soak`: `-m property` has them alone."""
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("property")


@pytest.fixture
def gpuinfer(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; returns its exit code, output and errors."""
    from gpuinfer.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command: empty, without variables of ours, with all plugins on, 120 columns wide."""
    from gpuinfer.config import registry

    for variable in [name for name in os.environ if name.startswith("GPUINFER_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(registry.DISABLED, "")
    monkeypatch.setenv("COLUMNS", "120")
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    registry.search_again()
    return folder


@pytest.fixture
def count_package(empty_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the package `count` is installed, in this process and in those that it starts."""
    from packages import install_count

    from gpuinfer.config import registry

    (folder := tmp_path / "site").mkdir()
    install_count(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    registry.search_again()
    yield folder
    for module in ("count_package", "bad_module"):
        sys.modules.pop(module, None)


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "ahead"])
def ahead(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Generators of `text.toy` compose each step when the tokens before are known, or before, as on a CUDA device."""
    from text import toy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "AHEAD", request.param)
        yield request.param


@pytest.fixture(scope="module")
def children_forked() -> Iterator[None]:
    """Worker processes and servers that tests of this module start need not load torch (`preloaded.py`)."""
    import preloaded

    with preloaded.in_force():
        yield


FIRST = ("tests/test_docs.py",)  # of a file's tests one process does all: the others have what is left to do meanwhile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `sample(n)`, the ordinary run tries the first and each n-th after it; of
    one marked `sample`, the first alone. What takes longest begins first.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    seen: Counter[str] = Counter()
    for item in items:
        if (sample := item.get_closest_marker("sample")) is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % (sample.args[0] if sample.args else sys.maxsize):
                item.add_marker("thorough")
            seen[name] += 1
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if item.path.is_relative_to(marked.TESTS) and marked.is_surprised_by(item.path, names):
            raise pytest.UsageError(
                f"{item.nodeid} has other markers ({', '.join(sorted(names))}) than its file's text tells, by which "
                "files are left out. Name them there, as pytest.mark.NAME (tests/marked.py)."
            )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture
def unbounded_memory(monkeypatch):
    """What a child that measures memory does to its own process is not done to a process of tests."""
    from gpuinfer.models.footprint import MemoryMeter

    monkeypatch.setattr(MemoryMeter, "bound", lambda self, beside: None)
    monkeypatch.setattr(MemoryMeter, "forget", lambda self: None)
