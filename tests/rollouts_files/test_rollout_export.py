"""What trainers are given: their own names, the right masks, and the very same groups when it is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_draws import groups

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.export import FORMATS
from gpuinfer.rollouts.export.samples import samples

NAMES = list(FORMATS)


@pytest.mark.parametrize("name", NAMES)
@given(some=st.lists(groups, max_size=4))
def test_groups_come_back_from_each_form_as_they_were(tmp_path_factory, name, some):
    path = tmp_path_factory.mktemp("export") / "out.jsonl"
    if not any(samples(group) for group in some):
        with pytest.raises(UsageError, match="nothing to train on"):
            FORMATS[name].write(some, path)
        assert not path.exists()
        return
    written = FORMATS[name].write(some, path)
    assert (written.groups, written.samples) == (len(some), sum(len(samples(group)) for group in some))
    assert list(FORMATS[name].read(path)) == some
