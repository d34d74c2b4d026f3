"""uv, told what pip has been told: which index, which folders of packages, which certificates.

    .venv/bin/python tools/uv.py pip install -e .
    .venv/bin/python tools/uv.py --as-it-is pip compile pyproject.toml      without pip's settings

It is for the environment of the Python that runs it, which needs pip and nothing else. uv lies in a folder of its own
there, so that nothing in the environment takes it for its own. Where it cannot be had, pip installs, which takes longer
(docs/decisions/setting-up.md).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

VERSION = "uv>=0.9.8,<1"
HERE = Path(sys.prefix, "uv")
PROGRAM = HERE / "bin/uv"
SECTIONS = ("global", "install", ":env:")
"""Of pip's settings, those that count for an installation: a later one goes over an earlier one."""
MEANING = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "proxy": ("ALL_PROXY", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
"""The variable of uv that means the same, and what stands between several values of it."""


def settings(listed: str) -> dict[str, str]:
    """Variables for uv, from what `pip config list` prints."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in found and key in MEANING:
            found[section][key] = str(ast.literal_eval(value))
    told: dict[str, str] = {}
    for section in SECTIONS:
        for key, value in found[section].items():
            variable, between = MEANING[key]
            told[variable] = between.join(value.split())
    if "UV_INDEX" in told:
        told["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # the best version of any index, as pip does
    return told


def have() -> bool:
    """Fetch uv if need be; whether it is there."""
    if not PROGRAM.exists():
        words = ["install", "--quiet", "--no-compile", "--no-deps", "--target", str(HERE), VERSION]
        subprocess.run([*pip(), *words], check=False)
    return PROGRAM.exists()


def pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def environment(said: Mapping[str, str]) -> dict[str, str]:
    """For uv, given that of this process: what it says of uv itself goes over what it says of pip."""
    done = subprocess.run([*pip(), "config", "list"], capture_output=True, text=True, check=False)
    aimed = {"VIRTUAL_ENV": sys.prefix, "UV_NO_PROGRESS": "1"}
    return {**settings(done.stdout), **aimed, **{name: text for name, text in said.items() if name not in aimed}}


def with_pip(words: list[str]) -> list[str]:
    """The same for pip, or `SystemExit` where pip has no such thing."""
    if words[:2] != ["pip", "install"]:
        raise SystemExit(f"`uv {' '.join(words[:2])}` needs uv, and pip could not install it: it says why above.")
    left = words[2:]
    for flag in ("-c", "--constraint"):
        if flag in left:  # pip wants a hash of each package then, and a folder has none
            at = left.index(flag)
            del left[at : at + 2]
    return [*pip(), "install", "--no-compile", *left]


def main(words: list[str]) -> int:
    alone = words[:1] == ["--as-it-is"]
    words = words[1:] if alone else words
    if not have():
        print("uv cannot be had here, so pip installs: that takes a minute longer.", file=sys.stderr)
        return subprocess.run(with_pip(words), check=False).returncode
    given = {**os.environ, "UV_NO_PROGRESS": "1"} if alone else environment(os.environ)
    return subprocess.run([PROGRAM, *words], env=given, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
