"""Settings for all tests: one oneDNN instruction set, both modes, no state left behind."""

from __future__ import annotations

import os

# Some MindSpore wheels run convolutions 20-50 times slower on AVX-512 machines without this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms
import pytest

import mindspore_boost_ext


@pytest.fixture(params=["graph", "pynative"])
def mode(request):
    """Run the test in GRAPH_MODE and in PYNATIVE_MODE."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE if request.param == "graph" else ms.PYNATIVE_MODE)
    yield request.param
    ms.set_context(mode=before)


@pytest.fixture
def graph_mode():
    """Run the test in GRAPH_MODE only."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=before)


@pytest.fixture(autouse=True)
def _clean_surroundings(tmp_path, monkeypatch):
    """Let MindSpore write its dumps elsewhere; fail a test that leaves the package uninstalled."""
    monkeypatch.chdir(tmp_path)
    yield
    assert mindspore_boost_ext.is_installed()
