"""The child process: what a model should take, and what some batches of it took. `python -m gpuinfer.memory.measuring`

What is asked comes on standard input, a JSON object; what is found goes out a line at a time, each more than the last:
first the estimate, then that with what was measured. So a child that ends in the middle has still told something.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.host.error_wire import error_to_wire
from gpuinfer.host.machine import memory_available
from gpuinfer.memory.fitting import largest

if TYPE_CHECKING:
    from gpuinfer.memory.parts import Parts, Subject
    from gpuinfer.models.meter import Meter

SHARE = 0.9  # of what is free: the rest of the program grows too, and so does the machine
PROBED = 1 << 30  # bytes that the batches which are tried take at the most, beside process and weights
PROBED_S = 4.0  # and seconds that one of them should take
MOST_PROBED = 1 << 20  # rows
HEAVY = 1 << 30  # bytes of weights: a model that has them is opened once, where others are for each batch
GRAIN = 32  # batches above it are tried at multiples of it
TELLING = (
    64 << 20
)  # bytes between the smallest and the largest batch from which a line through them says more than noise


def examine(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is known, each time there is more of it. Raises `UsageError` for what was asked in vain."""
    available = memory_available()  # before there is torch in this process, whose memory counts
    spec = ModelSpec(**asked["spec"])
    setup = Setup(model=spec, devices=tuple(asked["devices"]), dtype=asked["dtype"], seed=asked["seed"])
    subject, meter, device = _opened(spec, setup, asked)
    on_cpu = device.type != "cuda"
    free = asked["free"] or (available if on_cpu else meter.free())
    room = int(free * SHARE)
    meter.bound(room)
    meter.forget()
    subject.process = meter.held() if on_cpu else 0
    subject.describe()
    told = {
        "model": spec.name,
        "kind": spec.kind,
        "asked": asked["batch_size"] is not None,
        "device": str(device),
        "dtype": setup.dtype,
        "facts": dict(subject.facts()),
        "free_bytes": free,
        "room_bytes": room,
        **_estimate(subject, asked["batch_size"], room),
        "tried": [],
        "others": _others(device),
    }
    yield told
    if asked["probe"]:
        before = 0 if on_cpu else meter.held()
        slow, why = _calibrate(subject, meter, room, before)
        told |= _estimate(subject, asked["batch_size"], room)
        tried: list[dict[str, Any]] = []
        if why is None:
            tried, why = _probe(subject, meter, told, slow, before)
        yield {**told, "tried": tried, "not_tried": why, **_measured(subject, tried, room)}


def _calibrate(subject: Subject, meter: Meter, room: int, before: int) -> tuple[float | None, str | None]:
    """Take what a small batch takes beyond its estimate for what any batch does: kernels, threads, what libraries keep.

    The seconds that a row of it took, where that is worth knowing; and why there is nothing more to be tried, if so.
    """
    first = subject.parts(subject.first)
    if first.total > room:
        return None, "not even the smallest batch should fit"
    if first.weights > HEAVY:
        return None, None
    meter.forget()
    try:
        seconds = [subject.run(subject.first) for _ in range(2)]  # kernels are made for each shape
    except Exception as error:  # noqa: BLE001 (whatever a library raises when memory is refused)
        return None, _why(subject.first, error)
    subject.process += max(0, meter.peak() - before - first.total)
    return min(seconds) / subject.first, None


def _opened(spec: ModelSpec, setup: Setup, asked: Mapping[str, Any]) -> tuple[Any, Meter, Any]:
    from gpuinfer.models.device import resolve_device
    from gpuinfer.models.meter import meter_of

    device = resolve_device(setup.device)
    subject: Any
    if spec.kind == "text":
        from gpuinfer.memory.text import TextSubject

        subject = TextSubject(spec, setup, asked["options"], device, asked["context"])
    else:
        from gpuinfer.memory.rows import RowsSubject

        subject = RowsSubject(spec, setup, asked["options"], device)
    meter = meter_of(device)
    subject.warm_up()
    return subject, meter, device


def _others(device: Any) -> list[dict[str, Any]]:
    from gpuinfer.models.nvml import other_processes

    return [asdict(one) for one in other_processes(device)]


def _estimate(subject: Subject, batch: int | None, room: int) -> dict[str, Any]:
    most = largest(lambda rows: subject.parts(rows).total <= room, subject.most)
    shown = batch or max(1, min(subject.usual, most))
    return {
        "batch": _said(shown, subject.parts(shown)),
        "largest": {"batch": most, "by_estimate": most, "by_measurement": None, "bound": _bound(subject, most)},
        "estimated": _said(most, subject.parts(most)) if most else None,
    }


def _bound(subject: Subject, most: int) -> str:
    return "limit" if most == subject.most else "memory"


def _said(batch: int, parts: Parts) -> dict[str, int]:
    named = {f"{name}_bytes": size for name, size in asdict(parts).items()}
    return {"batch": batch, **named, "estimated_bytes": parts.total}


def _probe(
    subject: Subject, meter: Meter, told: Mapping[str, Any], slow: float | None, before: int
) -> tuple[list[dict[str, Any]], str | None]:
    """What some batches took, and why there are not more of them."""
    at_rest = subject.parts(1)
    sizes = _sizes(subject, told, min(told["room_bytes"], at_rest.process + at_rest.weights + PROBED))
    tried: list[dict[str, Any]] = []
    for size in _bounded(sizes, slow if told["kind"] == "rows" else None):
        meter.forget()
        try:
            seconds = subject.run(size)
        except Exception as error:  # noqa: BLE001 (whatever a library raises when memory is refused)
            return tried, _why(size, error)
        took = meter.peak() - before
        said = _said(size, subject.parts(size))
        tried.append(
            {
                **said,
                "measured_bytes": took,
                "ratio": said["estimated_bytes"] / took if took else None,
                "seconds": seconds,
            }
        )
    return tried, None


def _why(size: int, error: Exception) -> str:
    from gpuinfer.models.memory import first_line, is_out_of_memory

    said = "memory ran out" if is_out_of_memory(error) else type(error).__name__
    return f"at {size:,} rows {said}: {first_line(error)}"


def _sizes(subject: Subject, told: Mapping[str, Any], room: int) -> list[int]:
    """Three batches, the largest as large as the bound lets it be; one alone of a model that takes long to open."""
    most = largest(lambda rows: subject.parts(rows).total <= room, min(subject.most, MOST_PROBED))
    asked = told["batch"]["batch"]
    wanted = asked if subject.parts(asked).total <= room and told["asked"] else most
    top = max(1, min(wanted, most))
    if subject.parts(1).weights > HEAVY:
        return [top]
    return sorted({_even(top // 4), _even(top // 2), top})


def _even(rows: int) -> int:
    return max(1, rows if rows < GRAIN else rows // GRAIN * GRAIN)


def _bounded(sizes: list[int], slow: float | None) -> list[int]:
    """The same shape of series, shrunk until the largest takes no longer than it may."""
    if slow is None or slow * sizes[-1] <= PROBED_S:
        return sizes
    top = _even(max(1, int(PROBED_S / slow)))
    return sorted({_even(top // 4), _even(top // 2), top})


def _measured(subject: Subject, tried: list[dict[str, Any]], room: int) -> dict[str, Any]:
    """The largest batch, the estimate corrected by what was measured, and no larger than the estimate has it."""
    by_estimate = largest(lambda rows: subject.parts(rows).total <= room, subject.most)
    if not tried:
        return {}
    over = tried[-1]["measured_bytes"] / tried[-1]["estimated_bytes"]  # of the largest, which says most
    by_measurement = largest(lambda rows: subject.parts(rows).total * over <= room, subject.most)
    batch = min(by_estimate, by_measurement)
    return {
        "largest": {
            "batch": batch,
            "by_estimate": by_estimate,
            "by_measurement": by_measurement,
            "bound": _bound(subject, batch),
        },
        "estimated": _said(batch, subject.parts(batch)) if batch else None,
    }


def main() -> None:
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a model prints

    def say(told: Mapping[str, Any]) -> None:
        said.write(json.dumps(told) + "\n")
        said.flush()

    code = 0
    try:
        asked = json.loads(sys.stdin.read())
        for found in examine(asked):
            say(found)
    except GpuinferError as error:
        say({"error": error_to_wire(error)})
    except MemoryError as error:
        say({"error": error_to_wire(UsageError(f"there is no room to open the model: {error}. Free some memory."))})
    except Exception:  # noqa: BLE001 (told by its last line)
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads that a model has left behind may hang


if __name__ == "__main__":
    main()
