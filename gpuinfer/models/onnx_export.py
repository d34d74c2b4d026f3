"""Writes a network of rows as an ONNX file, and compares ONNX Runtime's answers with torch's.

The file is written from the module as its author wrote it, since the frozen forms of the built-in networks use
operations that ONNX lacks. It is compared with the form that answers here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import error_text
from gpuinfer.host.machine import cores
from gpuinfer.models import load
from gpuinfer.models.row_blocks import tensors_of
from gpuinfer.models.row_format import AnswerLayout

if TYPE_CHECKING:
    import onnx

GRAPHS = torch.__version__ >= "2.9.0a0"
"""Whether torch's own default is to export from a graph of `torch.export`. Older ones cannot take batch normalisation,
GRUs or transformers that way: TorchScript, their default, comes after it there.
"""

OPSET = 18  # what torch's exporter is written in: another one would be a conversion
INPUT, BATCH = "features", "batch"
LARGEST = (2 << 30) - (8 << 20)  # bytes of weights: protobuf ends at 2 GiB
EXAMPLE_ROWS = 3  # a size that no dimension of a network mostly has
SIZES = (1, 2, 3, 7, 32, 257)  # batches that are compared


@dataclass(frozen=True, slots=True)
class Exportable:
    """A network in its inference form and in its author's form."""

    spec: ModelSpec
    here: nn.Module
    written: nn.Module
    layout: AnswerLayout

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the answers' tensors, in their order."""
        if self.layout.kind == "dict":
            return self.layout.names
        if load.expected_shapes(self.spec, 1):
            return ("policy_logits", "values")
        return ("answer",) if self.layout.kind == "tensor" else [f"answer_{k}" for k in range(len(self.layout.shapes))]

    def digest(self) -> str:
        """SHA-256 of its tensors with their names and shapes, whatever file they came from."""
        made = hashlib.sha256()
        for name, tensor in sorted(self.written.state_dict().items()):
            made.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            made.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        return made.hexdigest()


class _Flat(nn.Module):
    """Answers with a tuple of float32 tensors, however the module arranges its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Written for the oldest supported torch, which cannot trace `row_blocks.tensors_of`."""
        answer = self.module(features)
        if isinstance(answer, Tensor):
            return (answer.float(),)
        parts = answer.values() if isinstance(answer, Mapping) else answer
        return tuple([part.float() for part in parts])


def open_exportable(spec: ModelSpec, seed: int) -> Exportable:
    """Open a network in float32 on the CPU. Raises `UsageError` when it cannot be loaded, or is too
    large for one file.
    """
    cpu = torch.device("cpu")
    here = load.build(spec, device=cpu, dtype=torch.float32, seed=seed)
    layout = load.probe(here, spec, device=cpu, dtype=torch.float32)
    written = load.with_weights(spec, seed).eval().requires_grad_(False).to(torch.float32)
    if (size := sum(tensor.nbytes for tensor in written.state_dict().values())) > LARGEST:
        raise UsageError(
            f"{load.title(spec.name)} has {size / 2**30:.1f} GiB of weights, and an ONNX file holds 2 GiB. "
            "Export a smaller network."
        )
    return Exportable(spec, here, written, layout)


def content(network: Exportable, told: Mapping[str, str]) -> bytes:
    """The content of the file: input `features` float32 [batch, features], outputs with their names, `told` as its
    metadata.

    The same network gives the same bytes on every machine. Raises `WorkError` for a network that torch cannot export.
    """
    try:
        with _quietly(), torch.no_grad():
            model = _written(_Flat(network.written), network)
    except Exception as error:
        cause: BaseException = error  # the innermost: torch wraps it in pages of text
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise WorkError(
            f"{load.title(network.spec.name)} cannot be exported: {error_text.short_message(cause)}. Let its forward "
            "take any number of rows, without branches on what is in them, and compute with operations of torch alone."
        ) from error
    _tidy(model)
    for name, text in sorted(told.items()):
        model.metadata_props.add(key=name, value=text)
    made: bytes = model.SerializeToString(deterministic=True)
    return made


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Within this block torch's exporter prints nothing, and transformer layers compute step by step: their fused
    operation does not exist in ONNX.
    """
    torch_log, nowhere = logging.getLogger("torch"), io.StringIO()
    level, fused = torch_log.level, torch.backends.mha.get_fastpath_enabled()
    torch_log.setLevel(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch_log.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fused)


def _written(module: nn.Module, network: Exportable) -> onnx.ModelProto:
    """Export from a graph by tracing the program (`strict`), where `len(rows)` is no constant; else by calling the
    module; with an older torch by TorchScript after that.
    """
    import onnx

    example = (torch.ones(EXAMPLE_ROWS, network.spec.inputs),)
    told: dict[str, Any] = {"input_names": [INPUT], "output_names": list(network.outputs)}
    told |= {"opset_version": OPSET, "verbose": False}
    shapes = {"features": {0: torch.export.Dim.DYNAMIC}}
    try:
        try:
            graph = torch.export.export(module, example, dynamic_shapes=shapes, strict=True)
        except Exception:  # noqa: BLE001 (the other way says what is wrong)
            graph = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
        program: Any = torch.onnx.export(graph, **told, dynamo=True)
        return program.model_proto  # type: ignore[no-any-return]
    except Exception:
        if GRAPHS:
            raise
    file: Any = io.BytesIO()
    axes = {name: {0: BATCH} for name in (INPUT, *network.outputs)}
    torch.onnx.export(module, example, file, **told, dynamic_axes=axes, dynamo=False)
    return onnx.load_model_from_string(file.getvalue())


def _tidy(model: onnx.ModelProto) -> None:
    """Name the first dimension `batch` and remove this machine's paths, which torch writes into stack traces. Inner
    shapes are dropped: they name the dimension otherwise, and can be inferred.
    """
    graph = model.graph
    rows = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == rows:
                dimension.dim_param = BATCH
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.ClearField("metadata_props")
    graphs: list[Any] = [graph, *model.functions]
    for one in graphs:  # grows by the branches of `If` and the bodies of loops
        for field in ("metadata_props", "doc_string", "value_info"):
            one.ClearField(field)
        for node in one.node:
            node.ClearField("metadata_props")
            node.ClearField("doc_string")
            graphs += [part.g for part in node.attribute if part.HasField("g")]


def largest_differences(
    path: Path, network: Exportable, rows: NDArray[np.float32]
) -> Iterator[tuple[int, dict[str, float]]]:
    """For each of `SIZES` the largest difference of each output between ONNX Runtime and torch, as `apart` defines it.

    `rows` [positions, features] are used in turn, so that batches hold different rows. Raises `WorkError` for a file
    that ONNX Runtime cannot run.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()  # else it binds threads to cores, which a container may refuse aloud
    options.log_severity_level = 4  # what it logs of an error, it raises too
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        start = 0
        for size in SIZES:
            batch = np.take(rows, np.arange(start, start + size), axis=0, mode="wrap")
            start += size
            got = session.run(list(network.outputs), {INPUT: batch})
            with torch.inference_mode():
                wanted = [tensor.float().numpy() for tensor in tensors_of(network.here(torch.from_numpy(batch)))]
            yield size, {name: apart(*two) for name, *two in zip(network.outputs, got, wanted, strict=True)}
    except Exception as error:
        raise WorkError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run what was exported: {error_text.short_message(error)}. "
            "Let its forward take any number of rows (rows.shape[0], not len(rows)), or try another version of torch."
        ) from error


def apart(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The largest |got - wanted| / max(1, |wanted|): absolute of small answers, relative of large ones. The same
    infinity is no difference; another shape and NaN are infinitely far.
    """
    if got.shape != wanted.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        each = np.abs(got - wanted) / np.maximum(1.0, np.abs(wanted))
    each = np.where(got == wanted, 0.0, np.nan_to_num(each, nan=np.inf, posinf=np.inf))
    return float(each.max(initial=0.0))
