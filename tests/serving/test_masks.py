"""A server of a diffusion model: how masks are filled in where a request says nothing, and who is refused."""

from __future__ import annotations

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.generation import Unmasking
from gpuinfer.serving.options import ServeOptions, spec_of, usual_unmasking


def usual(**flags: object) -> Unmasking | None:
    own = ServeOptions(**flags)
    return usual_unmasking(own, spec_of(own))


def test_a_model_without_masks_is_not_started_with_words_on_them():
    assert usual(model="tiny") is None
    with pytest.raises(UsageError, match="`threshold` says how a diffusion model fills its masks in"):
        usual(model="tiny", threshold=0.9)
    with pytest.raises(UsageError, match=r"-D is said of a diffusion model, and blobnet takes rows\. Leave it out"):
        usual(model="blobnet", decoder_options={"low": 0.4})
    with pytest.raises(UsageError, match=r"--mask-token-id is said of a diffusion model"):
        usual(model="blobnet", mask_token_id=3)


def test_flags_hold_for_requests_that_say_nothing():
    assert usual(model="tiny-llada", threshold=0.9, block_length=8) == Unmasking(threshold=0.9, block_length=8)
