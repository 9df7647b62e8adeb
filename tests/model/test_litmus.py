"""The checker has the outcomes that the PTX model is known to have."""

import litmus
import ptx
import pytest


@pytest.mark.parametrize("one", litmus.PROGRAMS, ids=lambda one: one.name)
def test_outcome_is_that_of_the_source(one):
    execution = ptx.find(one.text, one.outcome)
    assert (execution is not None) == one.allowed, f"{one.name} ({one.source}): {one.outcome}\n{execution}"
