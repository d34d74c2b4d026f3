"""Small wheels, written as they are laid out (PEP 427): nothing is built for them."""

from __future__ import annotations

import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

BACKEND = '''
    """A backend for tests."""
    from gpuinfer.api import Backend, Limits
    class Good(Backend):
        """Answers each row with itself."""
        limits = Limits(64)
        async def infer(self, batch):
            return [request.payload for request in batch]
'''
NEVER = "raise SystemExit('imported')"


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    points: Mapping[str, Mapping[str, str]] | None = None,
    requires: Sequence[str] = (),
    modules: Mapping[str, str] | None = None,
) -> Path:
    """A wheel of pure Python in `folder`: `points` are entry points by group, `modules` sources by name."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {f"{module}.py": textwrap.dedent(source) for module, source in (modules or {}).items()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Made.\n{needs}"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = "\n".join(
        f"[{group}]\n" + "".join(f"{key} = {target}\n" for key, target in each.items())
        for group, each in (points or {}).items()
    )
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    path = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in files.items():
            wheel.writestr(place, text)
    return path


def plugin_wheel(folder: Path, name: str, version: str = "1.0", *, backend: str, **more: object) -> Path:
    """With one backend of this name."""
    module = name.replace("-", "_")
    said = {"requires": ["gpuinfer>=0.1"], "modules": {module: BACKEND}, **more}
    return make_wheel(folder, name, version, points={"gpuinfer.backends": {backend: f"{module}:Good"}}, **said)  # type: ignore[arg-type]
