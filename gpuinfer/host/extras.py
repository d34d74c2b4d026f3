"""The extras of our package: what each brings and is for, and the one error for a feature whose extra is not installed.

`pyproject.toml` lists their packages. Of a package only its spec is looked up here: nothing is imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from gpuinfer.errors import UsageError
from gpuinfer.host.installation import one_file


@dataclass(frozen=True, slots=True)
class OptionalExtra:
    """`modules`: as they are imported, package by package; `purpose`: what it is for, in a few words."""

    modules: tuple[str, ...]
    purpose: str


EXTRAS: Mapping[str, OptionalExtra] = {
    "gguf": OptionalExtra(("gguf",), "models in GGUF files"),
    "hub": OptionalExtra(("huggingface_hub",), "--download of models of the Hugging Face hub"),
    "mlflow": OptionalExtra(("mlflow",), "--track mlflow"),
    "nvml": OptionalExtra(("pynvml",), "use and memory of NVIDIA devices, other programs on them"),
    "onnx": OptionalExtra(("onnx", "onnxscript", "onnxruntime"), "gpuinfer export: networks as ONNX"),
    "otel": OptionalExtra(
        ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"), "--otlp-endpoint, --track otel"
    ),
    "parquet": OptionalExtra(("pyarrow",), "prompts, answers, positions and rollouts as Parquet"),
    "plots": OptionalExtra(("matplotlib",), "plots of bench, simulate, train and loop"),
    "plugins": OptionalExtra(("packaging",), "plugins of other packages: gpuinfer plugins install"),
    "ray": OptionalExtra(("ray",), "--launcher ray"),
    "schemas": OptionalExtra(("llguidance",), "answers that follow a JSON schema, regex, choice or grammar"),
    "serve": OptionalExtra(("uvloop",), "a faster event loop for servers and routers"),
    "tensorboard": OptionalExtra(("tensorboard",), "--track tensorboard"),
    "transformers": OptionalExtra(("transformers",), "families of text models that transformers' own code computes"),
    "tune": OptionalExtra(("tomlkit",), "--apply of bench and tune: settings written into gpuinfer.toml"),
    "vllm": OptionalExtra(("vllm",), "the backend vllm"),
    "wandb": OptionalExtra(("wandb",), "--track wandb"),
}
"""By name. Extras that bring no library of their own (`all`, and `models` with its weights) are not here."""


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that cannot be imported here. Empty: it is installed."""
    return [name for name in EXTRAS[extra].modules if not is_installed(name)]


def is_installed(module: str) -> bool:
    """Whether a package of this name is installed, and not a mere folder of that name, as wandb leaves one."""
    try:
        found = importlib.util.find_spec(module)
    except ImportError:  # the package that it is in is missing
        return False
    return found is not None and found.origin is not None


def install_command(extra: str) -> str:
    return f"pip install 'gpuinfer[{extra}]'"


def missing_extra(extra: str, what: str) -> str | None:
    """Why `what` cannot be done without this extra; the message ends with the command that installs it. None where the
    extra is installed.
    """
    absent = [name.partition(".")[0] for name in missing_modules(extra)]
    if not absent:
        return None
    names, are = ", ".join(dict.fromkeys(absent)), "is" if len(set(absent)) == 1 else "are"
    if one_file() is not None:
        return f"{what} needs {names}, which the one file does not bring. Use the wheel: {install_command(extra)}"
    return f"{what} needs {names}, which {are} not installed. Run: {install_command(extra)}"


def require_extra(extra: str, what: str) -> None:
    """Raises `UsageError`, which ends with the cure, where an extra that `what` needs is not installed."""
    if (problem := missing_extra(extra, what)) is not None:
        raise UsageError(problem)
