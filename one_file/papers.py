"""What is inside, and on what terms: a bill of materials (CycloneDX) and the texts of the licences.

Packages of Python tell both themselves. Of libraries of the system the package manager is asked; Python has its licence
among its files.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

BILL = "gpuinfer.cdx.json"
LICENCES = "gpuinfer.licences.txt"
RULE = "=" * 100


@dataclass(frozen=True)
class Part:
    """Something inside that is no package of Python. `url`: as package-url.org has it."""

    name: str
    version: str
    url: str
    terms: str


def write(program: Path, libraries: Iterable[Path], version: str, folders: Sequence[Path]) -> None:
    """Both papers into each folder."""
    parts = [_python(), *_of_system(libraries)]
    texts = {BILL: json.dumps(_bill(program, parts, version), indent=1), LICENCES: _terms(program, parts)}
    for folder in folders:
        for name, text in texts.items():
            (folder / name).write_text(text)


def _python() -> Part:
    version = platform.python_version()
    terms = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    if not terms.exists():  # Debian keeps it with the package
        terms = Path(f"/usr/share/doc/python{version.rpartition('.')[0]}/copyright")
    return Part("CPython", version, f"pkg:generic/cpython@{version}", terms.read_text(errors="replace"))


def _of_system(libraries: Iterable[Path]) -> list[Part]:
    """The Debian packages that these files are of. Raises `SystemExit` for one that is of none."""
    names = {_package(library) for library in libraries}
    found = []
    for name in sorted(names):
        words = ["dpkg-query", "--show", "--showformat=${Version} ${Architecture}", name]
        version, kind = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        plain = name.partition(":")[0]
        terms = Path("/usr/share/doc", plain, "copyright").read_text(errors="replace")
        found.append(Part(plain, version, f"pkg:deb/debian/{plain}@{version}?arch={kind}", terms))
    return found


def _package(library: Path) -> str:
    places = [str(library), str(library).removeprefix("/usr")]  # one folder, and packages know it by either name
    for place in places:
        said = subprocess.run(["dpkg-query", "--search", place], capture_output=True, text=True).stdout
        if said:
            return said.partition(": ")[0].partition(", ")[0]
    raise SystemExit(f"{library} is of no Debian package: its licence is not known. Build on Debian, or leave it out.")


def _bill(program: Path, parts: Iterable[Part], version: str) -> dict[str, Any]:
    words = [_tool("cyclonedx-py"), "environment", "--output-reproducible", "--spec-version", "1.6", program]
    bill: dict[str, Any] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    ours = {part["name"]: part for part in bill["components"]}.get("gpuinfer")
    if ours is not None:
        bill["components"].remove(ours)
    bill["metadata"]["component"] = {
        "type": "application",
        "bom-ref": (ours or {}).get("bom-ref", "gpuinfer"),
        "name": "gpuinfer",
        "version": version,
        "purl": f"pkg:pypi/gpuinfer@{version}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    for part in parts:
        bill["components"].append(
            {"type": "library", "bom-ref": part.url, "name": part.name, "version": part.version, "purl": part.url}
        )
        bill.setdefault("dependencies", []).append({"ref": part.url})
    text = json.dumps(bill)
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"the bill of materials is not valid: {wrong}")
    return bill


def _terms(program: Path, parts: Iterable[Part]) -> str:
    words = [_tool("pip-licenses"), "--python", program, "--with-system", "--with-urls", "--from=mixed"]
    table = _said([*words, "--format=plain", "--order=name"])
    texts = _said([*words, "--format=plain-vertical", "--with-license-file", "--no-license-path", "--with-notice-file"])
    others = [f"{part.name} {part.version}\n\n{part.terms}" for part in parts]
    begin = "gpuinfer carries these, each on its own terms, whose texts follow.\n"
    names = "\n".join(f"{part.name} {part.version}" for part in parts)
    return f"\n{RULE}\n".join([begin, table, names, texts, *others])


def _said(words: Sequence[str | Path]) -> str:
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return re.sub(r"[ \t]+$", "", said, flags=re.MULTILINE)


def _tool(name: str) -> Path:
    return Path(sys.prefix, "bin", name)
