"""The compiled search for one game: `search.py`, executed with that game's rules, in a disk cache of its own.

Numba caches a function by the file it stands in and trusts that file's date alone. Two games would share one entry, and
a change in a game's rules would go unnoticed; so each game has a folder named by a digest of all the source involved.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np

from gpuinfer.errors import UsageError
from gpuinfer.host import error_text
from gpuinfer.models import kernel_cache
from gpuinfer.models.kernel_cache import compiled_once
from gpuinfer.workloads.selfplay.game import is_own_module

FUNCTIONS = ("deal", "to_move", "legal", "apply", "returns", "observe", "determinize")
FROZEN = (bool, int, float, str, tuple, np.generic)
SEARCH = Path(__file__).with_name("search.py")


def load_search(rules_name: str) -> ModuleType:
    """The search for the rules module of that name; compiled when first called, then read from the disk.

    Raises UsageError when the module lacks one of the functions.
    """
    rules = rules_of(rules_name)
    name = f"gpuinfer_search_{hashlib.sha256(rules_name.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, SEARCH)
    if spec is None or spec.loader is None:
        raise UsageError(f"{SEARCH} cannot be read. Reinstall gpuinfer.")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["rules"] = rules
    sys.modules[name] = module  # where Numba looks for the globals of cached code
    folder = search_cache_folder(rules)
    with kernel_cache.caching_in(folder):
        spec.loader.exec_module(module)
    for function in (module.play, module.play_out):
        compiled_once(function, folder)
    return module


def rules_of(name: str) -> ModuleType:
    """The module of compiled rules. Raises UsageError when there is none, or when it lacks one of the functions."""
    try:
        rules = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"a game's rules cannot be imported: {error_text.safe_str(error)}. Let `rules` name their module."
        ) from error
    for function in FUNCTIONS:
        if not hasattr(getattr(rules, function, None), "py_func"):
            raise UsageError(
                f"{name} has no compiled function '{function}'. Decorate it with "
                "gpuinfer.workloads.selfplay.bits.compiled."
            )
    return rules


def search_cache_folder(rules: ModuleType) -> Path:
    """A folder named by all that the compiled code is made from; a temporary one if need be."""
    files, constants = reached(rules)
    files |= {str(SEARCH.with_name(name)) for name in ("search.py", "arrays.py", "bits.py", "puct.py")}
    parts = [rules.__name__.encode(), *(Path(file).read_bytes() for file in sorted(files)), *sorted(constants)]
    return kernel_cache.cache_folder(parts)


def reached(rules: ModuleType, *, ours: bool = True) -> tuple[set[str], set[bytes]]:
    """The files, by their paths, of all compiled functions that the rules reach, and the constants that Numba freezes
    into them; without `ours` none of this package's own functions.
    """
    files: set[str] = set()
    constants: set[bytes] = set()
    pending: list[FunctionType] = [getattr(rules, name).py_func for name in FUNCTIONS]
    seen: set[FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in seen or (not ours and is_own_module(function.__module__)):
            continue
        seen.add(function)
        files.add(function.__code__.co_filename)
        used = inspect.getclosurevars(function)
        for name, value in {**used.globals, **used.nonlocals}.items():
            if isinstance(value, ModuleType):
                file = getattr(value, "__file__", None) or ""
                if file.endswith(".py") and (ours or not is_own_module(value.__name__)):
                    files.add(file)
                for one in function.__code__.co_names:  # what the function may mean by `module.name`
                    if (inner := getattr(getattr(value, one, None), "py_func", None)) is not None:
                        pending.append(inner)
            elif hasattr(value, "py_func"):
                pending.append(value.py_func)
            elif isinstance(value, (*FROZEN, np.ndarray)):
                constants.add(name.encode() + (value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()))
    return files, constants
