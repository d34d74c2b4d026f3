"""From a ModelSpec to a module that is ready to answer; checks before loading; and initial weights as a file. A model
is tried on two small batches before any work relies on it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from gpuinfer.api import ModelSpec
from gpuinfer.config import blame, import_paths
from gpuinfer.errors import UnknownName, UsageError, WorkError, nearest
from gpuinfer.host import error_text
from gpuinfer.host.files import put_whole
from gpuinfer.models.device import device_name as device_name
from gpuinfer.models.device import resolve_device as resolve_device
from gpuinfer.models.device import resolve_dtype as resolve_dtype
from gpuinfer.models.networks import NETWORKS, load_weights
from gpuinfer.models.row_blocks import layout_of, tensors_of
from gpuinfer.models.row_format import AnswerLayout

OVERFLOWS = "; in float16 large values overflow: try dtype bfloat16 or float32"
SIZES = ("actions", "seats")  # of a game: what the built-in networks are told
BATCHES = (2, 3)  # two sizes, so that an answer that does not follow the batch is seen


def probe(module: nn.Module, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> AnswerLayout:
    """The layout of the model's answers. Raises `UsageError`, with the model and the shapes, unless the answers have
    the expected shapes and hold numbers.
    """
    few, more = (attempt(module, spec, rows, device, dtype) for rows in BATCHES)
    if few != more:
        raise UsageError(
            f"{title(spec.name)} answered {BATCHES[0]} rows with {few} a row and {BATCHES[1]} rows with {more}. "
            "Let the answer to a row look the same in every batch."
        )
    return few


def attempt(module: nn.Module, spec: ModelSpec, rows: int, device: torch.device, dtype: torch.dtype) -> AnswerLayout:
    """The layout of the answers to a batch of so many rows, checked."""
    features = torch.ones(rows, spec.inputs, device=device, dtype=dtype)
    with torch.inference_mode():
        try:
            answer = module(features)
        except Exception as error:
            raise UsageError(
                f"{title(spec.name)} raised {error_text.full_message(error)}. It was given features "
                f"{list(features.shape)} of {str(dtype).removeprefix('torch.')} on {device}. "
                f"Let it take that shape and dtype{'' if dtype == torch.float32 else ', or try dtype float32'}."
            ) from error
    expected = expected_shapes(spec, rows)
    wanted = " and ".join(f"{name} {shape}" for name, shape in expected) or f"tensors of {rows} rows"
    try:
        found, layout = tensors_of(answer), layout_of(answer)
    except TypeError as error:
        raise UsageError(f"{title(spec.name)} answered with {error}. Let it return {wanted}.") from None
    shapes = [list(tensor.shape) for tensor in found]
    unlike = shapes != [shape for _, shape in expected] or not isinstance(answer, tuple | list)
    if (expected and unlike) or not found or any(not shape or shape[0] != rows for shape in shapes):
        raise UsageError(
            f"{title(spec.name)} answered a batch of {rows} rows with {' and '.join(map(str, shapes)) or 'nothing'}. "
            f"Let it return {wanted}{' as a tuple' if ' and ' in wanted else ''}."
        )
    for place, tensor in enumerate(found):
        bad = "NaN" if bool(tensor.isnan().any()) else "+inf" if bool(tensor.isposinf().any()) else None
        if bad:
            raise UsageError(
                f"{title(spec.name)} answered with {bad} in output {place} {list(tensor.shape)}. "
                f"Check its weights{OVERFLOWS if tensor.dtype == torch.float16 else ''}."
            )
    return layout


def expected_shapes(spec: ModelSpec, rows: int) -> Sequence[tuple[str, list[int]]]:
    """The shapes that the workload expects; none when it names neither actions nor seats."""
    if "actions" not in spec.arguments or "seats" not in spec.arguments:
        return []
    return [("policy logits", [rows, spec.arguments["actions"]]), ("values", [rows, spec.arguments["seats"]])]


def build(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int, compute: torch.dtype | None = None
) -> nn.Module:
    """The model in its fastest form for inference: evaluation mode, nothing trainable, on `device`, its weights rounded
    to `dtype`, ready to compute with features in `compute` (None: in `dtype` too).

    The same spec and seed give the same weights in every process. Raises `UsageError` when the model cannot be had.
    """
    if spec.source is not None:
        source: nn.Module = spec.source.build(device, compute or dtype)
        if isinstance(source, tuple(NETWORKS.values())):  # one of ours, as training has left it
            return source.freeze(device=device, dtype=dtype, compute=compute or dtype).eval()  # type: ignore[operator, no-any-return]
        return source
    module = with_weights(spec, seed).eval().requires_grad_(False)
    if spec.name in NETWORKS:
        return module.freeze(device=device, dtype=dtype, compute=compute or dtype).eval()  # type: ignore[operator, no-any-return]
    return module.to(device=device, dtype=dtype).to(compute or dtype)


def with_weights(spec: ModelSpec, seed: int) -> nn.Module:
    """`trainable`, with the weights of the spec's file where it names one. Raises `UsageError` unless they fit."""
    module = trainable(spec, seed)
    if spec.weights is not None:
        load_weights(module, spec.weights, spec.name)
    return module


def trainable(spec: ModelSpec, seed: int) -> nn.Module:
    """The model as its author wrote it, in float32 on the CPU, with weights drawn from `seed`."""
    if spec.source is not None:
        copied: nn.Module = spec.source.trainable()
        return copied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in spec.name:
            return from_factory(spec)
        return from_catalogue(spec)


def from_catalogue(spec: ModelSpec) -> nn.Module:
    if spec.name not in NETWORKS:
        module, _, function = spec.name.rpartition(".")
        dotted = module and spec.name.replace(".", "").isidentifier()
        hint = f"Did you mean '{module}:{function}'?" if dotted else ""
        raise UnknownName("model", spec.name, [*NETWORKS, "module:factory"], label="Choices", hint=hint)
    if spec.strict:
        refuse_untaken(spec, SIZES, SIZES)
    missing = [name for name in SIZES if name not in spec.arguments]
    if missing or spec.inputs < 1:
        raise UsageError(
            f"model '{spec.name}' plays card games and needs to know features, actions and seats, which this work "
            "does not say. Give your own model as --model module:factory."
        )
    if spec.inputs < spec.arguments["actions"]:
        raise UsageError(
            f"model '{spec.name}' reads the legal mask from the first {spec.arguments['actions']} features, but a row "
            f"has only {spec.inputs}. Use --model module:factory for games without the mask."
        )
    return NETWORKS[spec.name](spec.inputs, spec.arguments["actions"], spec.arguments["seats"])


def from_factory(spec: ModelSpec) -> nn.Module:
    factory = find_factory(spec.name)
    arguments = accepted(factory, {**spec.arguments, **sizes_of_rows(spec)}, spec.name)
    if spec.strict:
        refuse_untaken(spec, arguments, [parameter.name for parameter in parameters_of(factory) or ()])
    return module_of(factory, arguments, title(spec.name), "Mend it, or call it by hand to see where it fails.")


def make_seeded(kind: Callable[..., nn.Module], offered: dict[str, Any], seed: int) -> nn.Module:
    """What this class or function makes from what it takes of `offered`, weights drawn from `seed`. Raises `UsageError`
    as it does for what `module:factory` names.
    """
    arguments = accepted(kind, offered, kind.__name__)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return module_of(kind, arguments, f"model {kind.__name__}", "Make the model yourself, and pass the object.")


def module_of(make: Callable[..., nn.Module], arguments: Mapping[str, Any], title: str, cure: str) -> nn.Module:
    """The module that a class or factory makes. Raises `UsageError` where it raises, or makes another thing."""
    try:
        module = make(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raised = error_text.full_message(error)
        raise UsageError(f"{title}: the factory raised {raised}. It was called with ({given}). {cure}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{title}: the factory returned {type(module).__name__}, not a torch.nn.Module. Let it return the module "
            "itself."
        )
    return module


def sizes_of_rows(spec: ModelSpec) -> dict[str, Any]:
    """What a factory may ask of the rows: `features`, their number, or the shape of one array of several dimensions."""
    if spec.layout is None:
        return {"features": spec.inputs}
    if len(spec.layout.leaves) > 1 or spec.layout.form is not None:
        return {}
    (leaf,) = spec.layout.leaves
    return {"features": leaf.shape[0] if len(leaf.shape) == 1 else leaf.shape}


def find_factory(name: str, what: str = "model") -> Any:
    """The function that `module:factory` names; modules in the working folder are found, as with `python -m`. `what`
    names its purpose in errors.
    """
    module_name, _, path = name.partition(":")
    import_paths.in_working_folder()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and import_paths.is_of(module_name, error):
            raise import_paths.absent(name, error.name, what) from error
        raise UsageError(
            f"{title(name, what)}: importing '{module_name}' raised {error_text.full_message(error)}. "
            f"`python -c 'import {module_name}'` shows where."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            if module_name == "__main__":
                raise UsageError(
                    f"{what} '{path}' is not there when the program is imported, as the process that runs it does. "
                    "Define it at the top of the program, above `if __name__ == '__main__':`."
                )
            known = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
            kind = f"{'factory' if what == 'model' else what} in module '{module_name}'"
            raise UnknownName(kind, path, known, label="It has")
        found = getattr(found, part)
    if not callable(found):
        returns = "the module" if what == "model" else f"the {what}"
        raise UsageError(
            f"{title(name, what)} is {type(found).__name__}, not a function. Name one that returns {returns}."
        )
    return found


def title(name: str, what: str = "model") -> str:
    """What messages call a model; of a `module:factory` also the module's distribution."""
    module, colon, _ = name.partition(":")
    owner = blame.owner_of(module) if colon else ""
    return f"{what} '{name}' ({owner})" if owner else f"{what} '{name}'"


class FactoryWants(UsageError):
    """A factory has parameters (`names`) without defaults that nothing was given for."""

    def __init__(self, names: list[str], message: str) -> None:
        super().__init__(message)
        self.names = names


def refuse_untaken(spec: ModelSpec, taken: Iterable[str], known: Iterable[str]) -> None:
    """Raises `UsageError` for an argument of the spec that is not `taken`, with the nearest of those `known`."""
    sizes = sizes_of_rows(spec)
    if "features" in sizes and (features := spec.arguments.get("features", sizes["features"])) != sizes["features"]:
        raise UsageError(
            f"{title(spec.name)}: the argument features={features!r} does not go with rows of {sizes['features']}. "
            "Leave it out: the factory is given inputs under that name."
        )
    for name in spec.arguments:
        if name not in taken:
            choices = sorted({*known} - {"features"})
            near = f"Did you mean '{found}'? " if (found := nearest(name, choices)) else ""
            raise UsageError(
                f"{title(spec.name)} takes no argument '{name}'. {near}It takes {', '.join(choices) or 'none'}."
            )


def parameters_of(factory: Any) -> list[inspect.Parameter] | None:
    """The factory's parameter names, `**` included; None where Python cannot tell."""
    if inspect.isclass(factory) and factory.__init__ is nn.Module.__init__:  # accepts anything, and refuses it later
        return []
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return None
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.VAR_KEYWORD)]


def accepted(factory: Any, offered: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of `offered` that the factory's signature accepts."""
    named = parameters_of(factory)
    if named is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in named):
        return offered
    wanting = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if wanting:
        raise FactoryWants(
            wanting,
            f"{title(name)}: the factory needs {', '.join(wanting)}, but only {', '.join(sorted(offered))} can be "
            "given. Give the others defaults, or write a function around it that does.",
        )
    return {p.name: offered[p.name] for p in named if p.name in offered}


def refuse_unloadable(spec: ModelSpec) -> None:
    """Raises `UsageError` for a network of rows that does not exist, or whose weights do not fit. Built-in networks are
    built for the check, which takes milliseconds; of others only the factory is looked up.
    """
    if spec.source is not None:
        return
    if spec.name in NETWORKS or ":" not in spec.name:
        with_weights(spec, 0)
    else:
        find_factory(spec.name)


def write_weights(spec: ModelSpec, seed: int, path: Path) -> None:
    """Write the spec's weights (drawn from `seed` if it names none) as float32 safetensors.

    Raises `UsageError` when the model cannot be loaded, `WorkError` when the file cannot be written.
    """
    content = save({name: one.contiguous() for name, one in with_weights(spec, seed).state_dict().items()})
    try:
        put_whole(path, lambda file: file.write(content))
    except OSError as error:
        raise WorkError(
            f"{path} cannot be written: {error.strerror}. Make room there, or give another --out."
        ) from error
