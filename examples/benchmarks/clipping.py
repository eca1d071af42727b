"""What the import saves where a script clips gradients by ``ops.clip_by_global_norm``.

    taskset -c 0 python examples/benchmarks/clipping.py
    taskset -c 0 python examples/benchmarks/clipping.py --mode PYNATIVE

The function alone, this package's and MindSpore's by turns, on gradients of a network's shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from harness import MODES, paired, print_table
from mindspore import Tensor, nn
from tasks import TASKS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from resnets import resnet18

from mindspore_boost_ext.runtime import clipping

NETWORKS = {name: TASKS[name].network for name in ("LeNet, digits", "transformer, text")}
NETWORKS["ResNet-18"] = resnet18


class Clipped(nn.Cell):
    """Clips gradients by one of the functions."""

    def __init__(self, function: Callable[..., Sequence[Tensor]]) -> None:
        super().__init__()
        self.function = function

    def construct(self, *gradients: Tensor) -> Sequence[Tensor]:
        """Return the gradients, whose norm is at most 1."""
        return self.function(gradients, 1.0)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="ops.clip_by_global_norm, tuned and plain.")
    parser.add_argument("--mode", default="GRAPH", choices=list(MODES))
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args(argv)
    ms.set_context(mode=MODES[options.mode])
    random = np.random.default_rng(0)

    def row(name: str) -> str:
        weights = NETWORKS[name]().trainable_params()
        gradients = [Tensor(random.normal(size=one.shape), ms.float32) for one in weights]
        ours, theirs = Clipped(clipping.clip_by_global_norm), Clipped(clipping.ORIGINAL)
        count = sum(one.size for one in gradients)
        found = paired(
            lambda: ours(*gradients)[-1].asnumpy(),
            lambda: theirs(*gradients)[-1].asnumpy(),
            options.pairs,
        )
        return f"{name}, {count:,} weights | {found.row}"

    headings = "network | MindSpore's own, ms | ratio | quartiles"
    print_table(f"clip_by_global_norm, {options.mode}_MODE", headings, map(row, NETWORKS))


if __name__ == "__main__":
    main()
