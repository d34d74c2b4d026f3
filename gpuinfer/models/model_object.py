"""Models that a program holds as objects: a module, a class, or a function of a batch.

In this process the object's own tensors are computed with: `LocalModel` copies the modules around them and leaves the
object as it is. For another process `PortableModel` carries each module's class by name, its plain attributes, and its
tensors; nothing is pickled by torch, and classes are imported there, so that they must lie in a file.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.host import error_text
from gpuinfer.models.load import find_factory
from gpuinfer.models.row_layout import PACKED, RowLayout

SIMPLE = (type(None), bool, int, float, complex, str, bytes)
OF_TORCH = (torch.dtype, torch.device, torch.memory_format)
HOOKS = frozenset(
    {
        *("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_hooks_with_kwargs"),
        *("_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)
STRUCTURE = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}) | HOOKS


class FunctionModel(nn.Module):
    """A function of a batch as a module. With `numpy` it is given arrays and may answer with arrays."""

    def __init__(self, function: Callable[..., Any], numpy: bool) -> None:
        super().__init__()
        self.function, self.numpy = function, numpy

    def forward(self, *leaves: Any, **named: Any) -> Any:
        """What the function answers, its arrays as tensors."""
        if self.numpy:
            leaves, named = changed_in(Tensor.numpy, leaves), changed_in(Tensor.numpy, named)
        return changed_in(tensor_of_array, self.function(*leaves, **named), np.ndarray)


def tensor_of_array(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor on the array's memory, or on a copy where torch cannot use that."""
    whole = all(stride >= 0 and stride % max(1, array.itemsize) == 0 for stride in array.strides)
    return torch.from_numpy(array if whole and array.flags.writeable else array.copy())


def changed_in(change: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """`value` with each `kind` in its tuples, lists and dicts changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {name: changed_in(change, one, kind) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return tuple(changed_in(change, one, kind) for one in value)
    return value


def title_of(model: Any) -> str:
    """What messages and reports call a model object."""
    if isinstance(model, str):
        return model
    named = model if isinstance(model, type) or inspect.isroutine(model) else type(model)
    return str(getattr(named, "__name__", type(model).__name__))


class LocalModel:
    """A model for this process. `build` gives what computes; `release` gives back what had to be changed for it."""

    structure: ClassVar[str | None] = None  # of `PortableModel`

    def __init__(self, model: Any, arguments: Mapping[str, Any] | None = None) -> None:
        """`model`: a `torch.nn.Module`, a class of such (called with `arguments`), or a function of a batch. Raises
        `UsageError` for anything else.
        """
        self.takes_arrays = False  # a function, which is given NumPy arrays
        if isinstance(model, type):
            try:
                model = model(**(arguments or {}))
            except Exception as error:
                raise UsageError(
                    f"{title_of(model)}({', '.join(f'{key}={value!r}' for key, value in (arguments or {}).items())}) "
                    f"raised {error_text.full_message(error)}. Make the model yourself, and pass the object."
                ) from error
        elif arguments:
            raise UsageError("arguments go with a class or a 'module:factory', and this model is made. Leave them out.")
        if not callable(model):
            raise UsageError(
                f"model {model!r} is neither a torch.nn.Module nor a function. Pass a module, its class, "
                "'module:factory', or a function of a batch."
            )
        self.model = model

    @property
    def half_dtype(self) -> str | None:
        """The name of the dtype of a module all of whose floating point has 16 bits; None of any other model."""
        tensors = [*self.model.parameters(), *self.model.buffers()] if isinstance(self.model, nn.Module) else []
        found = {one.dtype for one in tensors if one.is_floating_point()}
        return str(found.pop()).removeprefix("torch.") if found in ({torch.float16}, {torch.bfloat16}) else None

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The module in evaluation mode on `device`, its floating-point tensors in `dtype`. A tensor that lies there in
        that dtype already is shared with the object, not copied.
        """
        if not isinstance(self.model, nn.Module):
            return FunctionModel(self.model, self.takes_arrays)
        if any(isinstance(one, UninitializedParameter) for one in self.model.parameters()):
            raise UsageError(
                f"model {title_of(self.model)} has lazy layers that have not seen a batch. Call it once with one first."
            )
        memo: dict[int, Any] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            moved = tensor.detach().to(device, wanted)
            parameter = isinstance(tensor, nn.Parameter)
            # Buffers are what a forward may write to; parameters are shared, so that training goes on to be seen.
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=False) if parameter else moved.clone()
        try:
            if isinstance(self.model, torch.jit.ScriptModule) or type(self.model).__name__ == "OptimizedModule":
                raise TypeError  # a copy of compiled code would be compiled anew
            return copy.deepcopy(self.model, memo).eval()
        except Exception:  # noqa: BLE001 (what a module holds may refuse to be copied: then it computes itself)
            if any(memo[id(one)].data_ptr() != one.data_ptr() for one in self.model.parameters()):
                raise UsageError(
                    f"model {title_of(self.model)} cannot be copied, and its weights are not on {device} in {dtype}. "
                    f"Move it there first: model.to({str(device)!r})."
                ) from None
            _keep_evaluating(self.model, self)
            return self.model

    def trainable(self) -> nn.Module:
        """A copy in float32 on the CPU, to be trained. Raises `UsageError` for a function, which has no weights."""
        if not isinstance(self.model, nn.Module):
            raise UsageError(f"model {title_of(self.model)} is a function, and has no weights to train. Pass a module.")
        return copy.deepcopy(self.model).float().cpu()

    def digest(self) -> str:
        """Of its class and its weights, or of a function's name: the same model answers the same."""
        made = hashlib.sha256(f"{getattr(self.model, '__module__', '')}:{title_of(self.model)}".encode())
        if isinstance(self.model, nn.Module):
            for name, one in self.model.state_dict().items():
                made.update(f"{name} {one.dtype} {list(one.shape)}".encode())
                if isinstance(one, Tensor) and one.numel():
                    made.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return made.hexdigest()

    def release(self) -> None:
        """Back in the mode in which the object was, where it computed itself and nobody else computes with it."""
        with _EVALUATING_LOCK:
            held = _EVALUATING.get(self.model) if isinstance(self.model, nn.Module) else None
            if held is not None:
                held.holders.discard(id(self))
                if not held.holders:
                    del _EVALUATING[self.model]
                    for one in held.training:
                        one.training = True


@dataclass
class _HeldModule:
    """A module that computes itself, since it cannot be copied: for whom, and which of its modules were in training."""

    training: list[nn.Module]
    holders: set[int] = field(default_factory=set)


_EVALUATING: weakref.WeakKeyDictionary[nn.Module, _HeldModule] = weakref.WeakKeyDictionary()
_EVALUATING_LOCK = threading.Lock()


def _keep_evaluating(model: nn.Module, holder: LocalModel) -> None:
    with _EVALUATING_LOCK:
        held = _EVALUATING.setdefault(model, _HeldModule([one for one in model.modules() if one.training]))
        held.holders.add(id(holder))
        model.eval()


def object_spec(local: LocalModel, layout: RowLayout, *, check: bool = True, elsewhere: bool = False) -> ModelSpec:
    """The spec of a model object for rows of this layout. `elsewhere`: another process computes. `check`: answers with
    NaN or +inf are refused. Raises `UsageError` for a model that cannot travel.
    """
    local.takes_arrays = layout.kind == "numpy" and not isinstance(local.model, nn.Module)
    source = PortableModel.of(local) if elsewhere else local
    name = title_of(local.model)
    return ModelSpec(name, None, layout.row_bytes, PACKED, layout=replace(layout, check=check), source=source)


@dataclass(frozen=True)
class ModuleRecord:
    """A module as plain values. Tensors are numbers of `PortableModel.tensors`."""

    kind: str  # module:class
    attributes: dict[str, Any]
    parameters: dict[str, int | None] = field(default_factory=dict)
    buffers: dict[str, int | None] = field(default_factory=dict)
    modules: dict[str, ModuleRecord | None] = field(default_factory=dict)
    transient: tuple[str, ...] = ()  # buffers that are in no state_dict


@dataclass(frozen=True)
class NamedObject:
    """A function or class of a file, which is imported by this name."""

    path: str


@dataclass(frozen=True)
class PortableModel:
    """A model that another process builds: a record of its modules and their tensors, a name, or TorchScript."""

    record: ModuleRecord | NamedObject | bytes
    tensors: Sequence[tuple[str, tuple[int, ...], bytes]] = ()
    takes_arrays: bool = False
    compiled: bool = False

    @property
    def structure(self) -> str:
        """All of it but the values of its tensors: what decides how fast it is."""
        record = hashlib.sha256(self.record).hexdigest() if isinstance(self.record, bytes) else repr(self.record)
        return f"{record} {[(kind, shape) for kind, shape, _ in self.tensors]} {self.compiled}"

    @classmethod
    def of(cls, local: LocalModel) -> PortableModel:
        """Raises `UsageError` for a model that cannot travel, with what to do."""
        model, compiled = local.model, False
        if not isinstance(model, nn.Module):
            return cls(NamedObject(path_of(model, "function")), takes_arrays=local.takes_arrays)
        if isinstance(model, torch.jit.ScriptModule):
            return cls(saved_script(model))
        if type(model).__name__ == "OptimizedModule":
            model, compiled = model._orig_mod, True
        recorder = _Recorder()
        record = recorder.record(model, "")
        return cls(record, tuple(recorder.tensors), compiled=compiled)

    @classmethod
    def refuse_immovable(cls, local: LocalModel) -> None:
        """Raise what `of` raises. Of a module no tensor is copied."""
        model = getattr(local.model, "_orig_mod", local.model)
        if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
            _Recorder(copies=False).record(model, "")
        else:
            cls.of(local)

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """As `LocalModel.build`. Imports the classes. Raises `UsageError` where one is not found."""
        if isinstance(self.record, bytes):
            return loaded_script(self.record, device)
        if isinstance(self.record, NamedObject):
            return FunctionModel(find_factory(self.record.path, "function"), self.takes_arrays)
        tensors = [
            torch.frombuffer(bytearray(data), dtype=getattr(torch, kind)).view(shape)
            if data
            else torch.empty(shape, dtype=getattr(torch, kind))
            for kind, shape, data in self.tensors
        ]
        module = _built(self.record, tensors).eval().requires_grad_(False).to(device, dtype)
        return torch.compile(module) if self.compiled else module  # type: ignore[return-value]

    def release(self) -> None:
        """Nothing was changed."""


def saved_script(model: torch.jit.ScriptModule) -> bytes:
    """TorchScript as bytes."""
    written = io.BytesIO()
    torch.jit.save(model, written)  # type: ignore[no-untyped-call]
    return written.getvalue()


def loaded_script(saved: bytes, device: torch.device) -> nn.Module:
    """TorchScript in evaluation mode on `device`."""
    script: nn.Module = torch.jit.load(io.BytesIO(saved), map_location=device)  # type: ignore[no-untyped-call]
    return script.eval()


class _Recorder:
    """Writes down modules; a tensor that several of them share is written once."""

    def __init__(self, *, copies: bool = True) -> None:
        """`copies=False`: of the tensors nothing is read, which is enough to know whether a model can travel."""
        self.tensors: list[tuple[str, tuple[int, ...], bytes]] = []
        self._numbers: dict[int, int] = {}
        self._copies = copies

    def record(self, module: nn.Module, where: str) -> ModuleRecord:
        path = path_of(type(module), "class")
        for name in HOOKS:
            if getattr(module, name, None):
                raise _cannot_travel(where, f"has hooks ({name.strip('_')}), which do not travel")
        return ModuleRecord(
            path,
            {
                name: self._plain(value, f"{where}.{name}".strip("."))
                for name, value in vars(module).items()
                if name not in STRUCTURE
            },
            {name: self._number(one) for name, one in module._parameters.items()},
            {name: self._number(one) for name, one in module._buffers.items()},
            {
                name: None if one is None else self.record(one, f"{where}.{name}".strip("."))
                for name, one in module._modules.items()
            },
            tuple(sorted(module._non_persistent_buffers_set)),
        )

    def _number(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if not self._copies:
            return None
        if id(tensor) not in self._numbers:
            host = tensor.detach().cpu().contiguous()
            data = host.view(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append((str(host.dtype).removeprefix("torch."), tuple(host.shape), data))
        return self._numbers[id(tensor)]

    def _plain(self, value: Any, where: str) -> Any:
        if isinstance(value, (*SIMPLE, *OF_TORCH)):
            return value
        if isinstance(value, Tensor):
            return _TensorNumber(self._number(value))
        if isinstance(value, torch.Size):
            return value
        if type(value) in (tuple, list, set, frozenset):
            return type(value)(self._plain(one, where) for one in value)
        if type(value) in (dict, OrderedDict):
            return {self._plain(key, where): self._plain(one, where) for key, one in value.items()}
        if isinstance(value, type) or inspect.isroutine(value):
            return NamedObject(path_of(value, "class" if isinstance(value, type) else "function"))
        raise _cannot_travel(where, f"is {type(value).__name__}, which does not travel")


@dataclass(frozen=True)
class _TensorNumber:
    number: int | None


def _cannot_travel(where: str, what: str) -> UsageError:
    return UsageError(
        f"the model cannot go to another process: {where or 'it'} {what}. Pass 'module:factory', a function in a file "
        'that makes the model, or use backend="inprocess".'
    )


def path_of(value: Any, what: str) -> str:
    """`module:name` of a class or function, by which another process imports it. Raises `UsageError` without one."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", type(value).__qualname__)
    if inspect.isbuiltin(value):  # of a class that cannot be reached by its name
        name = value.__name__
    if isinstance(name, str) and (module is None or module == "builtins" or module.startswith("torch.")):
        found = getattr(sys.modules.get(module or "torch"), name, None)
        if found is value and module is not None:
            return f"{module}:{name}"
        for place in ("torch", "torch.nn.functional"):  # what torch says of its own functions' modules is not so
            if getattr(sys.modules.get(place), name, None) is value:
                return f"{place}:{name}"
    own = str(name).rpartition(".")[2]
    imported = "scaled" if "<" in own else own  # of a lambda, say
    cure = f"Write it to a file, such as nets.py, import it from there (from nets import {imported}), or use "
    cure += 'backend="inprocess", which needs no other process.'
    if module is None or "<" in name:
        kind = "a lambda" if own == "<lambda>" else f"{what} '{own}', made inside a function,"
        raise UsageError(f"{kind} cannot be imported by another process. {cure}")
    here = sys.modules.get(module)
    if here is None or (module == "__main__" and not os.path.isfile(getattr(here, "__file__", None) or "")):
        raise UsageError(
            f"{what} '{name}' is defined in a notebook or at a prompt, and another process cannot import it from "
            f"there. {cure}"
        )
    found = here
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        what_is = f"{what} '{name}' of module '{module}'" if found is not None else f"{what} {value!r}"
        raise UsageError(
            f"{what_is} is not what another process finds under that name: it is an object that was made, a method of "
            f"one, or the name means something else by now. {cure}"
        )
    return f"{module}:{name}"


def _built(record: ModuleRecord, tensors: Sequence[Tensor]) -> nn.Module:
    kind = find_factory(record.kind, "class")
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in record.attributes.items():
        module.__dict__[name] = _restored(value, tensors)
    for name, number in record.parameters.items():
        module._parameters[name] = None if number is None else nn.Parameter(tensors[number], requires_grad=False)
    for name, number in record.buffers.items():
        module._buffers[name] = None if number is None else tensors[number]
    for name, one in record.modules.items():
        module._modules[name] = None if one is None else _built(one, tensors)
    module._non_persistent_buffers_set = set(record.transient)
    return module


def _restored(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _TensorNumber):
        return None if value.number is None else tensors[value.number]
    if isinstance(value, NamedObject):
        return find_factory(value.path, "function")
    if type(value) in (tuple, list, set, frozenset):
        return type(value)(_restored(one, tensors) for one in value)
    if isinstance(value, dict):
        return {_restored(key, tensors): _restored(one, tensors) for key, one in value.items()}
    return value


def caller_of(module: nn.Module, layout: RowLayout) -> Callable[[Sequence[Any]], Any]:
    """How the module is called with the leaves of a batch: one tensor; the parts of a tuple one by one, if it takes so
    many; the parts of a dict by name, if it takes those names; else the tuple or dict as it is.
    """
    form = layout.form
    if form is None:
        return lambda leaves: module(leaves[0])
    target = module.function if isinstance(module, FunctionModel) else module.forward
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # of compiled code
        signature = inspect.Signature([inspect.Parameter("rows", inspect.Parameter.VAR_POSITIONAL)])
    if isinstance(form, dict):
        try:
            signature.bind(**dict.fromkeys(form))
        except TypeError:
            return lambda leaves: module(layout.arrange(leaves))
        return lambda leaves: module(**layout.arrange(leaves))
    try:
        signature.bind(*form)
    except TypeError:
        return lambda leaves: module(layout.arrange(leaves))
    return lambda leaves: module(*layout.arrange(leaves))
