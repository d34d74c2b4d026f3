"""What a decoder asks of a CUDA device, counted on fake tensors: kernels launched, copies from the host."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from gpuinfer.text.decoder import torch_batch, torch_static, triton_layers
from gpuinfer.text.decoder.triton_layers import TritonLayers
from gpuinfer.text.sampling.triton_draws import TritonDraws

NAMES = ("attend", "attend_shared", "join", "norm", "place", "activate")
# What returns memory or another view of it, and launches nothing.
NO_KERNELS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "is_pinned",
    "_reshape_alias",
    "lift_fresh",
}


class Asked(TorchDispatchMode):
    """Counts `kernels` by name, `copies` from the host to the device, and `reads`, copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.copies, self.reads = Counter[str](), 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        composite = "CompositeImplicitAutograd"
        if function.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), composite):
            with self:  # in inference mode it comes whole
                return function.decompose(*given, **(named or {}))
        found = function(*given, **(named or {}))
        name, tensors = function.overloadpacket.__name__, [one for one in given if isinstance(one, torch.Tensor)]
        on_device = isinstance(found, torch.Tensor) and found.device.type == "cuda"
        if name in ("copy_", "_to_copy") and on_device and tensors[-1].device.type == "cpu":
            self.copies += 1
        elif name in ("copy_", "_to_copy") and not on_device and tensors[-1].device.type == "cuda":
            self.reads += 1
        elif not function.is_view and name not in NO_KERNELS and (on_device or isinstance(found, (tuple, list))):
            self.kernels[name] += 1
        return found


@contextmanager
def own_kernels(asked: Asked | None = None) -> Iterator[None]:
    """Decoders made with `kernels=True` launch theirs into nothing; `asked` counts them."""

    def launch(layers: TritonLayers, kernel: str, grid: Any, *given: Any, **sizes: Any) -> None:
        assert all(one.device.type == "cuda" for one in given if isinstance(one, torch.Tensor)), kernel
        assert all(one.is_contiguous() for one in given if isinstance(one, torch.Tensor)), kernel
        if asked is not None:
            asked.kernels[kernel] += 1

    module = SimpleNamespace(**{name: name for name in NAMES})
    with (
        mock.patch.dict(sys.modules, {"gpuinfer.text.decoder.triton_kernels": module}),
        mock.patch.object(TritonLayers, "_launch", launch),
        mock.patch.object(triton_layers, "compare", return_value=None),
        mock.patch.object(torch.cuda, "device_of", nullcontext),
    ):
        yield


class CountedDraws(TritonDraws):
    """Launches its kernels into nothing, and counts them."""

    def __init__(self) -> None:
        self._kernels = SimpleNamespace(weigh="weigh", pick="pick")
        self.launched = Counter[str]()

    def _launch(self, kernel: str, grid: Any, *given: Any, **sizes: Any) -> None:
        assert all(one.device.type == "cuda" for one in given if isinstance(one, torch.Tensor)), kernel
        self.launched[kernel] += 1


class CountedDownloads:
    """`of` stands in for `torch_path.Download`: what comes to the host is ones. `count`: how often it waits."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, values: torch.Tensor) -> Any:
        assert values.device.type == "cuda"
        return SimpleNamespace(values=partial(self._waited, values.shape, values.dtype))

    def _waited(self, shape: torch.Size, dtype: torch.dtype) -> Any:
        self.count += 1
        with unset_fake_temporarily():
            return torch.ones(shape, dtype=dtype).numpy()


class Replays(torch_static.Replays):
    """Without graphs, which fake tensors have none of."""

    def __init__(self, device: torch.device, wanted: bool) -> None:
        super().__init__(torch.device("cpu"), wanted)


@contextmanager
def real_host_memory() -> Iterator[None]:
    """What the host writes has values, and no step becomes a graph."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    given: Callable[..., Any] = torch_batch.host_memory

    def real(count: int, device: torch.device) -> Any:
        with unset_fake_temporarily():
            return given(count, torch.device("cpu"))

    with mock.patch.object(torch_batch, "host_memory", real), mock.patch.object(torch_static, "Replays", Replays):
        yield
