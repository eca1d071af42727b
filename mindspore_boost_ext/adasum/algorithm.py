"""The switch ``adasum``: combines the step of this rank's server with those of the others."""

from __future__ import annotations

import functools

from mindspore import Tensor, nn, ops

from mindspore_boost_ext.adasum.cell import (
    AdaSum,
    has_partial_server,
    server_reducer,
    unavailable_reason,
)
from mindspore_boost_ext.algorithm import Algorithm, StepCell
from mindspore_boost_ext.config.parse import BoostConfig
from mindspore_boost_ext.report import APPLIED, SKIPPED
from mindspore_boost_ext.runtime.ranks import rank_and_count
from mindspore_boost_ext.stages.update import Update


class AdaSumUpdate(Update):
    """Takes the optimizer's step of this server, and combines it with those of the others."""

    takes_factor = True

    def __init__(self, optimizer: nn.Cell, device_number: int) -> None:
        super().__init__(optimizer)
        self.device_number = device_number
        rank, ranks = rank_and_count()
        servers, weights = ranks // device_number, optimizer.parameters
        self.adasum = AdaSum(rank, device_number, servers, weights, equal_in_server=True)

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Take the step, and combine it."""
        old = self.adasum.snapshot()
        gradients = self.times_factor(ops.depend(gradients, old))
        loss = ops.depend(loss, self.optimizer(gradients))
        return ops.depend(loss, self.adasum.update_since(ops.depend(old, loss)))

    def restricted(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> AdaSumUpdate:
        """Return this part for some of the weights."""
        part = AdaSumUpdate(optimizer, self.device_number)
        part.factor = self.factor
        return part


class AdaSumAlgorithm(Algorithm):
    """AdaSum over servers of ``common.device_number`` devices."""

    switch = "adasum"

    def unavailable(self, config: BoostConfig) -> str:
        """Return why AdaSum cannot work in this process."""
        return unavailable_reason(config.common.device_number)

    def join(self, step: StepCell) -> None:
        """Reduce gradients inside this rank's server only, and combine the steps of servers."""
        if not self.is_on(step):
            return
        devices, report = step.auto_boost.device_number, step.report()
        reason = unavailable_reason(devices)
        if step.reducer_flag and has_partial_server(devices):
            raise ValueError(reason)
        step.enable_adasum = not reason  # what a subclass's check_adasum_enable may read
        if not reason and step.declines("check_adasum_enable"):
            reason = f"check_adasum_enable of {type(step).__name__} returned False"
        if reason:
            step.enable_adasum = False
            report.update(self.switch, SKIPPED, reason)
            return
        step.reducer_of = functools.partial(server_reducer, device_number=devices)
        step.update_part = AdaSumUpdate(step.optimizer, devices)
        adasum = step.adasum = step.update_part.adasum
        report.update(self.switch, APPLIED, adasum.describe(), adasum.counts())

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse a subclass that updates by itself: its step would never be combined."""
        if step.enable_adasum and step.updates_past("adasum_process"):
            raise ValueError(
                f"adasum cannot combine servers: {step.why_left_out()}: call it, or leave adasum "
                "out"
            )
