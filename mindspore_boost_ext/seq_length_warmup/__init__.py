"""Sequences that start short and grow."""

from mindspore_boost_ext.seq_length_warmup.algorithm import ShortSequences

__all__ = ["ShortSequences"]
