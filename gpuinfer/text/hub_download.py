"""Fetches a model of the Hugging Face hub into the local cache, through huggingface_hub: only the files that its model
needs, with its progress bars. What is there already is not fetched again.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Collection
from typing import Any

from gpuinfer.errors import GpuinferError, UsageError, WorkError
from gpuinfer.host.error_text import short_message
from gpuinfer.host.extras import require_extra
from gpuinfer.text.hub_cache import HubModel, cached_model, hub_folder, hub_model_of, needed_files, snapshot_of
from gpuinfer.units import memory

ASK_S = 30.0  # for the list of files
WEIGHTS = (".safetensors", ".bin", ".gguf")
TRUE = ("1", "ON", "YES", "TRUE")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger(__name__)


def download_model(name: str, code: bool = False) -> None:
    """Fetch the model of that name, unless the cache has all of it: then the network is not asked. `code`: with its
    Python files.

    Raises `UsageError` for what is no name of the hub, and for a model that is not there or may not be read;
    `WorkError` where the network or the disk does not allow it.
    """
    if cached_model(name) is not None:
        return
    if (model := hub_model_of(name)) is None:
        raise UsageError(f"--download: '{name}' is no name of the hub. Write --model OWNER/NAME, or leave it out.")
    if offline():
        raise WorkError(
            f"'{model.name}' is not in {hub_folder()}, and HF_HUB_OFFLINE forbids to fetch it. Unset it (also "
            "TRANSFORMERS_OFFLINE), or bring the cache from another machine."
        )
    require_extra("hub", "--download")
    import huggingface_hub

    hub = hub_address()
    try:
        info = huggingface_hub.HfApi(endpoint=hub).model_info(
            model.repository, revision=model.revision, timeout=ASK_S, files_metadata=True
        )
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        wanted = _wanted(model, sizes, code)
        _check_space(model, sum(sizes[one] for one in wanted))
        log.info("fetching %d files of %s into %s", len(wanted), model.name, hub_folder())
        for file in sorted(wanted, key=lambda one: (one.endswith(WEIGHTS), one)):  # weights last: their lack is seen
            huggingface_hub.hf_hub_download(  # in this thread: Ctrl-C ends it at once
                model.repository, file, revision=model.revision, cache_dir=hub_folder(), endpoint=hub
            )
    except GpuinferError:
        raise
    except Exception as error:
        raise _explained(model, hub, error) from error
    if cached_model(name) is None:
        snapshot = snapshot_of(model)
        lacks = ", ".join(snapshot.lacks[:3]) if snapshot is not None else "all of it"
        raise WorkError(f"'{model.name}' is not whole: it lacks {lacks}. Run it again; what came is kept.")


def hub_address() -> str:
    """Where the hub is asked."""
    from huggingface_hub import constants  # which the package itself imports only when it is used

    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT


def offline() -> bool:
    """Whether the environment forbids to ask the hub, as huggingface_hub reads it."""
    given = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return given.upper() in TRUE


def _wanted(model: HubModel, names: Collection[str], code: bool) -> list[str]:
    """The files to fetch. Raises `UsageError` for a repository without a model, or with several GGUF files."""
    if model.file is not None:
        if model.file not in names:
            others = sorted(name for name in names if name.endswith(".gguf"))
            hint = f" It has {', '.join(others[:8])}." if others else ""
            raise UsageError(f"'{model.repository}' has no file {model.file}.{hint} Name one that is there.")
        return [model.file]
    wanted = needed_files(names, code)
    ggufs = [name for name in wanted if name.endswith(".gguf")]
    if len(ggufs) > 1:
        raise UsageError(
            f"'{model.name}' has {len(ggufs)} GGUF files: {', '.join(ggufs[:8])}{' …' if ggufs[8:] else ''}.\n"
            f"Name one: --model {model.repository}/{ggufs[0]}"
        )
    if not any(name.endswith(WEIGHTS) for name in wanted):
        raise UsageError(f"'{model.name}' has no weights that are read here. Name another repository.")
    return wanted


def _check_space(model: HubModel, needed: int) -> None:
    folder = hub_folder()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WorkError(
            f"'{model.name}' takes {memory(needed)}, and {folder} has {memory(free)} free. Free some, or put the "
            "cache elsewhere: HF_HOME=/path/on/another/disk"
        )


def _explained(model: HubModel, hub: str, error: Exception) -> GpuinferError:
    """The error for people, with its cure. `hub`: its address."""
    from huggingface_hub import errors

    while isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub was not asked
    token = "set HF_TOKEN to a token of yours, or run `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"'{model.repository}' is gated: its makers let in who has agreed to their terms. Agree on "
            f"{hub}/{model.repository}, then {token}."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(
            f"there is no model '{model.repository}' on {hub}, or it is private. Check the name; for a private one "
            f"{token}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(
            f"'{model.repository}' has no revision '{model.revision}'. Name a branch, a tag or a commit of it, or "
            "leave it out."
        )
    reason = short_message(error)
    response: Any = getattr(error, "response", None)
    if response is not None:
        status = getattr(response, "status_code", 0)
        cure = f"Check the token: {token}." if status in (401, 403) else "Try again later; what came is kept."
        return WorkError(f"{hub} answers {status} for '{model.repository}'. {cure}")
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return WorkError(
            f"the disk of {hub_folder()} is full: {error.strerror}. Free some, or put the cache elsewhere: "
            "HF_HOME=/path/on/another/disk. What came is kept."
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return WorkError(
            f"{error.filename or hub_folder()} cannot be written: {error.strerror}. Put the cache where you may "
            "write: HF_HOME=/path"
        )
    return WorkError(
        f"'{model.repository}' could not be fetched from {hub}: {reason}.\nCheck the network (and HTTPS_PROXY, "
        "HF_ENDPOINT), and run it again: what came is kept."
    )
