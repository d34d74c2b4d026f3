"""Whether each plugin can be loaded, tried in a process of its own: an import may end it, or never come back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from gpuinfer.config import registry
from gpuinfer.config.registry import PluginRecord
from gpuinfer.host import children

LIMIT_S = 90.0  # for all of them: torch's first import from a cold disk


def inspect_all(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """The records with `ok` known, in their order. One that takes the process with it harms no other."""
    left = [record for record in records if record.ok is None]
    known: dict[PluginRecord, PluginRecord] = {}
    while left:
        answers, why = _ask(left)
        known |= {
            record: replace(record, ok=ok, reason=reason) for record, (ok, reason) in zip(left, answers, strict=False)
        }
        left = left[len(answers) :]
        if left:  # the process ended at the first of these
            known[left[0]] = replace(left[0], ok=False, reason=why)
            left = left[1:]
    return [known.get(record, record) for record in records]


def _ask(records: Sequence[PluginRecord]) -> tuple[list[tuple[bool, str]], str]:
    """The child's answers, those of the first records, and why there are not more."""
    order = json.dumps([asdict(record) for record in records]).encode()
    program = [sys.executable, "-m", "gpuinfer.cli.plugin_probe"]
    done = children.run_program(program, LIMIT_S, order, children.with_our_path())
    why = f"importing it ended the process (exit code {done.code})"
    if done.code is None:
        why = f"importing it did not end within {LIMIT_S:g} s"
    return [tuple(json.loads(line)) for line in done.out.split(b"\n")[:-1]], why  # the last is not whole


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a plugin prints
    for fields in json.loads(sys.stdin.read()):
        record = registry.inspect(PluginRecord(**fields))
        channel.write(json.dumps([record.ok, record.reason]) + "\n")
        channel.flush()
    os._exit(0)  # threads that an import has left behind may hang


if __name__ == "__main__":
    main()
