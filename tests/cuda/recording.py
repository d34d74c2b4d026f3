"""A `torch.cuda` that records: what each stream and each host thread reads and writes, and what orders it.

Tensors on its devices have values: each holds one on the CPU, and every operation computes at once. What is checked is
not what came of it here but whether it could have come out differently on a device: two accesses of the same memory of
which one writes, and nothing that orders them. Happens-before is torch's own (`torch.cuda._sanitizer`), to which each
stream of a device and each thread of the host is a stream. Beside races, `wrong` has what a device would refuse while
a graph is captured.

A block of memory is one thing, however small the part is that is read or written. So is all memory of a graph's pool,
and a piece of pinned memory. What is freed is given out again at once, in the order of the stream that it was made on.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from host_waits import backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from gpuinfer.models import cuda_graphs
from gpuinfer.models.pipeline import schedule

try:
    from torch.cuda import _sanitizer as sanitizer
except ImportError:  # a torch without it
    sanitizer = None  # type: ignore[assignment]

aten = torch.ops.aten
UnrecordedQueue = queue.SimpleQueue  # what is handed over by it is ordered in time, and by nothing that is recorded
SOURCES = str(Path(cuda_graphs.__file__).parents[1])
NEEDED = (
    "_handle_kernel_launch",
    "_handle_event_record",
    "_handle_event_wait",
    "_handle_event_deletion",
    "_handle_memory_deallocation",
    "_handle_stream_creation",
)
LAUNCH = ["self", "stream", "read_only", "read_write", "outputs", "operator", "tensor_aliases"]
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "is_pinned"}
WAITED_FOR = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "is_nonzero"}
CAPTURING = "operation not permitted when stream is capturing"


def missing() -> str | None:
    """Why this torch cannot be recorded; None when it can."""
    handler = getattr(sanitizer, "EventHandler", None)
    if handler is None or any(not hasattr(handler, name) for name in NEEDED):
        return "this torch has no torch.cuda._sanitizer with the interface that is used here"
    if list(inspect.signature(handler._handle_kernel_launch).parameters) != LAUNCH:
        return "torch.cuda._sanitizer.EventHandler takes other arguments in this torch"
    if not hasattr(torch._C, "_set_only_lift_cpu_tensors"):
        return "torch.tensor passes dispatch modes by in this torch"
    return None


class Block:
    """Memory of a device that one allocation gave, known to the sanitizer as `key`."""

    def __init__(self, cuda: Cuda, key: int, stream: Stream, pooled: bool) -> None:
        self.cuda, self.key, self.stream, self.pooled = cuda, key, stream, pooled
        self.kept_for: set[Stream] = set()

    def __del__(self) -> None:
        if not self.pooled:
            self.cuda.freed.append((self.key, self.stream, self.kept_for, threading.get_ident()))


class CudaTensor(torch.Tensor):
    """A tensor on a recorded device: `inner` has its values, `block` is its memory."""

    inner: torch.Tensor
    block: Block

    @staticmethod
    def of(inner: torch.Tensor, device: torch.device, block: Block) -> CudaTensor:
        with torch.inference_mode(inner.is_inference()):  # a view of what is not is not either
            made = torch.Tensor._make_wrapper_subclass(
                CudaTensor,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device,
            )
        made.inner, made.block = inner, block
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        raise RuntimeError("a tensor of a recorded device is used in a thread that is not recorded")

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: CudaTensor) -> None:
        self.inner, self.block = value.inner, value.block

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.kept_for.add(stream)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "") -> None:
        cuda = Cuda.running
        self.cuda, self.device, self.key = cuda, cuda.device_of(device), cuda.new_key()
        self.name = name or f"stream {next(cuda.stream_numbers)} of {self.device}"
        self.cuda_stream = self.key
        self.captured_by: Capture | None = None
        self.launched = 0  # operations
        with cuda.lock:
            cuda.handler._handle_stream_creation(self.key)
            cuda.names[self.key] = self.name
            cuda.streams.append(self)

    def synchronize(self) -> None:
        self.cuda.wait_here(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, **options: Any) -> None:
        self.cuda, self.key = Cuda.running, Cuda.running.new_key()
        self.stream: Stream | None = None
        self.capture: Capture | None = None

    def record(self, stream: Stream | None = None) -> None:
        cuda = self.cuda
        self.stream = stream = stream or cuda.current_stream()
        with cuda.lock:
            self.capture = cuda.begin_on(stream)
            cuda.handler._handle_event_record(self.key, stream.key)

    def wait(self, stream: Stream | None = None) -> None:
        cuda = self.cuda
        stream = stream or cuda.current_stream()
        with cuda.lock:
            if self.stream is None:
                return
            if cuda.begin_on(stream) is not self.capture:
                cuda.refuse(
                    "a stream waits for an event of another capture, or of none", stream.captured_by or self.capture
                )
            cuda.handler._handle_event_wait(self.key, stream.key)

    def synchronize(self) -> None:
        cuda = self.cuda
        with cuda.lock:
            self._may_be_looked_at()
            if self.stream is not None:
                cuda.handler._handle_event_wait(self.key, cuda.host())

    def _may_be_looked_at(self) -> None:
        self.cuda.may_wait("an event is waited for")
        if self.capture is not None and self.capture.underway:
            self.cuda.refuse("an event of a captured stream is waited for", self.capture)

    def elapsed_time(self, end: Event) -> float:
        """Some milliseconds, once both are over."""
        cuda = self.cuda
        with cuda.lock:
            seen = cuda.handler.syncs.current_sync_states[cuda.host()]
            for one in (self, end):
                assert one.stream is not None, "an event that nothing has recorded"
                at = cuda.handler.syncs.recorded_sync_states[one.key][one.stream.key]
                if seen.get(one.stream.key, -1) < at:
                    cuda.wrong.append("the time of an event is read that may not be over")
        return 1.0

    def query(self) -> bool:
        """Never over before somebody waits for it, so that nobody is behind it by having asked."""
        with self.cuda.lock:
            self._may_be_looked_at()
        return False


class Capture:
    """What is launched on `stream` becomes `graph`. `broken`: why a device would say that it failed."""

    def __init__(self, graph: CudaGraph, stream: Stream, pool: Any, mode: str) -> None:
        self.graph, self.stream, self.pool, self.mode = graph, stream, pool, mode
        self.thread = threading.get_ident()
        self.underway, self.broken = True, ""


class CudaGraph:
    """Operations that are done again with the same memory; one access of all that they read and write."""

    def __init__(self) -> None:
        self.cuda, self.pool_key = Cuda.running, 0
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.reads, self.writes = set[int](), set[int]()

    def replay(self) -> None:
        cuda = self.cuda
        with cuda.lock:
            if gone := (self.reads | self.writes) & cuda.gone:
                cuda.wrong.append(f"a graph uses memory that has been freed: {[cuda.names.get(key) for key in gone]}")
            cuda.access(cuda.current_stream(), self.reads, self.writes | {self.pool_key}, "a graph")
        with cuda.unrecorded():
            for function, given, named, results in self.steps:
                for result, found in zip(results, tensors_in(function(*given, **named)), strict=True):
                    if found is not result:
                        result.copy_(found)


class Lock:
    """A lock whose holder has seen all that those before it did."""

    def __init__(self, cuda: Cuda, made: Any) -> None:
        self._cuda, self._made, self._key = cuda, made, cuda.new_key()
        self.waiting = 0  # threads

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.waiting += 1
        taken = self._made.acquire(blocking, timeout)
        self.waiting -= 1
        if taken:
            self._cuda.join(self._key)
        return bool(taken)

    def release(self) -> None:
        self._cuda.leave(self._key)
        self._made.release()

    def locked(self) -> bool:
        return bool(self._made.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._made._at_fork_reinit()


class RLock(Lock):
    def _is_owned(self) -> bool:
        return bool(self._made._is_owned())

    def _release_save(self) -> Any:
        self._cuda.leave(self._key)
        return self._made._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._made._acquire_restore(state)
        self._cuda.join(self._key)


class SimpleQueue(queue.Queue):  # type: ignore[type-arg]
    """Of Python, with locks that are recorded; the original is written in C."""


class HostArray(np.ndarray):  # type: ignore[type-arg]
    """Pinned memory that NumPy reads and writes, which no dispatcher sees."""

    def __setitem__(self, where: Any, value: Any) -> None:
        of_host((value,), (self,))
        super().__setitem__(where, value)

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        if not isinstance(found, HostArray) or not np.may_share_memory(found, self):
            of_host((self,), ())
        return found

    def __array_ufunc__(self, function: Any, method: str, *given: Any, out: Any = (), **named: Any) -> Any:
        of_host(given, out)
        found = getattr(function, method)(
            *map(plain, given), **({"out": tuple(map(plain, out))} if out else {}), **named
        )
        return out[0] if len(out) == 1 else found

    def __array_function__(self, function: Any, types: Any, given: Any, named: Any) -> Any:
        out = named.get("out")
        targets = (out,) if out is not None else (given[0],) if function in (np.copyto, np.put) else ()
        of_host([one for one in tree_flatten((given, named))[0] if one is not out], targets)
        found = function(*tree_map(plain, given), **tree_map(plain, named))
        return found if out is None else out

    def tolist(self) -> Any:
        of_host((self,), ())
        return plain(self).tolist()

    def copy(self, order: Any = "C") -> Any:
        of_host((self,), ())
        return plain(self).copy(order)


def plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, HostArray) else value


def of_host(reads: Any, writes: Any) -> None:
    """This thread reads and writes these arrays."""
    if Cuda.running is not None:
        Cuda.running.host_access(
            [one for one in reads if isinstance(one, HostArray)], [one for one in writes if isinstance(one, HostArray)]
        )


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]


class Recorded(TorchDispatchMode):
    """In each thread an instance of its own."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda, self._lifted = cuda, list[bool]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, for nothing is compiled here

    def __enter__(self) -> Recorded:
        self._lifted.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # else `torch.tensor` passes the mode by
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifted.pop())

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return self.cuda.dispatched(function, given, dict(named or {}))


class Cuda:
    """The devices `cuda:0` and `cuda:1`. `races` and `wrong` are what was found, in words."""

    running: Any = None

    def __init__(self, ends_pools: bool = True) -> None:
        """`ends_pools`: whether a capture that fails leaves its pool, as from torch 2.12 on."""
        assert sanitizer is not None
        self.handler = sanitizer.EventHandler()
        self.races, self.wrong = list[str](), list[str]()
        self.ends_pools = ends_pools
        self.lock = threading.RLock()
        self.names: dict[int, str] = {}
        self.streams: list[Stream] = []
        self.stream_numbers = itertools.count(1)
        self.captures: list[Capture] = []  # that are under way
        self.capturing_pools: list[Any] = []  # that the allocator takes from
        self.both = threading.Barrier(2, timeout=60.0)  # where two threads meet, which orders nothing that is recorded
        self.graphs = 0  # captured
        self.released = 0  # pools, by hand
        self.waited = 0  # for a device
        self.freed: deque[tuple[int, Stream, set[Stream], int]] = deque()
        self.gone: set[int] = set()
        self._keys = itertools.count(1)
        self._pools: dict[Any, int] = {}
        self._pool_numbers = itertools.count(1)
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._pinned: dict[int, tuple[int, int]] = {}  # address: end, key
        self._threads: dict[int, int] = {}
        self._local = threading.local()
        self._defaults: dict[torch.device, Stream] = {}

    # ---- keys, threads, devices

    def new_key(self) -> int:
        return next(self._keys)

    def host(self, ident: int | None = None) -> int:
        """This thread, or another, as a stream."""
        ident = ident or threading.get_ident()
        if (key := self._threads.get(ident)) is None:
            key = self._threads[ident] = self.new_key()
            self.handler._handle_stream_creation(key)
            self.names[key] = f"the host in {threading.current_thread().name}"
        return key

    def device_of(self, device: Any) -> torch.device:
        if device is None or device == torch.device("cuda"):
            return torch.device("cuda", self.current_device())
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._local.device = self.current_device(), self.device_of(device).index
        try:
            yield
        finally:
            self._local.device = before

    def _current(self) -> dict[torch.device, Stream]:
        return self._local.__dict__.setdefault("streams", {})  # type: ignore[no-any-return]

    def default_stream(self, device: Any = None) -> Stream:
        place = self.device_of(device)
        with self.lock:
            if place not in self._defaults:
                self._defaults[place] = Stream(place, name=f"the default stream of {place}")
            return self._defaults[place]

    def current_stream(self, device: Any = None) -> Stream:
        place = self.device_of(device)
        return self._current().get(place) or self.default_stream(place)

    def set_stream(self, stream: Stream) -> None:
        self._current()[stream.device] = stream
        self._local.device = stream.device.index

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.current_device(), self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before[1])
            self._local.device = before[0]

    # ---- what orders what

    def join(self, key: int) -> None:
        """This thread has seen what had been done before `leave` was called with this key."""
        with self.lock:
            self.drain()
            self.handler._handle_event_wait(key, self.host())

    def leave(self, key: int) -> None:
        with self.lock:
            self.drain()
            self.handler._handle_event_record(key, self.host())

    def begin_on(self, stream: Stream) -> Capture | None:
        """Something is launched: behind all that this thread has seen. Returns the capture that it becomes part of."""
        self.drain()
        capture = stream.captured_by
        if capture is not None:
            if capture.thread != threading.get_ident():
                self.refuse("a thread launches on a stream that another one captures", capture)
            return capture
        self._after(stream.key, self.host())
        return None

    def _after(self, later: int, earlier: int) -> None:
        event = self.new_key()
        self.handler._handle_event_record(event, earlier)
        self.handler._handle_event_wait(event, later)
        self.handler._handle_event_deletion(event)

    def wait_here(self, stream: Stream) -> None:
        with self.lock:
            self.drain()
            self.may_wait("a stream is waited for")
            if stream.captured_by is not None:
                self.refuse("a stream is waited for while it is captured", stream.captured_by)
            self._after(self.host(), stream.key)

    def synchronize(self, device: Any = None) -> None:
        with self.lock:
            self.drain()
            self.waited += 1
            for capture in self.captures:
                self.refuse("a whole device is waited for while a graph is captured", capture)
            for stream in self.streams:
                if stream.device == self.device_of(device):
                    self._after(self.host(), stream.key)

    # ---- what a capture allows for

    def refuse(self, what: str, capture: Capture | None) -> None:
        """As CUDA does: the call fails, and the capture with it."""
        self.wrong.append(what)
        if capture is not None:
            capture.broken = what
        raise RuntimeError(f"CUDA error: {CAPTURING} ({what})")

    def own_capture(self) -> Capture | None:
        """The one that this thread makes."""
        return next((one for one in self.captures if one.thread == threading.get_ident()), None)

    def may_wait(self, what: str) -> None:
        if (own := self.own_capture()) is not None:
            self.refuse(f"{what} in a thread that captures", own)

    def may_allocate(self, what: str, stream: Stream | None = None) -> None:
        """More memory may be taken from the driver for it."""
        for capture in self.captures:
            own = capture.thread == threading.get_ident()
            if (own and stream is not capture.stream) or (not own and capture.mode == "global"):
                self.refuse(f"{what} while a graph is captured", capture)

    def empty_cache(self) -> None:
        with self.lock:
            if self.capturing_pools:
                what = "cached memory is given back while the allocator is at a capture"
                self.refuse(what, self.captures[0] if self.captures else None)

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, next(self._pool_numbers)

    @contextlib.contextmanager
    def graph(self, graph: CudaGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
        """As torch's: it waits for the device first, and where the capture fails its stream stays the current one."""
        self.synchronize()
        self.empty_cache()
        stream = stream or Stream()
        before = self.current_device(), self.current_stream(stream.device)
        self.set_stream(stream)
        capture = Capture(graph, stream, pool, capture_error_mode)
        with self.lock:
            graph.pool_key = self._pools.setdefault(pool, self.new_key())
            self.names[graph.pool_key] = f"the working memory of graphs {pool}"
            self.captures.append(capture)
            self.capturing_pools.append(pool)
            stream.captured_by = capture
        try:
            yield
        finally:
            with self.lock:
                capture.underway = False
                self.captures.remove(capture)
                stream.captured_by = None
                if self.ends_pools or not capture.broken:
                    self.capturing_pools.remove(pool)
            if capture.broken:
                raise RuntimeError(f"CUDA error: operation failed due to a previous error ({capture.broken})")
            self.graphs += 1
            self.set_stream(before[1])
            self._local.device = before[0]

    def end_pool(self, device: int, pool: Any) -> None:
        if pool not in self.capturing_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.capturing_pools.remove(pool)

    def release_pool(self, device: int, pool: Any) -> None:
        self.released += 1

    # ---- memory

    def drain(self) -> None:
        """What was freed since the last call may have been given out again by now: as if it were written on its
        stream, behind what its memory was kept for.
        """
        while self.freed:
            key, stream, kept_for, ident = self.freed.popleft()
            again = self.new_key()
            self.names[again] = f"whoever gets it next on {stream.name}"
            self.handler._handle_stream_creation(again)
            for earlier in (stream.key, *(one.key for one in kept_for)):
                self._after(again, earlier)
            if ident in self._threads:
                self._after(again, self._threads[ident])
            self._launch(again, set(), {key}, "memory that was freed")
            self.handler._handle_memory_deallocation(key)
            self.gone.add(key)

    def block_of(self, inner: torch.Tensor, device: torch.device) -> Block:
        """The memory of a result: that of what it is a view of, or new."""
        address = inner.untyped_storage().data_ptr()
        block = self._blocks.get(address) if address else None
        if block is None:
            stream = self.current_stream(device)
            self.may_allocate("memory outside of its pool is taken", stream)
            capture = stream.captured_by
            key = self.new_key() if capture is None else capture.graph.pool_key
            self.names.setdefault(key, f"memory {tuple(inner.shape)} made on {stream.name}")
            block = Block(self, key, stream, capture is not None)
            if address:
                self._blocks[address] = block
        return block

    def pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised pinned memory. It is given out again only once all copies of torch's from it are over."""
        self.may_allocate("pinned memory is taken")
        count = int(np.prod(shape)) * dtype.itemsize
        memory = np.empty(max(1, count), np.uint8)
        address = self.register(memory, f"pinned memory {tuple(shape)}")
        weakref.finalize(memory, self._pinned.pop, address, None)
        return torch.from_numpy(memory)[:count].view(dtype).view(tuple(shape))

    def register(self, memory: Any, name: str) -> int:
        address, key = int(memory.__array_interface__["data"][0]), self.new_key()
        self._pinned[address] = address + memory.nbytes, key
        self.names[key] = name
        return address

    def pinned_at(self, address: int) -> int | None:
        for first, (end, key) in list(self._pinned.items()):
            if first <= address < end:
                return key
        return None

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        with self.lock:
            self.may_allocate("memory is pinned")
            key = self.new_key()
            self._pinned[address] = address + nbytes, key
            self.names[key] = "memory of others that was pinned"
        return 0

    def host_unregister(self, address: int) -> int:
        with self.lock:
            self.drain()
            _, key = self._pinned.pop(address)
            self._launch(self.host(), set(), {key}, "unpinned")
        return 0

    # ---- accesses

    def access(self, stream: Stream, reads: set[int], writes: set[int], what: str) -> None:
        capture = self.begin_on(stream)
        stream.launched += 1
        if capture is None:
            self._launch(stream.key, reads, writes, what)
        else:
            capture.graph.reads |= reads
            capture.graph.writes |= writes

    def host_access(self, reads: Any, writes: Any) -> None:
        """Of arrays or tensors on the host, of which only those in pinned memory can be a device's too."""
        with self.lock:
            found = [{self.pinned_at(address_of(one)) for one in some if one.size} - {None} for some in (reads, writes)]
            if any(found):
                self.drain()
                self._launch(self.host(), found[0], found[1], "the host")  # type: ignore[arg-type]

    def _launch(self, stream: int, reads: set[int], writes: set[int], what: str) -> None:
        aliases: dict[int, list[str]] = {key: [] for key in reads | writes}
        with mock.patch.object(
            sanitizer, "traceback", SimpleNamespace(StackSummary=Where, walk_stack=lambda frame: frame)
        ):
            errors = self.handler._handle_kernel_launch(stream, reads - writes, writes, set(), what, aliases)
        for error in errors:
            sides = (error.current_access, error.previous_access)
            told = " | ".join(
                f"{self.names[one.stream]}: {one.operator} {one.type} it{one.stack_trace}" for one in sides
            )
            self.races.append(f"{self.names.get(error.data_ptr)} | {told}")

    # ---- operations

    def dispatched(self, function: Any, given: Any, named: dict[str, Any]) -> Any:
        name = function.overloadpacket.__name__
        if name == "is_pinned":
            return not isinstance(given[0], CudaTensor) and self.pinned_at(given[0].data_ptr()) is not None
        if name == "_fused_sdp_choice":
            return 0  # in operations that the CPU has too
        if of_others(function):
            with Recorded(self):
                return function.decompose(*given, **named)
        tensors = tensors_in((given, named))
        wanted = named.get("device")
        if wanted is not None and torch.device(wanted).type == "meta":
            return function(*tree_map(inner_of, given), **tree_map(inner_of, named))
        there = [one for one in tensors if isinstance(one, CudaTensor)]
        if (wanted is not None and torch.device(wanted).type == "cpu") or (not there and wanted is None):
            return self._on_host(function, name, given, named, there)
        place = self.device_of(wanted) if wanted is not None else there[0].device
        with self.lock:
            if name == "copy_":
                return self._copied(given[0], given[1], bool(named.get("non_blocking") or (given[2:] and given[2])))
            if name == "_to_copy":
                return self._sent(given[0], place, named)
            return self._on_device(function, name, given, named, tensors, place)

    def _on_host(self, function: Any, name: str, given: Any, named: dict[str, Any], there: list[CudaTensor]) -> Any:
        if there:  # only a copy leads here
            with self.lock:
                wait = not named.get("non_blocking")
                dtype = named.get("dtype") or there[0].dtype
                target = torch.empty(there[0].shape, dtype=dtype) if wait else self.pinned(there[0].shape, dtype)
                return self._copied(target, there[0], not wait)
        if named.pop("pin_memory", None):
            with self.lock:
                made = self.pinned(given[0], named.get("dtype") or torch.get_default_dtype())
            return made.zero_() if name == "zeros" else made
        if name == "_pin_memory":
            with self.lock:
                made = self.pinned(given[0].shape, given[0].dtype)
            self.host_access([host(given[0])], [host(made)])
            return made.copy_(given[0])
        reads, writes = accesses(function, given, named)
        self.host_access([host(one) for one in reads], [host(one) for one in writes])
        return function(*given, **named)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """`target.copy_(source)`, of which one is on a device at least."""
        with_device = target if isinstance(target, CudaTensor) else source
        stream = self.current_stream(with_device.device)
        reads, writes = set[int](), set[int]()
        pageable = False
        for one, keys in ((source, reads), (target, writes)):
            if isinstance(one, CudaTensor):
                keys.add(one.block.key)
            elif one.dim() and (key := self.pinned_at(one.data_ptr())) is not None:
                keys.add(key)
            else:
                pageable = one is target or one.dim() > 0
        apart = isinstance(source, CudaTensor) and isinstance(target, CudaTensor) and source.device != target.device
        if apart:  # the source's stream copies, between two events of the target's
            mine, stream = self.current_stream(target.device), self.current_stream(source.device)
            stream.wait_stream(mine)
        elif pageable or not (non_blocking or (isinstance(source, CudaTensor) and isinstance(target, CudaTensor))):
            self.may_wait("memory that is not pinned is copied")
        self.access(stream, reads, writes, "copy_")
        if apart:
            mine.wait_stream(stream)
        both_there = isinstance(source, CudaTensor) and isinstance(target, CudaTensor)
        if pageable or not (non_blocking or both_there):
            self._after(self.host(), stream.key)
        inner = [one.inner if isinstance(one, CudaTensor) else one for one in (target, source)]
        inner[0].copy_(inner[1])
        self._note(stream, aten.copy_.default, tuple(inner), {}, (inner[0],))
        return target

    def _sent(self, source: torch.Tensor, place: torch.device, named: dict[str, Any]) -> torch.Tensor:
        """`source.to(...)`, which changes format or device."""
        form = named.get("memory_format")
        inner = source.inner if isinstance(source, CudaTensor) else source
        options = {"memory_format": form} if form is not None else {}
        room = torch.empty_like(inner, dtype=named.get("dtype") or source.dtype, device="cpu", **options)
        target = CudaTensor.of(room, place, self.block_of(room, place))
        return self._copied(target, source, bool(named.get("non_blocking")))

    def _on_device(
        self, function: Any, name: str, given: Any, named: dict[str, Any], tensors: Any, place: torch.device
    ) -> Any:
        stream = self.current_stream(place)
        if any(not isinstance(one, CudaTensor) and one.dim() for one in tensors) or waits(name, tensors):
            self.may_wait(f"{name} waits for the device")
            self.wait_here(stream)
        reads, writes = accesses(function, given, named)
        keys = [{one.block.key for one in some if isinstance(one, CudaTensor)} for some in (reads, writes)]
        known = {id(one.inner): one for one in tensors if isinstance(one, CudaTensor)}
        given, named = tree_map(inner_of, given), tree_map(inner_of, named)
        named.pop("pin_memory", None)
        if "device" in named:
            named["device"] = torch.device("cpu")
        found = function(*given, **named)

        def outer(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            if (same := known.get(id(one))) is not None:
                return same
            block = self.block_of(one, place)
            if not function.is_view and name not in NOTHING:
                keys[1].add(block.key)
            return CudaTensor.of(one, place, block)

        result = tree_map(outer, found)
        if not function.is_view and name not in NOTHING:
            self.access(stream, keys[0] - keys[1], keys[1], name)
            self._note(stream, function, given, named, tensors_in(found))
        if waits(name, tensors):
            self.wait_here(stream)
        return result

    def _note(self, stream: Stream, function: Any, given: Any, named: Any, results: Any) -> None:
        if stream.captured_by is not None:
            stream.captured_by.graph.steps.append((function, given, named, results))

    # ---- around a test

    def wait_until_blocked(self, lock: Any, within_s: float) -> None:
        """Until some thread waits for this lock, which is held."""
        ends = time.monotonic() + within_s
        while not lock.waiting:
            assert time.monotonic() < ends
            time.sleep(0.001)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        with torch.utils._python_dispatch._disable_current_modes():
            yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[Cuda]:
        """All that is done within this block, in this thread and in those that begin there."""
        with contextlib.ExitStack() as stack:
            for owner, name, value in self._replaced():
                stack.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(2e-4)
            stack.enter_context(mock.patch.object(Cuda, "running", self))
            self.names[0] = "nobody"
            stack.enter_context(Recorded(self))
            yield self
            with self.lock:
                self.drain()

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        for name in ("device", "stream", "graph", "set_stream", "current_stream", "default_stream", "current_device"):
            yield torch.cuda, name, getattr(self, name)
        for name in ("synchronize", "graph_pool_handle", "empty_cache"):
            yield torch.cuda, name, getattr(self, name)
        yield from ((torch.cuda, "Stream", Stream), (torch.cuda, "Event", Event), (torch.cuda, "CUDAGraph", CudaGraph))
        yield torch.cuda, "_lazy_init", lambda: None
        yield (
            torch.__future__,
            "get_overwrite_module_params_on_conversion",
            lambda: True,
        )  # they become of another class
        yield torch.cuda, "default_generators", (torch.Generator(), torch.Generator())
        yield torch.Tensor, "backward", backward
        yield torch.cuda, "mem_get_info", lambda device=None: (1 << 30, 1 << 31)
        for name, found in (("is_available", True), ("device_count", 2), ("get_device_name", "a recorded device")):
            yield torch.cuda, name, lambda device=None, found=found: found
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            yield torch.cuda, name, lambda device=None: 0
        registry = {"cudaHostRegister": self.host_register, "cudaHostUnregister": self.host_unregister}
        yield torch.cuda, "cudart", lambda: SimpleNamespace(**registry)
        yield torch._C, "_cuda_endAllocateToPool", self.end_pool
        yield torch._C, "_cuda_releasePool", self.release_pool
        as_array = torch.Tensor.numpy
        yield torch.Tensor, "numpy", lambda tensor, **named: self._as_host_array(as_array(tensor, **named))
        lock, recursive = threading.Lock, threading.RLock
        yield threading, "Lock", lambda: Lock(self, lock())
        yield threading, "RLock", lambda: RLock(self, recursive())
        yield cuda_graphs, "_one", Lock(self, lock())
        yield queue, "SimpleQueue", SimpleQueue
        yield schedule, "SimpleQueue", SimpleQueue
        yield from self._of_threads()

    def _of_threads(self) -> Iterator[tuple[Any, str, Any]]:
        start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join

        def started(thread: Any) -> None:
            thread.begun, thread.ended = self.new_key(), self.new_key()
            self.leave(thread.begun)
            start(thread)

        def ran(thread: Any) -> None:
            with self.lock:
                self._threads.pop(threading.get_ident(), None)  # numbers come again
            self.join(thread.begun)
            try:
                with Recorded(self):
                    run(thread)
            finally:
                self.leave(thread.ended)

        def joined(thread: Any, timeout: float | None = None) -> None:
            join(thread, timeout)
            if not thread.is_alive() and hasattr(thread, "ended"):
                self.join(thread.ended)

        yield from (
            (threading.Thread, "start", started),
            (threading.Thread, "run", ran),
            (threading.Thread, "join", joined),
        )

    def _as_host_array(self, array: Any) -> Any:
        return array if self.pinned_at(address_of(array)) is None else array.view(HostArray)


class Where:
    """The lines of gpuinfer in which an access came about, in the place of a whole traceback."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    @classmethod
    def extract(cls, frame: Any, lookup_lines: bool) -> Where:
        lines: list[str] = []
        while frame is not None and len(lines) < 3:
            code = frame.f_code
            if code.co_filename.startswith(SOURCES):
                lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        return cls(lines)

    def reverse(self) -> None:
        pass

    def __str__(self) -> str:
        return f" ({' < '.join(self.lines)})" if self.lines else ""


def inner_of(one: Any) -> Any:
    return one.inner if isinstance(one, CudaTensor) else one


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def host(tensor: torch.Tensor) -> Any:
    """What `host_access` needs to know of a tensor on the host."""
    return SimpleNamespace(size=tensor.numel(), __array_interface__={"data": (tensor.data_ptr(),)})


@cache
def of_others(function: Any) -> bool:
    """Whether an operation consists of others, which in inference mode are not called in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


def waits(name: str, tensors: list[torch.Tensor]) -> bool:
    """Whether the host waits for what comes of it."""
    by_mask = name in ("index", "index_put_", "index_put") and any(one.dtype == torch.bool for one in tensors[1:])
    return name in WAITED_FOR or by_mask


def accesses(function: Any, given: Any, named: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation reads, and those that it writes, by its schema."""
    schema = function._schema
    reads, writes = list[torch.Tensor](), list[torch.Tensor]()
    if function.is_view or function.overloadpacket.__name__ in NOTHING:
        return reads, writes
    by_name = {one.name: one for one in schema.arguments}
    pairs = [*zip(schema.arguments, given, strict=False), *((by_name[name], value) for name, value in named.items())]
    shape_alone = schema.name.endswith("_like") or schema.name.startswith("aten::new_")
    for argument, value in pairs:
        info = argument.alias_info
        if info is not None and info.is_write:
            writes += tensors_in(value)
        elif info is None and not shape_alone:
            reads += tensors_in(value)
    return reads, writes
