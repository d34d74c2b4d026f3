"""The bodies of requests that change what is served: other weights, and adapters.

Loading and unloading of adapters have vLLM's names and fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Place = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadBody(Struct, forbid_unknown_fields=True):
    """An adapter of this name is loaded from a folder of the server's machine; under way or not, it takes the place of
    the one that the name means now.
    """

    lora_name: Name
    lora_path: Place
    version: Name | None = None  # none: the next whole number
    load_inplace: bool = True  # of vLLM: a name that is loaded already is loaded again
    lora_int_id: int | None = None  # of vLLM: not used
    model: Name | None = None  # of several in one server: whose


class UnloadBody(Struct, forbid_unknown_fields=True):
    """`policy` with all its versions, or one of them, `policy@7`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=257)]
    lora_int_id: int | None = None
    model: Name | None = None


class UpdateBody(Struct, forbid_unknown_fields=True):
    """As `Backend.update`: other weights of the model, or with `adapter` those of an adapter."""

    version: Name
    weights: Place
    adapter: Name | None = None
    drain: bool = True
    model: Name | None = None


CHANGES: Mapping[str, tuple[type[Struct], str]] = {
    "/v1/load_lora_adapter": (LoadBody, "Load an adapter, or another version of it."),
    "/v1/unload_lora_adapter": (UnloadBody, "Unload an adapter."),
    "/v1/update_weights": (UpdateBody, "Compute with other weights, or another adapter."),
}
