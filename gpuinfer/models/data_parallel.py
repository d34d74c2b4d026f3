"""One model on several devices: a copy on each, which answers the batches of the device's own lanes.

There is one queue, before this, and no batch is divided: a device gets the next batch when one of its lanes is free, so
that a slow device gets fewer and nobody waits for the slowest. A device that fails is given up; the batch that it had,
and those of its lanes, go to the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpuinfer.api import Limits, ModelSpec, Roofline, Setup, lane_device, retire_lane
from gpuinfer.errors import BackendDied, DeviceLost
from gpuinfer.models.device import device_labels, of_each, resolve_devices, together
from gpuinfer.models.lost import is_lost, is_the_rows_fault
from gpuinfer.models.memory import first_line
from gpuinfer.models.open_model import ForwardTuning, Opened, open_model
from gpuinfer.models.staging import Block
from gpuinfer.stats import DeviceCount

logger = logging.getLogger("gpuinfer")


def open_on_devices(spec: ModelSpec, setup: Setup, tuning: ForwardTuning, roofline: Roofline | None = None) -> Opened:
    """`open_model` on each of `setup.devices`; with several, the answers come from whichever device a lane is of.

    `tuning.in_flight` and `threads` are of one device. Raises `UsageError` as `open_model` and `resolve_devices` do.
    """
    devices = resolve_devices(setup.devices)
    opened = [open_model(spec, of_one, tuning, roofline) for of_one in of_each(setup, devices)]
    if len(opened) == 1:
        return opened[0]
    copies = [Copy(*one) for one in zip(device_labels(devices), devices, opened, strict=True)]
    several = DataParallel(copies)
    return replace(
        opened[0],
        limits=joined([copy.opened.limits for copy in copies], copies),
        forward=several,
        device=several.device,
        write=several.write if all(copy.opened.write is not None for copy in copies) else None,
    )


def joined(limits: Sequence[Limits], copies: Sequence[Copy]) -> Limits:
    """A batch is one that each device can take. The lanes are those of all, the first of each device at the front."""
    most = max(one.in_flight for one in limits)
    lanes = [
        copy.label for turn in range(most) for copy, one in zip(copies, limits, strict=True) if turn < one.in_flight
    ]
    enough = [one.enough_rows for one in limits if one.enough_rows is not None]
    return Limits(
        min(one.max_rows for one in limits),
        len(lanes),
        enough_rows=max(enough) if enough else None,
        devices=tuple(lanes),
    )


class Copy:
    """The model on one of the devices."""

    def __init__(self, label: str, device: torch.device, opened: Opened) -> None:
        self.label, self.device, self.opened = label, device, opened
        self.count = DeviceCount()

    def run(self, blocks: Sequence[Block], compute: Callable[[Opened], Sequence[Any]]) -> Sequence[Any]:
        rows = 0
        self.count.begin()
        try:
            answers = compute(self.opened)
            rows = sum(map(len, blocks))
            return answers
        finally:
            self.count.end(rows)


class DataParallel:
    """Answers blocks as `Opened.forward` does, on the device of the calling lane; outside of lanes on the one that has
    least to do. As many threads as there are lanes may call it.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._lock = threading.Lock()

    def __call__(self, blocks: Sequence[Block]) -> list[Any]:
        """Raises what the model raises; `DeviceLost` for a batch that has cost two devices, or one by its own fault;
        `BackendDied` when all are gone.
        """
        return list(self._run(blocks, lambda opened: opened.forward(blocks)))

    def write(self, blocks: Sequence[Block], targets: Sequence[Sequence[Block]]) -> Sequence[bool]:
        """As `Opened.write`, of devices that all have it. Raises as `__call__` does."""

        def compute(opened: Opened) -> Sequence[bool]:
            assert opened.write is not None
            return opened.write(blocks, targets)

        return self._run(blocks, compute)

    def _run(self, blocks: Sequence[Block], compute: Callable[[Opened], Sequence[Any]]) -> Sequence[Any]:
        copy = self._of_lane() or self._other()
        for last in (False, True):
            try:
                return copy.run(blocks, compute)
            except Exception as error:
                if not is_lost(error, copy.device):
                    raise
                self._lose(copy, error)
                other = self._other()
                if last or is_the_rows_fault(error):
                    raise DeviceLost(
                        f"this batch took device {copy.label} along ({first_line(error)}), and is not tried on a "
                        "further one. Look at its rows, and at the model."
                    ) from error
                copy = other
        raise AssertionError("the second try has returned or raised")

    def _of_lane(self) -> Copy | None:
        label = lane_device()
        own = next((copy for copy in self._copies if copy.label == label), None)
        if own is not None and own.count.failed:
            self._retire()
            return None
        return own

    def _other(self) -> Copy:
        """Of the devices that work, the one that has least to do. Raises `BackendDied`."""
        alive = [copy for copy in self._copies if not copy.count.failed]
        if not alive:
            told = "; ".join(f"{copy.label}: {copy.count.failed}" for copy in self._copies)
            raise BackendDied(f"all devices have failed ({told}). Start again; `gpuinfer doctor` tells what is there.")
        return min(alive, key=lambda copy: copy.count.running / copy.opened.limits.in_flight)

    def _lose(self, copy: Copy, error: Exception) -> None:
        """Say so once, and let the lane go; of the last device it stays, to tell those who still ask."""
        with self._lock:
            first, copy.count.failed = not copy.count.failed, copy.count.failed or first_line(error)
        if first:
            logger.error(
                "device %s failed (%s): its batches go to the others. Start again to have it back.",
                copy.label,
                first_line(error),
            )
        self._retire()

    def _retire(self) -> None:
        with self._lock:
            if any(not copy.count.failed for copy in self._copies):
                retire_lane()

    def device(self) -> Mapping[str, Any]:
        """What `Backend.device` tells: all together, and under `devices` each by itself."""
        told = [copy.opened.device() for copy in self._copies]
        shared = {key: told[0][key] for key in ("computes_in", "threads", "in_force") if key in told[0]}
        own = [
            {key: value for key, value in one.items() if key not in shared} | copy.count.told()
            for copy, one in zip(self._copies, told, strict=True)
        ]
        labels = [copy.label for copy in self._copies]
        return {**together(told), **shared, "devices": dict(zip(labels, own, strict=True))}
