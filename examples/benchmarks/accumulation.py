"""What accumulation is for: the memory of one update from a large batch, and the time it takes.

    python examples/benchmarks/accumulation.py

The small ResNet of width 16 with momentum in GRAPH mode: one update from the whole batch, and from
the same batch in micro-batches. Memory is the growth of a process's peak from the first step on;
each case has a process of its own. Time is that of a whole update over that of the single large
step; both take turns in one process. Takes 3 minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import mindspore as ms
from harness import added_mib, paired, print_table
from networks import SmallResNet, batch, ours, plain, waiting
from processes import apart

WIDTH, SAMPLES, WINDOWS = 16, 512, (4, 16)
HEADINGS = "micro-batches | of | memory, MiB | of the whole batch's | update / large step"


def update(window: int) -> Callable[[], object]:
    """Return a function that makes one update in ``window`` micro-batches."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    net, accumulation = SmallResNet(WIDTH), {"grad_accumulation_step": window}
    step = plain(net) if window == 1 else ours(net, grad_accumulation=accumulation)
    run = waiting(step, batch(SAMPLES // window))
    return lambda: [run() for _ in range(window)]


def memory_mib(window: int) -> float:
    """Return by how much three updates raise the peak memory of this process."""
    return added_mib(update(window))


def rows() -> Iterator[str]:
    """Measure; yield the table's rows."""
    whole = apart(memory_mib, 1)
    yield f"1 | {SAMPLES} | {whole:.0f} | 1.00 | 1"
    for window in WINDOWS:
        memory = apart(memory_mib, window)
        time = paired(update(window), update(1), pairs=10, steps=1, warm_up=2)
        shown = f"{time.median:.2f} ({time.low:.2f} to {time.high:.2f})"
        yield f"{window} | {SAMPLES // window} | {memory:.0f} | {memory / whole:.2f} | {shown}"


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description="Measure the memory that accumulation saves.").parse_args()
    title = f"One update from {SAMPLES} images, small ResNet of width {WIDTH}, GRAPH mode"
    print_table(title, HEADINGS, rows())


if __name__ == "__main__":
    main()
