"""A program that stands for a replica where launchers are tried: it listens, writes its ready file, leaves on SIGTERM.

`sham.py [--fail WORDS | --stubborn] --ready-file FILE … --host HOST`; other flags mean nothing to it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


def flag(name: str) -> str | None:
    """The last one counts, as on our own command line."""
    places = [place for place, word in enumerate(sys.argv) if word == name]
    return sys.argv[places[-1] + 1] if places else None


def main() -> None:
    if words := flag("--fail"):
        raise SystemExit(words)
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("settings", [name for name in os.environ if name.startswith("GPUINFER_")])
    print("the sham replica is up, with devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    with socket.create_server((flag("--host") or "127.0.0.1", 0)) as server:
        host, port = server.getsockname()[:2]
        ready = Path(flag("--ready-file") or "")
        draft = ready.with_suffix(".draft")
        draft.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}))
        draft.rename(ready)
        if "--leave-with-parent" in sys.argv:
            sys.stdin.buffer.read()  # until whoever started it is gone
        else:
            time.sleep(600)


if __name__ == "__main__":
    main()
