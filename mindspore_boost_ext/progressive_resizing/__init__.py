"""Images that start small and grow."""

from mindspore_boost_ext.progressive_resizing.algorithm import ResizedImages

__all__ = ["ResizedImages"]
