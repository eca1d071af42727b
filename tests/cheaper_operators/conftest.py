"""Small inputs compute as large ones, which would take the time of the tests."""

from __future__ import annotations

import pytest

from mindspore_boost_ext.cheaper_operators.known import KNOWN


@pytest.fixture(autouse=True)
def no_input_is_small(request, monkeypatch):
    """Let no operator be MindSpore's because its input is small, but in tests of just that."""
    for known in KNOWN.values() if "sizes" not in request.fixturenames else ():
        monkeypatch.setattr(known.replacement, "least", 0)


@pytest.fixture
def sizes():
    """Let small inputs be small."""
