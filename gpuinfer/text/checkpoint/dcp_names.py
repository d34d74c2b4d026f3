"""From the names that trainers give to tensors to those that transformers gives.

A trainer saves {"model": model.state_dict(), "optimizer": …} or the like: names get a prefix. Wrappers of modules leave
their own names within.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpuinfer.errors import UsageError

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module", "module")
USUAL = frozenset({"model", "state_dict", "app", "module"})  # words of a prefix that say nothing
SHOWN = 3


def plain(name: str) -> str:
    """Without the names of wrappers, and with dots."""
    return ".".join(word for word in name.replace("/", ".").split(".") if word not in WRAPPERS)


def named_as(folder: str, stored: Collection[str], body: str, embedding: str, head: str | None) -> Mapping[str, str]:
    """Of the tensors of one model its name in transformers, and the one that is stored.

    `body`: what transformers puts before the tensors of the model without its head ("model."); `embedding`: the tensor
    by which that is found ("embed_tokens.weight"); `head`: "lm_head", or None where it is called like the rest. Raises
    `UsageError` when no model or several are there.
    """
    names = {plain(name): name for name in sorted(stored, reverse=True)}
    begins = [name.removesuffix(embedding) for name in names if name == embedding or name.endswith(f".{embedding}")]
    begin = _chosen(folder, begins, embedding)
    above = begin.removesuffix(body) if begin == body or begin.endswith(f".{body}") else begin
    found = {body + name.removeprefix(begin): theirs for name, theirs in names.items() if name.startswith(begin)}
    for prefix in (begin, above) if head else ():
        for name, theirs in names.items():
            if name.startswith(f"{prefix}{head}."):
                found.pop(body + name.removeprefix(begin), None)
                found[name.removeprefix(prefix)] = theirs
    return found


def _chosen(folder: str, begins: list[str], embedding: str) -> str:
    """That of the model itself, where averages of it or other models lie beside it."""
    if not begins:
        raise UsageError(
            f"{folder} holds no tensor '{embedding}': it is no checkpoint of such a model. Give the base model that it "
            "was trained from, and save the state dict under transformers' names."
        )
    usual = [begin for begin in begins if set(begin.split(".")) - {""} <= USUAL] or sorted(begins)
    if len(usual) > 1:
        shown = ", ".join(f"'{begin}{embedding}'" for begin in usual[:SHOWN])
        raise UsageError(f"{folder} holds several models: {shown}. Save the one that is to be served by itself.")
    return usual[0]
