"""A program that starts a server, prints its process id, and ends without closing it, in the way that it is told."""

from __future__ import annotations

import multiprocessing
import sys

from servers import pid_of, served


def start() -> None:
    server = served()
    server.start()
    print(pid_of(server), flush=True)


def main(how: str) -> None:
    if how == "child":
        child = multiprocessing.get_context("spawn").Process(target=start)
        child.start()
        child.join()
        return
    start()
    if how == "raises":
        raise ValueError("something else went wrong")


if __name__ == "__main__":
    main(sys.argv[1])
