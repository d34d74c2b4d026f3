"""A device of fake tensors beside host memory that is real, and each place where the host waits for the device.

A wait is what may stop the calling thread until the device has got there: a value that comes back, a copy in either
direction that is not queued (`non_blocking`) or not of pinned memory, a shape that depends on values, and `synchronize`
of an event, a stream or a device. What the host reads there is made up: ones by default, and nothing is true.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import gpuinfer
from gpuinfer.models import cuda_graphs

SOURCES = str(Path(gpuinfer.__file__).parent) + os.sep
COPIES = ("_to_copy", "copy_")
BY_VALUE = ("nonzero", "masked_select", "equal", "allclose")  # their shape or result depends on values
BETWEEN = (cuda_graphs.__file__,)  # the caller is meant, as it is of the dispatch mode `LiveBytes`
BYTES = 80 << 30  # of the device's memory


def _place() -> tuple[str, int]:
    """`models/out_of_memory.py answers` of the innermost function of gpuinfer that runs, and its line."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        measuring = frame.f_code.co_qualname.startswith("LiveBytes.")
        if path.startswith(SOURCES) and path not in BETWEEN and not measuring:
            function = re.sub(r"(\.<locals>\.<\w+>)+$", "", frame.f_code.co_qualname)  # a comprehension
            return f"{path.removeprefix(SOURCES)} {function.replace('<locals>.', '')}", frame.f_lineno
        frame = frame.f_back
    return "outside of gpuinfer", 0


class _Fakes(FakeTensorMode):
    """As where torch has no device: `torch.tensor` makes what is meant for one in memory of the host first."""

    avoid_device_init = True


class Device(TorchDispatchMode):
    """`torch.cuda` and tensors on CUDA devices within the block, as if there were one, or as many as `devices`.

    Within `waiting_only_in` a wait at another place raises `AssertionError`. In a capture each breaks the capture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device, self.devices = torch.device("cuda", 0), 1  # how many there are
        self.waits = Counter[str]()
        self.waited = 0  # how often in all
        self.read = 1.0  # each number that comes back
        self.captured = self.replayed = 0  # graphs
        self.sent = 0  # copies from the host
        self.log: list[str] = []  # what was done to streams and events, in order
        self.allocated = 0  # bytes that `torch.cuda.memory_allocated` and its peak answer
        self.registered: list[tuple[int, int]] = []  # address and bytes of host memory that was pinned later
        self._elsewhere: list[str] = []  # waits that are not allowed
        self._allowed: Collection[str] | None = None
        self._capturing = False
        self._pinned = weakref.WeakSet[Any]()
        self._fakes = _Fakes(allow_non_fake_inputs=True)
        self._around = contextlib.ExitStack()

    def __enter__(self) -> Self:
        cuda = _FakeCuda(self)
        names = [name for name in dir(cuda) if not name.startswith("_")]
        for name in names:
            self._around.enter_context(mock.patch.object(torch.cuda, name, getattr(cuda, name)))
        self._around.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        self._around.enter_context(mock.patch.object(gc, "collect"))  # takes longer than all else, and frees nothing
        self._around.enter_context(mock.patch.object(torch.nn.Module, "_apply", _applied))
        self._around.enter_context(mock.patch.object(torch.Tensor, "backward", backward))
        self._around.enter_context(self._fakes)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._around.close()

    @contextlib.contextmanager
    def _in_force(self) -> Iterator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    @contextlib.contextmanager
    def waiting_only_in(self, *places: str) -> Iterator[None]:
        """Each of `places`, such as `models/out_of_memory.py answers`, must wait for the device; nothing else may."""
        before, self.waits, self._allowed = self.waits, Counter(), places
        self._elsewhere.clear()
        try:
            yield
            assert not self._elsewhere, self._elsewhere[0]  # which somebody may have caught
            assert set(places) <= set(self.waits), f"no longer waits: {sorted(set(places) - set(self.waits))}"
        finally:
            self.waits, self._allowed = before + self.waits, None

    def wait(self, what: str) -> None:
        place, line = _place()
        said = f"gpuinfer/{place.replace(' ', f':{line} ')} waits for the device: {what}"
        if self._capturing:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({said})")
        if self._allowed is not None and place not in self._allowed:
            self._elsewhere.append(f"{said}. Queue it, or let the test name '{place}'.")
            raise AssertionError(self._elsewhere[-1])
        self.waits[place] += 1
        self.waited += 1

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        composite = "CompositeImplicitAutograd"
        if function.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), composite):
            with self._in_force():  # in inference mode it comes whole
                return function.decompose(*given, **(named or {}))
        named = dict(named or {})
        name = function.overloadpacket.__name__
        tensors = [one for one in tree_iter((given, named)) if isinstance(one, Tensor)]
        fake = [one for one in tensors if isinstance(one, FakeTensor)]
        to = named.get("device") or (tensors[0].device if tensors else torch.device("cpu"))
        if not fake and torch.device(to).type == "cpu":
            return self._on_host(function, name, given, named)
        if name in COPIES and {one.device.type for one in tensors} | {torch.device(to).type} == {"cpu", "cuda"}:
            return self._copied(function, name, given, named, torch.device(to).type == "cpu")
        if name == "_local_scalar_dense":
            self.wait("a value")
            dtype = given[0].dtype
            return False if dtype == torch.bool else self.read if dtype.is_floating_point else int(self.read)
        if name in BY_VALUE:
            self.wait(name)
            return _by_value(name, given[0])
        if name in ("index", "index_put_", "index_put", "_index_put_impl_"):
            given = self._indexed(name, given)
        return function(*given, **named)

    def _on_host(self, function: Any, name: str, given: Any, named: dict[str, Any]) -> Any:
        """In memory that is real; pinned memory is noted, which a build for the CPU has none of."""
        if name == "is_pinned":
            return self._is_pinned(given[0])
        pinned = named.pop("pin_memory", False) or name in ("pin_memory", "_pin_memory")
        with unset_fake_temporarily():
            found = given[0].clone() if name in ("pin_memory", "_pin_memory") else function(*given, **named)
        if pinned:
            self._pinned.add(found.untyped_storage())
        return found

    def _is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return tensor.untyped_storage() in self._pinned or any(low <= at < low + size for low, size in self.registered)

    def _copied(self, function: Any, name: str, given: Any, named: dict[str, Any], back: bool) -> Any:
        """Between host and device, in either direction."""
        queued = bool(named.get("non_blocking") or (name == "copy_" and len(given) > 2 and given[2]))
        host = next((one for one in given[:2] if isinstance(one, Tensor) and not isinstance(one, FakeTensor)), None)
        if not (queued and host is not None and self._is_pinned(host)):
            self.wait(f"a copy to the {'host' if back else 'device'} that is not queued, or not of pinned memory")
        self.sent += not back
        if not back:  # real tensors alone would be computed with
            given = [self._fakes.from_tensor(one) if one is host else one for one in given]
            return function(*given, **named)
        source = given[-1] if name == "_to_copy" else given[1]
        assert isinstance(source, FakeTensor)
        with unset_fake_temporarily():
            if name == "copy_":
                return given[0].fill_(self.read if given[0].dtype != torch.bool else False)
            dtype = named.get("dtype") or source.dtype
            return torch.full(source.shape, self.read if dtype != torch.bool else False, dtype=dtype)

    def _indexed(self, name: str, given: Any) -> Any:
        """Masks choose as many as they have places; that is a number which the host must know."""
        if any(one.device.type == "cpu" for one in given[1] if isinstance(one, Tensor)):
            self.wait("indices on the host")
        masks = [one for one in given[1] if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)]
        if not masks or (name != "index" and given[2].numel() == 1):  # which becomes `masked_fill_`
            return given
        self.wait("indexing by a mask")
        places: list[Any] = []
        for one in given[1]:
            if one in masks if isinstance(one, Tensor) else False:
                places += [torch.zeros(one.numel(), dtype=torch.int64, device=self.device) for _ in one.shape]
            else:
                places.append(one)
        return (given[0], places, *given[2:])


def _by_value(name: str, given: Tensor) -> Any:
    if name in ("equal", "allclose"):
        return True
    shape = (given.numel(), given.ndim) if name == "nonzero" else (given.numel(),)
    return given.new_empty(shape, dtype=torch.int64 if name == "nonzero" else given.dtype)


def backward(loss: Tensor) -> None:
    """As `Tensor.backward`: autograd's own engine wants streams of a device that is there."""
    order: list[Any] = []
    inputs: dict[Any, list[Tensor | None]] = {}

    def visit(node: Any) -> None:  # the nodes behind it first
        inputs[node] = [None] * len(node._input_metadata)
        for following, _ in node.next_functions:
            if following is not None and following not in inputs:
                visit(following)
        order.append(node)

    visit(loss.grad_fn)
    inputs[loss.grad_fn][0] = torch.ones_like(loss)
    with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", return_value=0):
        for node in reversed(order):
            found = node(*inputs.pop(node))
            found = found if isinstance(found, tuple) else (found,)
            for grad, (following, place) in zip(found, node.next_functions, strict=False):
                if following is not None and grad is not None:
                    held, wanted = inputs[following], following._input_metadata[place]
                    grad = grad.sum_to_size(wanted.shape).to(wanted.dtype)
                    held[place] = grad if held[place] is None else held[place] + grad


def _applied(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """As `nn.Module._apply`, but for parameters, which become new ones: real tensors cannot become fake in place."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None and one not in made:
                with torch.no_grad():
                    made[one] = nn.Parameter(change(one), one.requires_grad)
            if one is not None:
                part._parameters[name] = made[one]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else change(buffer)
    return module


class _FakeCuda:
    """What `torch.cuda` is meanwhile, for the names that gpuinfer uses."""

    def __init__(self, fake: Device) -> None:
        self._fake = fake

        class Stream:
            def __init__(self, device: torch.device | None = None) -> None:
                self.device = device or fake.device
                self.cuda_stream = id(self)

            def synchronize(self) -> None:
                fake.wait("synchronize of a stream")

            def wait_event(self, event: Any) -> None:
                fake.log.append("a stream waits for an event")

            wait_stream = wait_event

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.recorded, self.timed, self.after = False, enable_timing, 0

            def record(self, stream: Any = None) -> None:
                self.recorded, self.after = True, fake.waited

            def elapsed_time(self, end: Any) -> float:
                assert self.timed, "an event that does not take the time"
                assert end.timed, "an event that does not take the time"
                assert fake.waited > end.after, "an event that the host has not waited for"
                return fake.read

            def query(self) -> bool:
                assert self.recorded, "an event that nothing has recorded"
                return False

            def synchronize(self) -> None:
                assert self.recorded, "an event that nothing has recorded"
                fake.wait("synchronize of an event")

        class CUDAGraph:
            def replay(self) -> None:
                fake.replayed += 1

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, CUDAGraph
        self._current = {number: Stream(torch.device("cuda", number)) for number in range(8)}  # of each device
        self.default_generators = (torch.Generator(),)

    Stream: Any
    Event: Any
    CUDAGraph: Any
    default_generators: Any

    def device(self, place: Any) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self._current[stream.device.index]
        self.set_stream(stream)
        yield
        self.set_stream(before)

    def set_stream(self, stream: Any) -> None:
        self._current[stream.device.index] = stream

    def current_stream(self, device: Any = None) -> Any:
        return self._current[torch.device(device or self._fake.device).index or 0]

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self._fake._capturing = True
        try:
            with self.stream(stream):
                yield
            self._fake.captured += 1
        finally:
            self._fake._capturing = False

    def cudart(self) -> Any:
        held = self._fake.registered

        def register(at: int, size: int, flags: int) -> int:
            held.append((at, size))
            return 0

        def unregister(at: int) -> int:
            held[:] = [one for one in held if one[0] != at]
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def synchronize(self, device: Any = None) -> None:
        self._fake.wait("synchronize of the device")

    def empty_cache(self) -> None:
        self._fake.log.append("the cache is emptied")

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def device_count(self) -> int:
        return self._fake.devices

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=BYTES, uuid="0")

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return BYTES - self._fake.allocated, BYTES

    def memory_allocated(self, device: Any = None) -> int:
        return self._fake.allocated

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def set_per_process_memory_fraction(self, share: float, device: Any = None) -> None:
        self._fake.log.append(f"at most {share:.3f} of the memory")

    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda device=None: "a device of fake tensors")
    reset_peak_memory_stats = staticmethod(lambda device=None: None)
    graph_pool_handle = staticmethod(lambda: (0, 1))
