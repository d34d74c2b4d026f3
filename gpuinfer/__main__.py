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
    from gpuinfer.host import pauses, plugin_folder, standard_files

    pauses.collect_seldom()
    standard_files.keep_open()
    standard_files.take_any_character()
    if problem := plugin_folder.see_plugins():  # before anything looks for plugins
        print(f"gpuinfer: {problem}", file=sys.stderr)
    from gpuinfer.cli import main as command

    command()


if __name__ == "__main__":
    main()
