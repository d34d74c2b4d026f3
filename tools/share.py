"""Writes share/ for the wheel: a manual page for each command, and completion for bash, zsh and fish.

    python -m tools.share

They are made when a distribution is, and not kept in the repository. An installation has them beside its `bin`, where
man and the shells look.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuinfer import __version__
from tools import tree
from tools.tree import OURS, Command, Parameter

ROOT = Path(__file__).parent.parent
SHARE = ROOT / "share"
MAN = "man/man1"
COMPLETION = {
    "bash": "bash-completion/completions/gpuinfer",
    "zsh": "zsh/site-functions/_gpuinfer",
    "fish": "fish/vendor_completions.d/gpuinfer.fish",
}
ZSH_SOURCED = "compdef _gpuinfer_completion gpuinfer"
ZSH_LOADED = f"""if [[ $funcstack[1] == _gpuinfer ]]; then
  _gpuinfer_completion "$@"
else
  {ZSH_SOURCED}
fi"""
LIMIT_S = 60.0
EXITS = (
    ("0", "done"),
    ("1", "the work failed"),
    ("2", "bad usage or settings: nothing was started"),
    ("3", "stopped with work left, which can be resumed"),
    ("4", "a check that was asked for did not hold"),
)
SETTINGS = """A setting comes from its flag, then from the environment, then from the file, then from its default. The
variable of a setting is its name in capitals behind `GPUINFER_`, such as `GPUINFER_DEVICE`. `gpuinfer config` shows
what is in force, and where each came from."""


def man(command: Command, everything: list[Command]) -> str:
    """The page in the language of man (groff_man(7))."""
    name = "-".join(command.words)
    lines = [
        f'.TH {_roff(name.upper())} 1 "" "gpuinfer {__version__}" "gpuinfer"',
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(command.summary.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_roff(command.name)}",
        _roff(command.usage),
        ".SH DESCRIPTION",
        *_paragraphs(command.text),
        *_parameters(command, everything),
        *_subcommands(command, everything),
        ".SH EXIT STATUS",
        *(line for code, told in EXITS for line in (".TP", f".B {code}", _roff(told))),
        ".SH FILES AND ENVIRONMENT",
        ".TP",
        ".I gpuinfer.toml",
        *_paragraphs(SETTINGS)[1:],
        ".SH SEE ALSO",
        _see_also(command, everything),
        ".PP",
        "The documentation is in the program:",
        f".B gpuinfer docs {_roff(command.words[-1])}",
    ]
    return "\n".join(lines) + "\n"


def _parameters(command: Command, everything: list[Command]) -> Iterator[str]:
    told = tree.own(command, everything)
    arguments = [one for one in told if one.argument]
    if arguments:
        yield ".SH ARGUMENTS"
        for one in arguments:
            yield from _parameter(one)
    flags = [one for one in told if not one.argument]
    for panel in dict.fromkeys(one.panel for one in flags):
        yield ".SH OPTIONS" if not panel else f'.SH OPTIONS "({_roff(panel.lower())})"'
        for one in flags:
            if one.panel == panel:
                yield from _parameter(one)
    if workload := tree.workload_of(command):
        yield ".PP"
        yield f"Besides these, all options of\n.BR gpuinfer\\-{_roff(workload)} (1)."


def _parameter(one: Parameter) -> Iterator[str]:
    flags = ", ".join(f"\\fB{_roff(flag)}\\fR" for flag in one.flags)
    yield ".TP"
    yield f"{flags} \\fI{_roff(one.metavar)}\\fR" if one.metavar else flags
    yield _marked(one.text) or "\\&"
    if one.default:
        yield f"[default: {_roff(one.default)}]"


def _subcommands(command: Command, everything: list[Command]) -> Iterator[str]:
    below = [other for other in everything if other.words[:-1] == command.words]
    if below:
        yield ".SH COMMANDS"
    for other in below:
        yield ".TP"
        yield f".B {_roff(other.words[-1])}"
        yield _marked(other.summary)


def _see_also(command: Command, everything: list[Command]) -> str:
    above = [other for other in everything if other.words == command.words[:-1]]
    below = [other for other in everything if other.words[:-1] == command.words]
    near = [f".BR {_roff('-'.join(other.words))} (1)" for other in (*above, *below)]
    return ",\n".join(near) if near else ".BR gpuinfer (1)"


def _paragraphs(markdown: str) -> list[str]:
    """`.PP` and a paragraph, in turns."""
    blocks = [block for block in re.split(r"\n\s*\n", markdown.strip()) if block]
    return [line for block in blocks for line in (".PP", _marked(" ".join(block.split())))]


def _marked(markdown: str) -> str:
    """Code is bold; links are their words."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    parts = re.split(r"`([^`]*)`", text)
    return _led("".join(f"\\fB{_roff(part)}\\fR" if index % 2 else _roff(part) for index, part in enumerate(parts)))


def _roff(text: str) -> str:
    """The text as itself: nothing in it is a request, an escape or a typographer's dash."""
    return text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("…", "...")


def _led(line: str) -> str:
    return f"\\&{line}" if line.startswith((".", "'")) else line


def completion(shell: str) -> str:
    """The shell's script, as the command itself prints it: it asks the command anew at each Tab."""
    environment = {**os.environ, "_GPUINFER_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-m", OURS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return zsh_file(done.stdout) if shell == "zsh" else done.stdout


def zsh_file(script: str) -> str:
    """The script as a file that zsh loads at the first Tab, and calls by its name at each; its first line says so."""
    whole = script.strip()
    if not whole.startswith("#compdef") or not whole.endswith(ZSH_SOURCED):
        raise ValueError(f"typer writes another script for zsh than was known:\n{script}")
    return f"{whole.removesuffix(ZSH_SOURCED)}{ZSH_LOADED}\n"


def main(words: Sequence[str]) -> int:
    target = Path(words[0]) if words else SHARE
    shutil.rmtree(target, ignore_errors=True)
    everything = tree.commands()
    files = {f"{MAN}/{'-'.join(command.words)}.1": man(command, everything) for command in everything}
    files |= {path: completion(shell) for shell, path in COMPLETION.items()}
    for path, text in files.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
