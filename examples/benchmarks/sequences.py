"""What the import alone does for networks of sequences, in GRAPH_MODE.

    python examples/benchmarks/sequences.py --rounds 5

Like machine.py, with the same options. It is another script because it must not contain the words
for which the import chooses an instruction set at once.
"""

from __future__ import annotations

from typing import Any

import machine

CLASSES = machine.CLASSES


def of_rows(nn: Any, body: Any, width: int) -> Any:
    """Return a network that reads a sample as 32 rows of 96 numbers."""

    class OfRows(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, nn.Dense(width, CLASSES)

        def construct(self, x: Any) -> Any:
            found = self.body(x.swapaxes(1, 2).reshape((-1, 32, 96)))
            return self.head((found[0] if isinstance(found, tuple) else found).mean(1))

    return OfRows()


def lstm(nn: Any) -> Any:
    """Return an LSTM of 128 units."""
    return of_rows(nn, nn.LSTM(96, 128, batch_first=True), 128)


def transformer(nn: Any) -> Any:
    """Return a transformer of two layers, 256 wide."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return of_rows(nn, nn.SequentialCell(nn.Dense(96, 256), nn.TransformerEncoder(layer, 2)), 256)


TASKS = {
    "LSTM in GRAPH_MODE": (lstm, "GRAPH_MODE", "step", machine.STEPS),
    "transformer in GRAPH_MODE": (transformer, "GRAPH_MODE", "step", 15),
}


def main() -> None:
    """Run the tasks and print the table."""
    machine.main(script="sequences")


if __name__ == "__main__":
    main()
