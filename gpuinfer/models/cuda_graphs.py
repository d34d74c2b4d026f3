"""CUDA graphs, captured one at a time, as torch allows for in a process; and a stream for each thread that computes.

During a capture no thread may wait for a whole device, which breaks the capture, or have torch's allocator give cached
memory back: `wait_for_device` and `release_cached_memory` wait for the end of the capture first.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

STREAMS = 32  # that torch has of a device: it hands the same ones out again, in turn

_one, _taking = threading.Lock(), threading.Lock()


class StreamLease:
    """An attribute of a stream that lives as long as the stream. Weak references to streams themselves crash in torch
    2.9 to 2.12 once their stream has ended (PyTorch's pull request 183403).
    """


_leases: weakref.WeakValueDictionary[int, StreamLease] = weakref.WeakValueDictionary()  # by stream number


def new_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """A stream of a CUDA device (default: the current one) that no other thread uses, as long as there are unused ones:
    what a thread launches on a stream that another thread captures would become part of that graph.
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
    """Capture what is launched within this block, on `stream` and its device, as a graph. Raises what a failed capture
    raises.

    The stream is always named: torch's own for captures is made once in a process, on the device that was current then,
    and launches on another device would not be captured.
    """
    graph = torch.cuda.CUDAGraph()
    own: BaseException | None = None
    with _one, torch.cuda.device(stream.device):
        before = torch.cuda.current_stream(stream.device)
        try:
            # Of this thread alone: other threads go on to allocate memory.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield graph
                except BaseException as error:
                    own = error
                    raise
        except RuntimeError:
            _end_pool(stream.device, pool)
            if own is not None:
                raise own from None  # ending an aborted capture raises too, with a less useful message
            raise
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current


def _end_pool(device: torch.device, pool: Any) -> None:
    """End the capture for torch's allocator too: before 2.12 a failed capture keeps it from ever giving cached memory
    back.
    """
    if torch.__version__ >= "2.12.0a0":
        return
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        if (end := getattr(torch._C, name, None)) is not None:
            with contextlib.suppress(RuntimeError):  # usually the capture has ended
                end(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)  # the graph does so only if it was captured
            return


def release_cached_memory() -> None:
    """Give free memory that torch keeps of CUDA devices back to the driver."""
    with _one:
        torch.cuda.empty_cache()


def wait_for_device(device: torch.device | None = None) -> None:
    """Wait until everything that was launched on a CUDA device (default: the current one) is done, on all streams."""
    with _one:
        torch.cuda.synchronize(device)


def event_behind(device: torch.device) -> torch.cuda.Event:
    """An event behind all that this thread has launched on a CUDA device's current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    return event


def keep_for_steps(packed: Iterable[torch.Tensor]) -> None:
    """Keep their memory until this thread's stream is done with them. Another thread packed them, to whose stream the
    allocator would give the memory at once.
    """
    for tensor in packed:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Within this block this thread launches on a stream of its own, which begins behind the default stream's work and
    is waited for at the end: two models' kernels can run at once. Does nothing on a CPU.
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
        with contextlib.suppress(RuntimeError):  # a lost device has raised before
            stream.synchronize()  # type: ignore[no-untyped-call]
