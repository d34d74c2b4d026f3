"""Our command line as a child process that ends with the process that started it: `python -m
gpuinfer.lab.loop.loop_child selfplay …`. Worker processes of the command run this file again up to its last lines,
so it imports nothing of the command line.
"""

from __future__ import annotations


def main() -> None:
    from gpuinfer.__main__ import main as command
    from gpuinfer.host import children

    children.end_with_parent()
    command()


if __name__ == "__main__":
    main()
