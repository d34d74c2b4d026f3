"""How many stages, of which layers, and how many rows at once: from what the user says and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.host import machine
from gpuinfer.models.device import MEGABYTE, device_name
from gpuinfer.models.forward import CHUNK_ROWS, DETERMINISTIC_CHUNK_ROWS
from gpuinfer.models.forward_cuda import DETERMINISTIC_CHUNK_ROWS as CUDA_DETERMINISTIC_CHUNK_ROWS
from gpuinfer.models.load import called
from gpuinfer.models.memory import is_out_of_memory
from gpuinfer.models.open_model import CPU_ENOUGH_ROWS, ForwardTuning, cores_of
from gpuinfer.models.stages.options import CutOptions, StageOptions
from gpuinfer.models.stages.splitting import Split, at_points, least_largest
from gpuinfer.models.stages.timing import seconds_of

CPU_STAGES = 2  # the fewest that are a pipeline: each more makes them harder to keep alike
CUDA_ROWS = 8192  # of a micro-batch: enough to fill a large device
ROOM_SHARE = 0.8  # of a device's free memory for weights; the rest is for what is computed with them


class StageTuning(ForwardTuning, StageOptions, Protocol):
    """How the user wants it cut."""


def places_of(tuning: CutOptions, devices: Sequence[torch.device], layers: int, name: str) -> list[torch.device]:
    """The device of each stage: neighbours share one where there are fewer devices. Raises as `count_for` does."""
    count = count_for(tuning, devices, layers, name)
    return [devices[number * len(devices) // count] for number in range(count)]


def count_for(tuning: CutOptions, devices: Sequence[torch.device], layers: int, name: str) -> int:
    """How many stages. Raises `UsageError` where there are too few layers, or too few devices to say."""
    on_cpu = devices[0].type == "cpu"
    if tuning.split_points is not None:
        count = len(tuning.split_points) + 1
        if tuning.split_points and tuning.split_points[-1] >= layers:
            raise UsageError(
                f"split_points={','.join(map(str, tuning.split_points))}: {called(name)} has {layers} layers, 0 to "
                f"{layers - 1}, and a stage begins at each of the points. Name points from 1 to {layers - 1}."
            )
    elif tuning.stages != "auto":
        count = tuning.stages
    elif len(devices) > 1:
        count = len(devices)
    elif on_cpu:
        count = CPU_STAGES
    else:
        raise UsageError(
            f"parallel={tuning.parallel} puts layers on several devices, and there is one, {devices[0]}. Name several, "
            "--device cuda:0,cuda:1; or say how many stages share it, -B stages=2."
        )
    if count > layers:
        raise UsageError(
            f"{count} stages, and {called(name)} has {layers} layer{'s' if layers > 1 else ''}: a stage needs one at "
            f"least. {f'Use -B stages={layers}, or fewer.' if layers > 1 else 'Use -B parallel=data.'}"
        )
    if count < len(devices):
        raise UsageError(
            f"{len(devices)} devices and {count} stage{'s' if count > 1 else ''}: some would have nothing to do. Name "
            f"as many devices as stages, or ask for more: -B stages={len(devices)}."
        )
    return count


def rows_for(setup: Setup, tuning: StageTuning, on_cpu: bool) -> int:
    """The most rows of a micro-batch. Where answers must not depend on company it is what one device computes at once,
    so that they are the same bits as that one's.
    """
    if rows := tuning.micro_batch_rows or tuning.chunk_rows:
        return rows
    if setup.deterministic:
        return DETERMINISTIC_CHUNK_ROWS if on_cpu else CUDA_DETERMINISTIC_CHUNK_ROWS
    if on_cpu:
        return CHUNK_ROWS if tuning.parallel == "layers" else CPU_ENOUGH_ROWS
    return CUDA_ROWS


def times_on(
    places: Sequence[torch.device],
    segments: Sequence[nn.Module],
    features: Tensor,
    setup: Setup,
    tuning: StageTuning,
) -> list[list[float]]:
    """Seconds of each layer at each stage's place; the places of one name are measured once."""
    threads = tuning.threads or (1 if setup.deterministic else max(1, cores_of(setup) // len(places)))
    found: dict[str, list[float]] = {}
    for place in dict.fromkeys(places):
        if (name := device_name(place)) not in found:
            found[name] = as_many_as_fit(segments, features, place, threads)
    return [found[device_name(place)] for place in places]


def as_many_as_fit(segments: Sequence[nn.Module], features: Tensor, place: torch.device, threads: int) -> list[float]:
    """`seconds_of`, with half of the rows where memory does not suffice, and half of those."""
    while True:
        try:
            return seconds_of(segments, features, place, threads)
        except (RuntimeError, MemoryError) as error:
            if len(features) < 2 or not is_out_of_memory(error):
                raise
        features = features[: len(features) // 2]


def split_for(
    tuning: CutOptions,
    places: Sequence[torch.device],
    sizes: Sequence[int],
    times: Sequence[Sequence[float]],
    name: str,
) -> Split:
    """Which layers, of `sizes` bytes, are whose. Raises `UsageError` where the devices have no room for them."""
    if tuning.split_points is not None:
        return at_points(tuning.split_points, len(sizes))
    room = [room_on(place, places) for place in places]
    found = least_largest(times, sizes, room)
    if found is None:
        free = ", ".join(f"{place} {most / MEGABYTE:,.0f} MB" for place, most in zip(places, room, strict=True))
        raise UsageError(
            f"{called(name)} has {sum(sizes) / MEGABYTE:,.0f} MB of weights, {max(sizes) / MEGABYTE:,.0f} MB in its "
            f"largest layer, and the stages have room for {free}. Use more devices, or --dtype bfloat16."
        )
    return found


def fits_one(places: Sequence[torch.device], whole: int) -> bool:
    """Whether each of the devices has room for the whole model, of so many bytes, before any of it is there."""
    return all(room_on(place, [place]) >= whole for place in dict.fromkeys(places))


def bytes_of(module: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def room_on(place: torch.device, places: Sequence[torch.device]) -> float:
    """Bytes for the weights of one stage there."""
    free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else machine.memory_available()
    return ROOM_SHARE * free / sum(place == other for other in places)
