"""What changes a batch before the network sees it, one change behind the other."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn


class _Behind(nn.Cell):
    """Changes a batch twice."""

    def __init__(self, first: nn.Cell, second: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.first, self.second = first, second

    def construct(self, *inputs: Tensor) -> Any:
        return self.second(*self.first(*inputs))


def behind(first: nn.Cell | None, second: nn.Cell) -> nn.Cell:
    """Return what changes a batch as ``first`` does, where there is one, and then as ``second``."""
    return second if first is None else _Behind(first, second)


__all__ = ["behind"]
