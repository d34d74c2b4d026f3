"""What a node measures of itself, and reports with each exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gpuinfer.api import Progress
from gpuinfer.cluster.node_feed import NodeFeed
from gpuinfer.cluster.node_report import NodeReport, clock_share, core_use, packed
from gpuinfer.runtime.run import RunUpdate
from gpuinfer.stats import Snapshot

CLOCK_EVERY = 10  # reports between two readings of the clock of the cores


class NodeMeter:
    """Collects figures of the run and of the records that were sent, as totals since the node joined."""

    def __init__(self) -> None:
        self.clock_offset_s = 0.0
        self._update: RunUpdate | None = None
        self._progress = Progress(0, setup=True)
        self._snapshot: Snapshot | None = None  # of the update; None: as in the report before
        self._figures: list[tuple[int, Mapping[str, float]]] = []
        self._sending_s = 0.0
        self._sendings = self._records_bytes = 0
        self._through_folder = False
        self._clock_share: float | None = None
        self._reports = 0

    def look(self, update: RunUpdate) -> None:
        """The run's state now."""
        if update.progress is not self._progress:
            self._figures += update.progress.figures
        self._update, self._progress, self._snapshot = update, update.progress, update.snapshot

    def last(self, progress: Progress | None, counted: Mapping[str, Any]) -> None:
        """The workload has ended: its last progress, and what the run has counted (`Infer.counted`)."""
        self._progress = progress or self._progress
        if counted:
            self._snapshot = Snapshot.from_wire(counted)

    def sent(self, records_bytes: int, seconds: float, through_folder: bool) -> None:
        """The records of a range have reached the coordinator."""
        self._sending_s += seconds
        self._sendings += 1
        self._records_bytes += records_bytes
        self._through_folder = through_folder

    def report(self, feed: NodeFeed) -> NodeReport:
        update, progress = self._update, self._progress
        snapshot, self._snapshot = self._snapshot, None
        figures, self._figures = self._figures, []
        if self._reports % CLOCK_EVERY == 0:
            self._clock_share = clock_share()
        self._reports += 1
        idle_s = feed.idle_s
        report = NodeReport(
            snapshot=b"" if snapshot is None else packed(snapshot),
            done=feed.done_units,
            begun=progress.begun,
            counts=progress.counts,
            facts=progress.facts,
            failed=progress.failed,
            failure=progress.failure,
            figures=figures,
            setup=progress.setup,
            starved_s=feed.starved_s + feed.empty_s,
            idle_s=idle_s,
            empty_s=feed.empty_s,
            room_s=feed.room_s,
            sending_s=self._sending_s,
            sendings=self._sendings,
            records_bytes=self._records_bytes,
            through_folder=self._through_folder,
            clock_offset_s=self.clock_offset_s,
            clock_share=self._clock_share,
        )
        if update is None:
            return report
        return msgspec.structs.replace(
            report,
            phase=update.phase,
            elapsed_s=update.elapsed_s,
            setup_s=update.setup_s,
            roofline=update.roofline,
            text_roofline=update.text_roofline,
            cores=core_use(update.cores),
        )
