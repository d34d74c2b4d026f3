"""`python -m gpuinfer`, and the `gpuinfer` command.

A worker process runs its parent's main script again, up to what is under `if __name__ == "__main__"`. The command's
script imports this module alone, so that a worker does not load the command line.
"""

import os
import signal
import sys

STOPPED = 3  # the exit code of a command that was ended before its work was


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(STOPPED))  # at once; `own` has one that tidies up
    try:
        from gpuinfer.host import signals

        signals.own()
        _run()
    except KeyboardInterrupt:  # while the command line was loaded, or even that
        os._exit(STOPPED)
    except SystemExit as ending:
        signals.soon(ending.code if isinstance(ending.code, int) else 1)
        raise


def _run() -> None:
    from gpuinfer.host import installation, process

    process.collect_seldom()
    process.open_standard_files()
    process.accept_any_character()
    if problem := installation.add_plugin_folder():  # before anything looks for plugins
        print(f"gpuinfer: {problem}", file=sys.stderr)
    from gpuinfer.cli import main as command

    command()


if __name__ == "__main__":
    main()
