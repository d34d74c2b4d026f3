"""CUDA graphs, captured one after the other: torch allows for one capture at a time in a process.

Nor may any thread wait for a whole device meanwhile, which breaks a capture in another one, or have torch's allocator
give cached memory back: `wait_for_device` and `release_cached_memory` wait for the capture first.

A stream for each thread that computes with a model of its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version

STREAMS = 32  # that torch has of a device: it hands the same ones out again, in turn

_one, _taking = threading.Lock(), threading.Lock()


class StreamLease:
    """An attribute of a stream, which lives as long as that: weak references to streams themselves are left behind
    when these end, in torch 2.9 to 2.12, and whoever comes upon one crashes (PyTorch's pull request 183403).
    """


_leases: weakref.WeakValueDictionary[int, StreamLease] = weakref.WeakValueDictionary()  # by the stream's number


def new_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """One of a CUDA device, the current one by default, that nobody else has, as long as there are any: what a thread
    launches on a stream that another one captures would become part of that graph.
    """
    with _taking:
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in _leases:
                break
        lease = _leases[stream.cuda_stream] = StreamLease()
        stream.__dict__["lease"] = lease
    return stream


@contextlib.contextmanager
def captured(stream: torch.cuda.Stream, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph that what is launched within this block becomes, on `stream` and its device.

    The stream is named in each case: torch's own for captures is made once in a process, on whatever device was current
    then, and what another device computes meanwhile is not captured. Raises what a capture raises that fails.
    """
    graph = torch.cuda.CUDAGraph()
    own: BaseException | None = None
    with _one, torch.cuda.device(stream.device):
        before = torch.cuda.current_stream(stream.device)
        try:
            # Of this thread alone: others go on to take memory for theirs.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield graph
                except BaseException as error:
                    own = error
                    raise
        except RuntimeError:
            _end_pool(stream.device, pool)
            if own is not None:
                raise own from None  # the end of a capture that was broken off raises too, and says less
            raise
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own in force


def _end_pool(device: torch.device, pool: Any) -> None:
    """Before 2.12 torch leaves its allocator at a capture whose end has failed: no cached memory could be given back
    from then on.
    """
    if Version(torch.__version__).release >= (2, 12):
        return
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        if (end := getattr(torch._C, name, None)) is not None:
            with contextlib.suppress(RuntimeError):  # it has ended, which is the usual case
                end(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)  # the graph does so only if it was captured
            return


def release_cached_memory() -> None:
    """Give free memory that torch keeps of CUDA devices back to the driver."""
    with _one:
        torch.cuda.empty_cache()


def wait_for_device(device: torch.device | None = None) -> None:
    """Until all that has been launched on a CUDA device, the current one by default, is done, on whatever stream."""
    with _one:
        torch.cuda.synchronize(device)


def event_behind(device: torch.device) -> torch.cuda.Event:
    """An event behind all that this thread has launched on a CUDA device's current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    return event


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What this thread launches on a CUDA device within this block has a stream of its own, behind what is on the
    default stream now, and is done at its end: two models' kernels can run at once. Nothing changes on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    stream = new_stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
    finally:
        with contextlib.suppress(RuntimeError):  # a device that is lost has said so before
            stream.synchronize()  # type: ignore[no-untyped-call]
