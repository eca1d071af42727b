"""THOR on two real processes: their factors are averaged, so both train as one does."""

from __future__ import annotations

import numpy as np
import pytest
import thor_worker
from thor_cases import pairs, reference

from mindspore_boost_ext.thor.factors import MeanOverRanks


@pytest.mark.parametrize("mode_name", ["graph", "pynative"])
def test_two_ranks_train_like_one_process_on_all_the_data(ended, mode_name):
    """The mean over ranks of moments of halves is the moment of the whole batch."""
    _, results = ended(2, mode_name)
    first, second = (result["thor"] for result in results)
    assert first == second
    expected = reference(pairs(thor_worker.STEPS), frequency=thor_worker.FREQUENCY)
    np.testing.assert_allclose(first["layer.weight"], expected, rtol=1e-4, atol=1e-5)


def test_split_indices_end_the_groups_that_are_reduced_together():
    assert MeanOverRanks(2, [1, 3], 6).bounds == ((0, 2), (2, 4), (4, 6))
    assert MeanOverRanks(2, [1, 5], 6).bounds == ((0, 2), (2, 6))
    assert MeanOverRanks(2, None, 6).bounds == ((0, 6),)
