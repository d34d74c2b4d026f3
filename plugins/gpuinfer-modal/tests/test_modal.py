"""The launcher against a stub of Modal's client: the real service was never tried."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from gpuinfer_modal.launcher import ModalLauncher  # noqa: E402

from gpuinfer.errors import UsageError, WorkError  # noqa: E402
from gpuinfer.launchers.base import ProcessPlan  # noqa: E402
from gpuinfer.testing import assert_ok  # noqa: E402
from gpuinfer.testing.launchers import check_launcher  # noqa: E402

STUB = str(HERE / "stub")
IMAGE = "registry.example/gpuinfer:1"


def forget() -> None:
    for name in [one for one in sys.modules if one == "modal" or one.startswith("modal.")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("modal")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=stub -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", folder / "key", "-out", folder / "cert"]
    subprocess.run([*words.split(), *files], check=True, capture_output=True, timeout=60)
    (folder / "both").write_text((folder / "key").read_text() + (folder / "cert").read_text())
    return folder


@pytest.fixture
def modal(monkeypatch, certificate):
    """The stub, in this process and in those that it starts."""
    forget()
    path = [STUB, str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.syspath_prepend(STUB)
    monkeypatch.setenv("MODAL_STUB_CERT", str(certificate / "both"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert"))
    yield importlib.import_module("modal")
    forget()


def launcher(**options: object) -> ModalLauncher:
    return ModalLauncher(ModalLauncher.Options(**{"image": IMAGE, **options}))


@pytest.mark.thorough
def test_it_keeps_the_contract_of_launchers_against_the_stub(modal):
    assert_ok(check_launcher(ModalLauncher, {"image": IMAGE}))


def launched(tmp_path: Path, **options: object):
    """A node that prints what it was given, and its sandbox."""

    async def run() -> None:
        node = ProcessPlan("node-0", 0, tmp_path, ("--no-such-flag",), serves=False)
        process = await launcher(**options).launch(node)
        async with asyncio.timeout(120):
            while process.alive:  # noqa: ASYNC110  another process's doing
                await asyncio.sleep(0.05)
        await process.kill()
        assert process.ending == "exit code 2"
        assert "--no-such-flag" in process.last_words()

    asyncio.run(run())


def test_a_sandbox_has_what_the_options_say_and_its_log_comes(modal, tmp_path):
    options = {"gpus": "A100:2", "cpus": 4, "memory": 1024, "region": "eu", "time": 600}
    launched(tmp_path, **options, volume="models:/models", secret="hub")
    given = modal.CREATED[-1].given
    assert (given["gpu"], given["cpu"], given["memory"], given["region"], given["timeout"]) == (
        "A100:2",
        4,
        1024,
        "eu",
        600,
    )
    assert (given["volumes"], given["secrets"]) == ({"/models": modal.Volume("models")}, [modal.Secret("hub")])
    assert (given["app"].name, given["image"].tag, given["encrypted_ports"]) == ("gpuinfer", IMAGE, [])


@pytest.mark.parametrize(
    ("options", "token", "cure"),
    [
        ({"image": "elsewhere/other"}, "", r"Modal refuses the sandbox: image elsewhere/other not found\. Correct"),
        ({}, "none", r"Modal does not know you \(Token missing\)\. Run: modal setup"),
        ({"python": "/bin/false"}, "", r"has no gpuinfer\. Build one that has|did not come up"),
    ],
)
def test_what_modal_refuses_is_said_with_its_cure(modal, options, token, cure, tmp_path, monkeypatch):
    monkeypatch.setenv("MODAL_STUB_TOKEN", token)
    plan = ProcessPlan("replica-0", 0, tmp_path, ("serve",))
    with pytest.raises(WorkError, match=cure):
        asyncio.run(launcher(**options).launch(plan))


def test_without_modals_client_the_cure_is_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install modal"):
        launcher().check()
    with pytest.raises(UsageError, match="-L gpus=A100"):
        launcher().reserve_one_gpu("--gpus 4")


def test_the_stub_takes_what_the_real_client_takes(monkeypatch):
    """Where Modal's client is installed."""
    forget()
    real = pytest.importorskip("modal", reason="needs Modal's own client")
    from modal import exception as real_errors

    taken = {
        "App.lookup": inspect.signature(real.App.lookup),
        "Sandbox.create": inspect.signature(real.Sandbox.create),
        "Image.from_registry": inspect.signature(real.Image.from_registry),
        "Volume.from_name": inspect.signature(real.Volume.from_name),
        "Secret.from_name": inspect.signature(real.Secret.from_name),
    }
    methods = {name: inspect.signature(getattr(real.Sandbox, name)) for name in ("tunnels", "wait", "terminate")}
    assert issubclass(real_errors.AuthError, real_errors.Error)
    assert {"stdin", "stdout", "stderr", "object_id"} <= set(dir(real.Sandbox))
    forget()
    monkeypatch.syspath_prepend(STUB)
    stub = importlib.import_module("modal")
    try:
        for name, signature in taken.items():
            kind, _, method = name.partition(".")
            ours = inspect.signature(getattr(getattr(stub, kind), method))
            assert set(ours.parameters) <= set(signature.parameters), name
        for name, signature in methods.items():
            assert set(inspect.signature(getattr(stub.Sandbox, f"_{name}")).parameters) <= {
                "self",
                *signature.parameters,
            }
    finally:
        forget()
