"""What is asked of a model that is trained, and what comes back: plain structures around arrays, or around tensors on
the device that computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor  # this module is imported where torch is not


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """One pass: the payload of a request to a model of kind `gradients`. Nothing in it may change until the answer.

    `weights` are parameters and buffers by their names in the model's `state_dict`; None: those that it was built with.
    Of weights with the same `version` as the last ones nothing is copied again. Where they are in the memory of the
    device that computes they are not copied at all: on a CPU float32 arrays that are contiguous and writable, on CUDA
    float32 tensors.
    """

    features: NDArray[Any]  # [rows, features] in the model's input dtype
    targets: Mapping[str, NDArray[Any]]  # for the loss, each [rows, ...]
    weights: Mapping[str, NDArray[Any] | Tensor] | None = None
    version: int = 0
    settings: Mapping[str, float] = field(default_factory=dict)  # arguments of the loss, as far as it takes them
    backward: bool = True  # False: the loss alone, of the model as it answers (no dropout)
    keep_on_device: bool = False
    """True: gradients and buffers may stay on the CUDA device that computed them, as tensors that are ready in the
    order of its default stream. A backend may answer with arrays all the same."""
    executor: Executor | None = None
    """Of a single thread, in which whoever asks computes too, such as steps of the optimizer: the pass goes there. Each
    thread that computes with torch on a CPU has a pool of threads of its own, and with two such pools the threads of
    either sleep after each operation and have to be woken for the next (GNU's OpenMP, once there are more threads than
    cores). None: a thread of the backend's."""


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What one pass came to.

    Gradients and buffers are NumPy arrays, or with `keep_on_device` tensors where the backend keeps them on its device:
    typed `Any`, so that a caller who does not ask for tensors need not tell them apart.
    """

    loss: float
    by_name: Mapping[str, Any]  # float32, of each parameter that the loss depends on; of none without `backward`
    parts: Mapping[str, float] = field(default_factory=dict)  # of the loss, as far as it tells them
    buffers: Mapping[str, Any] = field(default_factory=dict)  # as the pass left them, such as running means
    activation_bytes: int = 0  # held at most for the way back, gradients of parameters apart; 0: not known
    forward_s: float = 0.0
    backward_s: float = 0.0
    loss_name: str = ""  # policy-value, or module:loss
