"""What two models of one run are called, so that a reader knows which is which."""

from __future__ import annotations

import pytest

from gpuinfer.api import ModelSpec
from gpuinfer.runtime.session_counters import distinct_names


@pytest.mark.parametrize(
    ("own", "other", "names"),
    [
        pytest.param(("blobnet", None), ("blobnet-small", None), ("blobnet", "blobnet-small"), id="by name"),
        pytest.param(("a/chat", None), ("b/chat", None), ("a/chat", "b/chat"), id="by folder"),
        pytest.param(("/m/chat", None), ("/m/base", None), ("chat", "base"), id="by the last part alone"),
        pytest.param(
            ("blobnet", "n/new.pt"), ("blobnet", "o/old.pt"), ("blobnet (new.pt)", "blobnet (old.pt)"), id="by weights"
        ),
        pytest.param(
            ("blobnet", "l/2/w.pt"),
            ("blobnet", "l/1/w.pt"),
            ("blobnet (2/w.pt)", "blobnet (1/w.pt)"),
            id="by their folder",
        ),
        pytest.param(
            ("nets:make", "new.pt"),
            ("nets:make", None),
            ("nets:make (new.pt)", "nets:make (no weights file)"),
            id="one without",
        ),
        pytest.param(("blobnet", "a.pt"), ("blobnet", "a.pt"), ("own blobnet", "blobnet"), id="the very same"),
    ],
)
def test_models_are_told_apart(own, other, names):
    one, two = (ModelSpec(name, weights) for name, weights in (own, other))
    assert distinct_names(one, two) == names
    assert distinct_names(two, one) == (names[::-1] if own != other else names)
