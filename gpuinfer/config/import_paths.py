"""`module:function` as people name code of their own: whether its module is there, before anything is imported."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.host import error_text


def in_working_folder() -> None:
    """Modules in the working folder count, as they do for `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def refuse_absent_module(name: str, what: str = "model") -> None:
    """Raises `UsageError` for `module:function` of a module that is not there. No more than the packages above it are
    imported; what those raise is reported where the module itself is wanted.
    """
    module = name.partition(":")[0]
    in_working_folder()
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError as error:
        found = not is_of(module, error)
    except Exception:  # noqa: BLE001  a package may raise anything
        return
    if not found:
        raise absent(name, module, what)


def load_named(kind: str, name: str, form: str) -> Any:
    """What `name`, of this form, such as module:Class, means; modules in the working folder count. Raises `UsageError`
    that calls it `kind`.
    """
    module, _, attribute = name.partition(":")
    in_working_folder()
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{kind} '{name}': {error_text.safe_str(error)}. Name it as {form}, where the module can be imported."
        ) from error
    except Exception as error:
        raise UsageError(
            f"{kind} '{name}': importing '{module}' raised {error_text.full_message(error)}. "
            f"`python -c 'import {module}'` shows where."
        ) from error


def import_path_of(factory: Any) -> str:
    """`module:function` of what another process is to find by that name. Raises `UsageError` for what has none."""
    name = getattr(factory, "__qualname__", None)
    if not isinstance(name, str):
        kind = type(factory)
        if isinstance(factory, functools.partial):
            raise UsageError("model is a functools.partial, which has no name. Give its function, and arguments={…}.")
        raise UsageError(
            f"model is an object of {kind.__name__}, and the server makes its own in its own process. Give what makes "
            f"it: {kind.__name__} or a function; its weights as a file (weights=…, by safetensors.torch.save_file)."
        )
    if "<" in name:
        what = "a lambda" if name.endswith("<lambda>") else f"'{name.rpartition('.')[2]}', made inside of a function"
        raise UsageError(f"model is {what}, which no other process can import. Define a function at a module's top.")
    if factory.__module__ not in sys.modules:
        raise UsageError(f"'{name}' says that it is of a module '{factory.__module__}', which is not imported.")
    return f"{factory.__module__}:{name}"


def refuse_without_file(name: str) -> None:
    """Raises `UsageError` for `__main__:function` of a notebook, a prompt or standard input."""
    module, _, function = name.partition(":")
    if module == "__main__" and not os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or ""):
        raise UsageError(
            f"'{function}' is defined in a notebook or a program without a file (standard input, python -c), which the "
            f"server's process cannot import. Write it into a file, such as model.py, and give 'model:{function}'."
        )


def classes_in(file: Path, base: str) -> list[str]:
    """The classes that a file of Python derives from one whose name ends so; none of what is no such file."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [one.name for one in classes if any(ast.unparse(over).endswith(base) for over in one.bases)]


def is_of(module: str, error: ModuleNotFoundError) -> bool:
    """Whether it is this module that is not there, or a package above it."""
    return error.name is not None and (module == error.name or module.startswith(error.name + "."))


def absent(name: str, module: str | None, what: str) -> UsageError:
    """`what` is made or computed by it, in the words of an error. A path of a file is answered with its module."""
    path, _, function = name.partition(":")
    if path.endswith(".py"):
        folder, file = os.path.split(os.path.normpath(path.removesuffix(".py")))
        dotted = file if os.path.isabs(path) else os.path.join(folder, file).replace(os.sep, ".")
        start = f", started in {folder}" if os.path.isabs(path) else ""
        return UsageError(
            f"{what} '{name}': '{path}' is a file, and a module's name is wanted. Write '{dotted}:{function}'{start}."
        )
    return UsageError(
        f"{what} '{name}': no module named '{module}' in {os.getcwd()} or among the installed packages. "
        "Start gpuinfer where that module lies, or set PYTHONPATH."
    )
