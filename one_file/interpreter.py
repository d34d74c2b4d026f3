"""The Python that runs this, copied so that it runs wherever it is put: in `bin/` and `lib/` of one folder.

Python finds its library from where its program lies. What it was told at its own build (paths of its shared libraries)
is replaced by paths relative to each file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
PROGRAM = f"bin/{VERSION}"
LIBRARY = f"lib/{VERSION}"

# Tests, other faces, and modules whose libraries are under the GPL (readline, gdbm) or that nothing here needs. The
# folder of Python's own build brings a static library of 40 MB.
LEFT_OUT = (
    "config-*",
    "ctypes/test",
    "dist-packages",
    "distutils/tests",
    "EXTERNALLY-MANAGED",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "lib-dynload/_crypt.*",
    "lib-dynload/_ctypes_test.*",
    "lib-dynload/_dbm.*",
    "lib-dynload/_gdbm.*",
    "lib-dynload/_test*",
    "lib-dynload/_tkinter.*",
    "lib-dynload/_xx*",
    "lib-dynload/nis.*",
    "lib-dynload/ossaudiodev.*",
    "lib-dynload/readline.*",
    "lib-dynload/xx*",
    "pydoc_data",
    "site-packages",
    "sitecustomize.py",
    "sqlite3/test",
    "test",
    "tkinter",
    "turtledemo",
    "unittest/test",
)


def copy(tree: Path) -> Path:
    """Put the interpreter and its library into `tree`; the interpreter there."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, tree / LIBRARY, symlinks=True, ignore=_left_out(stdlib))
    extensions = Path(sysconfig.get_config_var("DESTSHARED"))
    if not (tree / LIBRARY / "lib-dynload").exists():
        shutil.copytree(extensions, tree / LIBRARY / "lib-dynload", ignore=_left_out(extensions.parent))
    for link in [path for path in (tree / LIBRARY).rglob("*") if path.is_symlink()]:
        link.unlink()  # to where it was
    program = tree / PROGRAM
    program.parent.mkdir()
    shutil.copy2(Path(sys._base_executable).resolve(), program)  # type: ignore[attr-defined]
    shared = sysconfig.get_config_var("INSTSONAME")
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        shutil.copy2(Path(sysconfig.get_config_var("LIBDIR")) / shared, tree / "lib" / shared)
    for file in (program, *(tree / "lib").glob("libpython*"), *(tree / LIBRARY / "lib-dynload").glob("*.so")):
        subprocess.run(["strip", "--strip-unneeded", file], check=True)
    return program


def _left_out(root: Path):
    def ignored(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(root)
        return {
            name
            for name in names
            if name == "__pycache__"
            or any((inside / name).match(pattern) and _top(inside / name, pattern) for pattern in LEFT_OUT)
        }

    return ignored


def _top(path: Path, pattern: str) -> bool:
    """`Path.match` compares from the right: a pattern stands for a path from the top."""
    return len(path.parts) == len(Path(pattern).parts)
