"""What a command that failed says."""

from __future__ import annotations

import subprocess


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a command that failed: the last words on standard error, in a sentence, without a traceback."""
    assert "Traceback" not in done.stderr, done.stderr
    assert "not foreseen" not in done.stderr, done.stderr
    assert "gpuinfer: " in done.stderr, (done.returncode, done.stdout, done.stderr)
    message = "gpuinfer: " + done.stderr.rsplit("gpuinfer: ", 1)[1].strip()
    assert message.endswith("."), message
    assert message.count("\n") < 3, message
    return message
