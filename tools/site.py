"""Builds the site of docs/ into build/site.

    python -m tools.site

Pages go by way of build/pages, where what the site's generator reads otherwise than GitHub does is put right: the name
of a file behind a block's language, a folder's README, links to files beside docs/, bars in tables. The order of the
navigation is that of `gpuinfer docs`.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomlkit

from gpuinfer.cli.manual import manual_pages
from gpuinfer.cli.manual.manual_pages import FENCE, FOLDER, HOME, ManualPage, pages

ROOT = Path(__file__).parent.parent
DOCS, STAGED, SITE = ROOT / "docs", ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)]*)?\)")
CODE = re.compile(r"`[^`]+`")
NAMED = re.compile(r"^(\s*```+)(\w+) (\S+)$")
CONFIGURATION = "zensical.toml"  # paths in it count from where it lies
ZENSICAL = Path(sys.executable).with_name("zensical")
STYLE = Path(__file__).with_suffix(".css")
LIMIT_S = 120
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def stage() -> None:
    """build/pages, made anew."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for file in sorted(DOCS.rglob("*")):
        place = STAGED / file.relative_to(DOCS)
        if file.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            place.with_name(_renamed(file.name)).write_text(_staged(file), encoding="utf-8")
        else:
            shutil.copyfile(file, place)
    shutil.copyfile(STYLE, STAGED / STYLE.name)


def _staged(file: Path) -> str:
    fenced, lines = False, []
    for line in file.read_text(encoding="utf-8").splitlines():
        if FENCE.match(line):
            fenced = not fenced
            line = NAMED.sub(r'\1{.\2 title="\3"}', line) if fenced else line
        lines.append(line if fenced else LINK.sub(lambda link: _link(link, file), _cells(line)))
    return "\n".join(lines) + "\n"


def _cells(line: str) -> str:
    """In a row of a table a bar inside code is a bar: GitHub wants it escaped, the generator shows what escapes it."""
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.lstrip().startswith("|") else line


def _link(link: re.Match[str], file: Path) -> str:
    """A link to a README or its folder leads to the index; one that leads out of docs/ to a copy in build/pages."""
    path, anchor = link[1], link[2] or ""
    target = (file.parent / path).resolve()
    if target.is_dir():
        path = posixpath.join(path, f"{HOME}.md")
    elif target.is_file() and not target.is_relative_to(DOCS):
        copy = STAGED / "files" / _flat(target)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, copy)
        return f"]({posixpath.relpath(copy, (STAGED / file.relative_to(DOCS)).parent)}{anchor})"
    return f"]({posixpath.join(posixpath.dirname(path), _renamed(posixpath.basename(path)))}{anchor})"


def _flat(file: Path) -> str:
    """One name for a file beside docs/: `plugins-gpuinfer-echo-README.md.txt`, which is no page of the site."""
    name = "-".join(file.relative_to(ROOT).parts)
    return f"{name}.txt" if file.suffix == ".md" else name


def _renamed(name: str) -> str:
    return f"{HOME}.md" if name == f"{FOLDER}.md" else name


def navigation() -> list[dict[str, Any]]:
    """Title → path, or title → list of these."""
    known = pages()
    found: list[dict[str, Any]] = [{"Home": f"{HOME}.md"}]
    for group in manual_pages.groups(known):
        inside: list[dict[str, Any]] = []
        folders: dict[str, list[dict[str, Any]]] = {}
        for page in group.pages:
            entry = {page.title: _path(page, known)}
            folder = page.name.rpartition("/")[0]
            if folder in folders:
                folders[folder].append(entry)
            elif f"/{HOME}.md" in entry[page.title]:  # a folder's own page: those of its folder stand below it
                folders[page.name] = [entry]
                inside.append({page.title: folders[page.name]})
            else:
                inside.append(entry)
        found.append({group.title: inside})
    return found


def _path(page: ManualPage, known: dict[str, ManualPage]) -> str:
    is_folder = any(name.startswith(f"{page.name}/") for name in known)
    return f"{page.name}/{HOME}.md" if is_folder else f"{page.name}.md"


def configuration() -> dict[str, Any]:
    """As Zensical reads it. No fonts, icons or scripts of another host: what the pages need lies beside them."""
    palette = [
        {"media": f"(prefers-color-scheme: {scheme})", "scheme": name, "toggle": {"icon": icon, "name": to}}
        for scheme, name, icon, to in (
            ("light", "default", "lucide/sun", "Switch to dark"),
            ("dark", "slate", "lucide/moon", "Switch to light"),
        )
    ]
    return {
        "project": {
            "site_name": "gpuinfer",
            "site_description": "A great many model answers from the accelerators you have",
            "docs_dir": str(STAGED.relative_to(ROOT)),
            "site_dir": str(SITE.relative_to(ROOT)),
            "use_directory_urls": False,  # pages that can be opened from a disk
            "nav": navigation(),
            "theme": {
                "font": False,
                "language": "en",
                "features": [
                    "content.code.copy",
                    "navigation.footer",
                    "navigation.indexes",
                    "navigation.path",
                    "navigation.sections",
                    "navigation.top",
                    "search.highlight",
                    "toc.follow",
                ],
                "palette": palette,
            },
            "extra": {"generator": False},
            "extra_css": [STYLE.name],
            "plugins": {"search": {}},  # `offline` would have a script of another host
            "markdown_extensions": {
                "attr_list": {},
                "sane_lists": {},
                "tables": {},
                "toc": {"permalink": True},
                "pymdownx.highlight": {"pygments_lang_class": True},
                "pymdownx.superfences": {},
            },
        }
    }


def build() -> int:
    """The generator's exit code. It names each page, line and link that leads nowhere, and ends with 1."""
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    file = ROOT / CONFIGURATION
    file.write_text(tomlkit.dumps(configuration()), encoding="utf-8")
    try:
        command = [ZENSICAL, "build", "--clean", "--strict", "--config-file", CONFIGURATION]
        done = subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    finally:
        file.unlink()
    said = COLOURS.sub("", done.stdout + done.stderr.partition("Traceback (most recent")[0])
    if done.returncode:
        print(
            f"{said}\nThe pages above are those of build/pages, made from docs/: mend the links there.", file=sys.stderr
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(build())
