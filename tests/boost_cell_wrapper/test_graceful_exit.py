"""MindSpore's OnRequestExit ends a Model with boost like one without, in one process, too."""

from __future__ import annotations

import exit_worker


def test_a_training_that_is_asked_to_end_ends_with_a_checkpoint(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("MS_ENABLE_GRACEFUL_EXIT", "1")
    asked_at, *_ = exit_worker.ASKED_AT
    assert exit_worker.steps_made(0, tmp_path, mode, "nothing") == (asked_at + 1, True)
