"""The child process: what a model should take, and what some batches of it took.

It answers its one request with several findings, each with more than the last: first the estimate, then what was
measured, so that a child that dies in the middle has still reported something.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.host import children, error_text
from gpuinfer.host.child import Channel
from gpuinfer.host.machine import memory_available
from gpuinfer.models.model_options import with_stage_devices
from gpuinfer.units import memory

if TYPE_CHECKING:
    import torch

    from gpuinfer.lab.memory.batch_trials import MemorySubject


def examine_memory(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The document, again after each measurement. Raises `UsageError` for a request that cannot be met."""
    available = memory_available()  # before there is torch in this process, whose memory counts
    from gpuinfer.lab.memory.batch_trials import MemoryExamination
    from gpuinfer.lab.memory.training_memory import TrainingSubject
    from gpuinfer.models.device import resolve_devices
    from gpuinfer.models.footprint import memory_meter_of

    spec = ModelSpec(**request["spec"])
    setup = Setup(model=spec, devices=tuple(request["devices"]), dtype=request["dtype"], seed=request["seed"])
    setup = with_stage_devices(setup, request["options"].get("stages", "auto"))
    devices = resolve_devices(setup.devices)
    together = devices[0].type == "cpu"  # all copies, or stages, in one memory
    pages = request["options"].get("pages") or sys.maxsize  # each row that is there at once has one at least
    batches = sorted({min(batch, pages) for batch in request["batch_size"] or []})
    examinations, settings = list[MemoryExamination](), list[Mapping[str, Any]]()
    facts: dict[str, Any] = {}
    for device, copies, subject in _subjects(spec, setup, request, devices):
        meter = memory_meter_of(device)
        subject.warm_up()
        free = request["free"] or (available if together else meter.free())
        examinations.append(MemoryExamination(subject, meter, device, copies, free, batches))
        subject.describe()
        facts |= subject.facts()
        settings.append(subject.setting() if isinstance(subject, TrainingSubject) else {})
    answered: dict[str, Any] = {
        "model": spec.name,
        "kind": spec.kind,
        "dtype": setup.dtype,
        "asked": batches[-1] if batches else None,
        "facts": facts,
        "devices": [{**one.estimated(), **own} for one, own in zip(examinations, settings, strict=True)],
    }
    yield answered
    for place, one in enumerate(examinations if request["probe"] else []):
        answered["devices"][place] = {**one.measured(), **settings[place]}
        yield answered


def _subjects(
    spec: ModelSpec, setup: Setup, request: Mapping[str, Any], devices: Sequence[torch.device]
) -> Iterator[tuple[torch.device, int, MemorySubject]]:
    """For each memory its device, how many copies lie there, and the model, whole or those of its stages."""
    from gpuinfer.lab.memory.batch_trials import StagesHere
    from gpuinfer.lab.memory.rows_memory import RowsSubject, StagedRows
    from gpuinfer.lab.memory.text_memory import StagedText, TextSubject
    from gpuinfer.models.device import setups_of

    if request.get("training"):
        yield from _training_subjects(spec, setup, request["options"])
        return
    each = list(dict.fromkeys(devices))  # of stand-ins on the CPU one
    if request["options"].get("parallel", "data") != "data":
        staged: StagedRows | StagedText
        if spec.kind == "text":
            staged = StagedText(spec, setup, request["options"], devices, request["context"], request["probe"])
        else:
            staged = StagedRows(spec, setup, request["options"], devices)
        for device in each:
            yield device, 1, StagesHere(staged, str(device))
        return
    for device, own in zip(each, setups_of(setup, devices), strict=False):
        copies = len(devices) if device.type == "cpu" else 1
        if spec.kind == "text":
            yield device, copies, TextSubject(spec, own, request["options"], device, copies, request["context"])
        else:
            yield device, copies, RowsSubject(spec, own, request["options"], device, copies)


def _training_subjects(
    spec: ModelSpec, setup: Setup, options: Mapping[str, Any]
) -> Iterator[tuple[torch.device, int, MemorySubject]]:
    """A model that is trained, once with all activations kept and once with those of segments of its layers, where
    these can be distinguished.
    """
    from gpuinfer.lab.memory.training_memory import TrainingSubject
    from gpuinfer.models.device import resolve_device

    if options.get("parallel", "data") != "data":
        raise UsageError(
            f"--training: a model is whole where it is trained, and parallel={options['parallel']} cuts it. Leave -B "
            "parallel out."
        )
    device, wanted = resolve_device(setup.device), options.get("checkpoint_segments")
    divided, why = TrainingSubject(spec, setup, options, device, wanted or "auto"), ""
    try:
        divided.describe()
    except UsageError as error:
        if wanted is not None:
            raise
        why = str(error)
    yield device, 1, TrainingSubject(spec, setup, options, device, not_divided=why)
    if not why:
        yield device, 1, divided


def no_room(error: Exception, request: Mapping[str, Any]) -> UsageError | None:
    """What to say where memory ran out before anything was known; None where it did not."""
    from gpuinfer.models.out_of_memory import is_out_of_memory

    if not is_out_of_memory(error):
        return None
    more, cure = "is free", "Free some memory"
    if request.get("free"):
        more, cure = f"the {memory(request['free'])} of --free", "Give a larger one"
    return UsageError(f"there is no room to open the model: even to look at it takes more than {more}. {cure}.")


def answer_probe(end: socket.socket) -> None:
    """The child's main function: findings, then `failed` with why there are no more, or an `error` of ours."""
    children.set_up_child()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # whatever a model prints; the last message says what is wrong
    os.environ["OMP_WAIT_POLICY"] = "passive"  # what counts is memory, not time; read when torch is loaded
    channel = Channel(end)
    request, answered = channel.receive(), False
    try:
        for found in examine_memory(request):
            channel.send(found)
            answered = True
        channel.send({"failed": ""})
    except GpuinferError as error:
        channel.send({"error": error_text.error_to_wire(error)})
    except Exception as error:  # noqa: BLE001  the parent must hear of it
        refused = None if answered else no_room(error, request)
        failed = {"failed": error_text.full_message(error).strip().splitlines()[-1]}
        channel.send({"error": error_text.error_to_wire(refused)} if refused is not None else failed)
    channel.poll(60.0)  # until the parent ends this process: threads that a model has left behind may hang
