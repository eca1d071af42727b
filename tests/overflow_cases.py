"""A detector as a step uses it, and what each of two real processes finds."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.stages.overflow import (
    choose_detector,
)


def one_by_one(detector, gradients):
    """The flag of each gradient, bool[n], asked for as a manager of grouped scales does."""
    flags = ()
    for gradient in gradients:
        flags += (ops.reshape(detector.any_non_finite((gradient,)), (1,)),)
    return ops.concat(flags)


class Check(nn.Cell):
    """A step as the detector sees it: from the loss to the flag."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def construct(self, *gradients):
        status, _ = self.detector.start(gradients[0], gradients[0])
        return self.detector(status, gradients), self.detector.any_non_finite(gradients[-1:])


def flags(detector, *gradients):
    """Return both flags; a Check in place of the detector is compiled once for equal shapes."""
    check = detector if isinstance(detector, Check) else Check(detector)
    overflow_flag, last_flag = check(*gradients)
    for flag in (overflow_flag, last_flag):
        assert flag.dtype == ms.bool_
        assert flag.shape == ()
    return bool(overflow_flag), bool(last_flag)


class PerGradient(nn.Cell):
    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def construct(self, *gradients):
        return self.detector.agree(one_by_one(self.detector, gradients))


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
