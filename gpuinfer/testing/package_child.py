"""The process in which a package's plugins are checked: what they break, they break there.

Reads an order from standard input, and writes what happens as lines of JSON to standard output: {plugin},
{begin, limit_s}, {finding}, {used}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from gpuinfer.config import registry
from gpuinfer.testing.findings import Examination
from gpuinfer.testing.packages import CheckOrder, check_plugin


def main() -> None:
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a plugin prints
    order: Mapping[str, Any] = json.loads(sys.stdin.read())
    with tempfile.TemporaryDirectory(prefix="gpuinfer-check-") as folder:
        os.chdir(folder)  # for what a workload writes
        _examine(order, events)
        os.chdir("/")
    events.flush()
    os._exit(0)  # threads that were left behind may hang


def _examine(order: Mapping[str, Any], events: TextIO) -> None:
    turn = threading.Lock()

    def send(**event: Any) -> None:
        with turn:
            events.write(json.dumps(event) + "\n")
            events.flush()

    def examiner(suffix: str) -> Examination:
        return Examination(
            order["each_s"],
            lambda name, limit_s: send(begin=f"{name}{suffix}", limit_s=limit_s),
            lambda finding: send(finding={**asdict(finding), "name": f"{finding.name}{suffix}"}),
        )

    for kind, name in order["plugins"]:
        send(plugin=[kind, name])
        offered = (one for one in registry.listing(kind) if one.name == name)
        record = registry.PluginRecord(kind, name, "", "", name) if ":" in name else next(offered)
        used = check_plugin(record, CheckOrder(order["given"], order["model"], examiner))
        send(used=sorted(used))


if __name__ == "__main__":
    main()
