"""Plans stages: how many, which layers, how many rows at once, from the user's options and each layer's measured time.

The split minimises the largest stage: a chain of layers over a chain of processors, by dynamic programming over the
number of layers that the first stages have (Bokhari, "Partitioning Problems in Parallel, Pipelined, and Distributed
Computing", IEEE Transactions on Computers 37:1, 1988).
"""

from __future__ import annotations

import copy
import difflib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.host import machine
from gpuinfer.models.cuda_graphs import wait_for_device
from gpuinfer.models.device import MEGABYTE, device_name, resolve_device
from gpuinfer.models.forward_cpu import CHUNK_ROWS, DETERMINISTIC_CHUNK_ROWS
from gpuinfer.models.forward_cuda import DETERMINISTIC_CHUNK_ROWS as CUDA_DETERMINISTIC_CHUNK_ROWS
from gpuinfer.models.load import title
from gpuinfer.models.model_options import CutOptions, StageOptions, stage_shares
from gpuinfer.models.open_model import CPU_ENOUGH_ROWS, ForwardTuning, cores_of
from gpuinfer.models.out_of_memory import is_out_of_memory
from gpuinfer.models.pipeline.stage import mapped, settle_on

Split = list[tuple[int, int]]
"""For each stage its first layer, and the one after its last."""


Best = tuple[tuple[float, float], list[int]]
"""The largest stage and the sum of squares, and where each stage begins."""


def least_largest(
    seconds: Sequence[Sequence[float]], sizes: Sequence[float] = (), room: Sequence[float] = ()
) -> Split | None:
    """The split of layers into `len(seconds)` stages, none of them empty, whose largest stage takes least time.

    `seconds[stage][layer]` is what a layer takes where that stage would run, ≥ 0; of layers of `sizes[layer]` bytes a
    stage holds no more than `room[stage]`. Of splits that are as good, the one whose stages are most alike (least sum
    of squares). None where nothing fits; raises `ValueError` for fewer layers than stages.
    """
    stages, layers = len(seconds), len(seconds[0])
    if stages > layers:
        raise ValueError(f"{layers} layers make no {stages} stages")
    taken = [[0.0, *accumulate(of_stage)] for of_stage in seconds]
    held = [0.0, *accumulate(sizes or [0.0] * layers)]
    most = room or [math.inf] * stages
    none: Best = ((math.inf, math.inf), [])
    best = [((0.0, 0.0), list[int]()), *[none] * layers]  # of the first so many layers, on the stages so far
    for stage in range(stages):
        following = [none] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(stage, end):
                (largest, squares), starts = best[start]
                if held[end] - held[start] > most[stage] or largest == math.inf:
                    continue
                own = taken[stage][end] - taken[stage][start]
                found = (max(largest, own), squares + own * own)
                if found < following[end][0]:
                    following[end] = (found, [*starts, start])
        best = following
    cost, starts = best[layers]
    return None if cost == none[0] else list(pairwise([*starts, layers]))


def cores_by_stage(cores: int, seconds: Sequence[float]) -> list[int]:
    """Cores for stages that take so long: an equal number each, at least one, the rest to the slowest."""
    each, left = divmod(cores, len(seconds))
    if not each:
        return [1] * len(seconds)
    slowest = sorted(range(len(seconds)), key=lambda stage: -seconds[stage])[:left]
    return [each + (stage in slowest) for stage in range(len(seconds))]


BUDGET_S = 0.4  # for all layers together, beside the first pass
LEAST, MOST = 3, 30  # passes
Found = TypeVar("Found")


def segment_seconds(
    segments: Sequence[nn.Module], features: torch.Tensor, place: torch.device, threads: int
) -> list[float]:
    """Seconds of each segment at `place`: the least of several passes, since other programs only ever add time.

    A segment is on the device only while it computes: the device need not have room for all of them. Raises what a
    segment raises.
    """

    def wait() -> None:
        if place.type == "cuda":
            wait_for_device(place)

    def measure() -> list[list[float]]:
        found: list[list[float]] = []
        started = time.perf_counter()
        with torch.inference_mode():
            while len(found) <= LEAST or (len(found) <= MOST and time.perf_counter() - started <= BUDGET_S):
                value, seconds = mapped(features, lambda tensor: tensor.to(place, copy=True)), list[float]()
                for segment in segments:
                    there = segment if place.type == "cpu" else copy.deepcopy(segment).to(place)
                    wait()
                    before = time.perf_counter()
                    value = there(value)
                    wait()
                    seconds.append(time.perf_counter() - before)
                found.append(seconds)
        return found

    found = in_thread(measure, threads)
    return [min(of_one) for of_one in zip(*found[1:], strict=True)]  # the first pass lays weights out


def in_thread(measure: Callable[[], Found], threads: int) -> Found:
    """Run `measure` in a thread that computes with so many threads, as a stage does. Raises what it raises."""

    def measured() -> Found:
        settle_on(threads, None)
        return measure()

    with ThreadPoolExecutor(1, thread_name_prefix="gpuinfer-layers") as thread:  # threads are a thread's own
        return thread.submit(measured).result()


CPU_STAGES = 2  # the fewest that are a pipeline: each more makes them harder to keep alike
CUDA_ROWS = 8192  # of a micro-batch: enough to fill a large device
ROOM_SHARE = 0.8  # of a device's free memory for weights; the rest is for what is computed with them


class RowsStageTuning(ForwardTuning, StageOptions, Protocol):
    """The user's options for stages."""


LayerPaths = Sequence[Sequence[str]]
"""For each layer of a model the dotted paths that mean it."""
SHOWN = 8  # names in a message


def starts_of(tuning: CutOptions, layers: LayerPaths, name: str) -> tuple[int, ...] | None:
    """The layer at which each stage but the first begins; None: by measured time. Raises `UsageError` for a layer that
    is not there, points that do not ascend, and shares of the layers that are not all of them.
    """
    shares = stage_shares(tuning.stages)
    if shares is not None:
        ends = list(accumulate(share.layers for share in shares))
        if ends[-1] != len(layers):
            raise UsageError(
                f"stages={tuning.stages} puts {ends[-1]:,} layers on devices, and {title(name)} has {len(layers)}. "
                f"Share out just these {len(layers)}."
            )
        return tuple(ends[:-1])
    if tuning.split_points is None:
        return None
    starts = tuple(one if isinstance(one, int) else _layer_named(one, layers, name) for one in tuning.split_points)
    listed = ",".join(map(str, tuning.split_points))
    for point, start in zip(tuning.split_points, starts, strict=True):
        if not start and point != start and len(layers) > 1:  # by its name
            second = layers[1][0] if layers[1] else 1
            raise UsageError(
                f"split_points={listed}: '{point}' of {title(name)} is layer 0, where the first stage begins anyway. "
                f"Leave it out, and name a later one, such as {second}."
            )
    if any(not 0 < start < len(layers) for start in starts):
        raise UsageError(
            f"split_points={listed}: {title(name)} has {len(layers)} layers, 0 to {len(layers) - 1}, the first stage "
            f"begins at 0, and another at each of the points. Name points from 1 to {len(layers) - 1}."
        )
    if list(starts) != sorted(set(starts)):
        raise UsageError(
            f"split_points={listed} are the layers {', '.join(map(str, starts))} of {title(name)}, which do not "
            "ascend. Name the layers at which stages begin in their order."
        )
    return starts


def _layer_named(wanted: str, layers: LayerPaths, name: str) -> int:
    """The number of the layer that this dotted path means. Raises `UsageError` with the nearest names."""
    known = {path: number for number, paths in reversed([*enumerate(layers)]) for path in paths}
    if wanted in known:
        return known[wanted]
    single = [path for path in known if not any(other.startswith(f"{path}.") for other in known)]  # no holder of layers
    if (within := next((path for path in single if wanted.startswith(f"{path}.")), None)) is not None:
        raise UsageError(
            f"split_points: '{wanted}' of {title(name)} is inside layer {known[within]}, '{within}', and a stage "
            f"begins with a whole layer. Name '{within}'."
        )
    names = [paths[0] for paths in layers if paths]
    if not names:
        raise UsageError(
            f"split_points: no layer of {title(name)} is called '{wanted}', and its layers have no names. Give their "
            f"numbers, 1 to {len(layers) - 1}."
        )
    near = difflib.get_close_matches(wanted, list(known), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(one) for one in near)}?" if near else ""
    some = names if len(names) <= SHOWN else [*names[: SHOWN - 2], "…", names[-1]]
    raise UsageError(
        f"split_points: no layer of {title(name)} is called '{wanted}'.{hint} Its {len(layers)} layers: "
        f"{', '.join(some)}."
    )


def places_of(tuning: CutOptions, devices: Sequence[torch.device], layers: LayerPaths, name: str) -> list[torch.device]:
    """The device of each stage: the one that `stages` names; else neighbouring stages share a device where there are
    fewer devices. Raises as `count_for` does.
    """
    count, shares = count_for(tuning, devices, layers, name), stage_shares(tuning.stages)
    if shares is not None:
        return [resolve_device(share.device) for share in shares]
    return [devices[number * len(devices) // count] for number in range(count)]


def count_for(tuning: CutOptions, devices: Sequence[torch.device], paths: LayerPaths, name: str) -> int:
    """The number of stages. Raises as `starts_of` does, for too few layers, and where one device needs a number to be
    named.
    """
    on_cpu, layers, starts = devices[0].type == "cpu", len(paths), starts_of(tuning, paths, name)
    if starts is not None:
        count = len(starts) + 1
    elif isinstance(tuning.stages, int):
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
            f"{count} stages, and {title(name)} has {layers} layer{'s' if layers > 1 else ''}: a stage needs one at "
            f"least. {f'Use -B stages={layers}, or fewer.' if layers > 1 else 'Use -B parallel=data.'}"
        )
    if count < len(devices):
        raise UsageError(
            f"{len(devices)} devices and {count} stage{'s' if count > 1 else ''}: some would have nothing to do. Name "
            f"as many devices as stages, or ask for more: -B stages={len(devices)}."
        )
    return count


def rows_for(setup: Setup, tuning: RowsStageTuning, on_cpu: bool) -> int:
    """The most rows of a micro-batch. With `deterministic` as many as one device computes at once, so that answers have
    the same bits.
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
    setup: Setup,
    threads: int | None,
    measure: Callable[[torch.device, int], list[float]],
) -> list[list[float]]:
    """Seconds of each layer at each stage's device, by `measure(device, threads)`.

    Devices of the same name are measured once. `threads`: of each stage; None: its share of the cores.
    """
    each = threads or max(1, cores_of(setup) // len(places))
    by_name = {device_name(place): place for place in places}
    found = {name: measure(place, each) for name, place in by_name.items()}
    return [found[device_name(place)] for place in places]


def as_many_as_fit(segments: Sequence[nn.Module], features: Tensor, place: torch.device, threads: int) -> list[float]:
    """`seconds_of`, halving the rows until memory suffices."""
    while True:
        try:
            return segment_seconds(segments, features, place, threads)
        except (RuntimeError, MemoryError) as error:
            if len(features) < 2 or not is_out_of_memory(error):
                raise
        features = features[: len(features) // 2]


def split_for(
    starts: Sequence[int] | None,
    places: Sequence[torch.device],
    sizes: Sequence[int],
    times: Sequence[Sequence[float]],
    name: str,
) -> Split:
    """The layers, of `sizes` bytes, of each stage; `starts`: as `starts_of` says. Raises `UsageError` where the devices
    have too little memory.
    """
    if starts is not None:
        return list(pairwise([0, *starts, len(sizes)]))
    room = [room_on(place, places) for place in places]
    found = least_largest(times, sizes, room)
    if found is None:
        free = ", ".join(f"{place} {most / MEGABYTE:,.0f} MB" for place, most in zip(places, room, strict=True))
        raise UsageError(
            f"{title(name)} has {sum(sizes) / MEGABYTE:,.0f} MB of weights, {max(sizes) / MEGABYTE:,.0f} MB in its "
            f"largest layer, and the stages have room for {free}. Use more devices, or --dtype bfloat16."
        )
    return found


def fits_one(places: Sequence[torch.device], whole: int) -> bool:
    """Whether each of the devices has room for the whole model of so many bytes, before any of it is loaded."""
    return all(room_on(place, [place]) >= whole for place in dict.fromkeys(places))


def module_bytes(module: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def room_on(place: torch.device, places: Sequence[torch.device]) -> float:
    """Bytes that one stage's weights may take on a device."""
    free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else machine.memory_available()
    return ROOM_SHARE * free / sum(place == other for other in places)
