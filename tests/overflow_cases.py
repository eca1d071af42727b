"""A detector as a step uses it, and what each of two real processes finds."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.stages.overflow import (
    choose_detector,
)


class Check(nn.Cell):
    """A step as the detector sees it: from the loss to the flag."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def construct(self, *gradients):
        status, _ = self.detector.start(gradients[0], gradients[0])
        return self.detector(status, gradients), self.detector.is_finite(gradients[-1])


def flags(detector, *gradients):
    overflow_flag, last_finite = Check(detector)(*gradients)
    for flag in (overflow_flag, last_finite):
        assert flag.dtype == ms.bool_
        assert flag.shape == ()
    return bool(overflow_flag), bool(last_finite)


class PerGradient(nn.Cell):
    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def construct(self, *gradients):
        return self.detector.agree(self.detector.non_finite(gradients))


def answers_of_rank(rank):
    """What each of two processes finds: rank 1 alone has inf in its second gradient."""
    clean = [Tensor([1.0, 2.0]), Tensor([[3.0]])]
    bad = [clean[0], Tensor([[np.inf]], ms.float32)] if rank == 1 else clean
    together = choose_detector(distributed=True)
    return {
        "alone": flags(choose_detector(), *bad)[0],
        "bad": flags(together, *bad)[0],
        "clean": flags(together, *clean)[0],
        "each": PerGradient(together)(*bad).asnumpy().tolist(),
    }
