"""The bare model, measured once for all runs that ask the same of it."""

from __future__ import annotations

import logging

from gpuinfer.api import Roofline
from gpuinfer.errors import WorkError
from gpuinfer.measuring import has_roofline, roofline_of
from gpuinfer.run import Plan

log = logging.getLogger(__name__)


class Rooflines:
    """One for each model, device and number format. Switched off, it measures nothing."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._known: dict[str, Roofline | None] = {}

    def missing(self, plan: Plan) -> bool:
        """Whether asking for this plan's would have to measure."""
        return self._wanted and has_roofline(plan.backend) and _key(plan) not in self._known

    def of(self, plan: Plan) -> Roofline | bool:
        """What `run` takes: the roofline, or False where there is none. Raises `UsageError` for an impossible model."""
        if self.missing(plan):
            try:
                self._known[_key(plan)] = roofline_of(plan.backend)
            except WorkError as error:
                log.warning("the roofline could not be measured, and the runs go on without it: %s", error)
                self._known[_key(plan)] = None
        return self._known.get(_key(plan)) or False


def _key(plan: Plan) -> str:
    """Models hold mappings, which cannot be keys; what they print can. The seed only draws the weights."""
    setup, compute = plan.backend.setup, getattr(plan.backend.options, "compute", "auto")
    return repr((setup.model, setup.device, setup.dtype, setup.deterministic, compute))
