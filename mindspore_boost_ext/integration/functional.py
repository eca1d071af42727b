"""A training step for the user's own loop, with all that ``ms.Model`` has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.amp import LossScaleManager
from mindspore.dataset import Dataset
from mindspore.train import Callback, RunContext

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.base.cells import check_cells, leaves
from mindspore_boost_ext.boost_cell_wrapper import BoostTrainOneStepCell
from mindspore_boost_ext.config.parse import ConfigSource
from mindspore_boost_ext.config.rules import check_all, integer, shown
from mindspore_boost_ext.integration.model import boosted_build_train_network
from mindspore_boost_ext.integration.training import (
    EndOfTraining,
    StepStops,
    compare_on_ranks,
    expect_training,
)
from mindspore_boost_ext.report import NoEffectWarning, Report, warn

_FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
_NOT_CALLED = (
    "the loop over TrainStep.over did not call the step, so this package trained nothing, or "
    "callbacks saw no step: call step(*batch), not value_and_grad and the optimizer, nor "
    "step.train_network"
)


class _Parameters(_compat.CallbackParameters):
    """What callbacks read; a missing one is a missing attribute, so that they may have defaults."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class TrainStep:
    r"""One training step: call it with a batch, and it returns the loss. See make_train_step.

    Inputs:
        - **\*batch** (tuple(Tensor)) - the inputs of the network; with a ``loss_fn`` one input and
          the label. If an evaluation has left the network, or all of its layers, in evaluation
          mode, they train again, except for layers that did not in the step before, such as a
          frozen teacher (before the first step: when this was made).

    Outputs:
        Tensor, the loss as the network gives it, not multiplied by a loss scale.

    Attributes:
        train_network (Cell): the step cell, for :func:`save_checkpoint` and :func:`restore`.
        overflow (Tensor): with a loss scale, whether the last step was skipped: bool, shape ().
            Else None.
        scale (Tensor): with a loss scale, the scale of the last step: float32. Else None.
    """

    def __init__(
        self, train_network: nn.Cell, network: nn.Cell, takes_a_label: bool = False
    ) -> None:
        self.train_network: Any = train_network
        self.overflow: Tensor | None = None
        self.scale: Tensor | None = None
        self._network, self._takes_a_label = network, takes_a_label
        self._all_cells = [cell for _, cell in network.cells_and_names()]
        self._layers = [cell for cell in self._all_cells if _compat.own_parameters(cell)]
        self._scales = isinstance(train_network, nn.TrainOneStepWithLossScaleCell) or hasattr(
            train_network, "scale_part"
        )
        # What was in evaluation mode when the last step ran, or before the first.
        self._in_evaluation = [cell for cell in self._all_cells if not cell.training]
        self._last: Any = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Train on one batch of Tensors; return the loss, as the network gives it."""
        is_odd = self._takes_a_label and len(batch) != 2
        # A part that changes the batch before the network sees it may take more inputs.
        if is_odd and getattr(self.train_network, "batch_part", None) is None:
            together = len(batch) == 1 and isinstance(batch[0], (tuple, list))
            remedy = "give both, or let the network return its loss, and give None as loss_fn"
            raise TypeError(
                f"a step with a loss_fn takes one input and the label, got {len(batch)} arguments: "
                f"{'write step(*batch)' if together else remedy}"
            )
        if self._was_left_in_evaluation():  # an evaluation has left it so
            self.train_network.set_train()
            for one in self._in_evaluation:
                one.add_flags(training=False)
        else:
            self._in_evaluation = [cell for cell in self._all_cells if not cell.training]
        compare_on_ranks(self.train_network)
        is_first = self._last is None
        self._last = loss = self.train_network(*batch)
        if self._scales:
            loss, self.overflow, self.scale = self._last
        if is_first:
            _warn_of_outputs(loss)
        return loss

    def set_train(self, mode: bool = True) -> TrainStep:
        """Set the network's mode, as ``nn.TrainOneStepCell`` does; return the step.

        It is for loops written for that Cell: building a step, and calling it after an evaluation,
        set the mode anyway.
        """
        self.train_network.set_train(mode)
        return self

    def _was_left_in_evaluation(self) -> bool:
        """Return whether the network, or every layer in it with weights, is in evaluation mode.

        Only the layers are, if a network that is part of one with its loss was evaluated. Only some
        are, if the step of another network, which has the others, too, has run since.
        """
        if not self._network.training:
            return True
        return bool(self._layers) and not any(layer.training for layer in self._layers)

    def report(self) -> Report:
        """Return what was applied, skipped or left inactive, and why."""
        return self.train_network.report()

    def observations(self) -> dict[str, Any]:
        """Return what the active algorithms report of the last step: name -> number or bool."""
        return getattr(self.train_network, "observations", dict)()

    def flush_accumulation(self) -> bool:
        """Update with the gradients of a window that is not full; return whether it did."""
        return bool(getattr(self.train_network, "flush_accumulation", bool)())

    def over(
        self,
        dataset: Dataset,
        epochs: int,
        callbacks: Callback | Sequence[Callback] = (),
        *,
        initial_epoch: int = 0,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of all epochs, and call the callbacks before and after each batch.

        Each batch is a tuple of Tensors; call the step once with it. As in ``ms.Model``, a dataset
        is read ahead, also into the next epoch. If ``initial_epoch`` is not below ``epochs``,
        nothing is yielded. A ``break`` ends the loop without the callbacks of its end.

        Args:
            dataset (Union[Dataset, Iterable]): a dataset of MindSpore, or an iterable with a length
                that yields tuples of Tensors in every epoch.
            epochs (int): the number of the last epoch, at least 1.
            callbacks (Union[Callback, Sequence[Callback]]): ``BoostMonitor``, ``BoostCheckpoint``,
                ``FlushAccumulation``, ``TrajectorySampler``, or any callback that needs no more of
                ``ms.Model`` than these do. Default: none.
            initial_epoch (int): how many epochs are done, as :func:`restore` returns. Default: 0.

        Raises:
            TypeError: if ``dataset`` has no length; in the loop, if a batch is no tuple or list.
            ValueError: if a number breaks its rule, or is not the same on all ranks.
        """
        check_all("over", epochs=(epochs, integer(1)), initial_epoch=(initial_epoch, integer(0)))
        size = _size(dataset)
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        compare_on_ranks(self.train_network)
        if isinstance(self.train_network, BoostTrainOneStepCell):
            expect_training(self.train_network, epochs - initial_epoch, size)
            callbacks += [end := EndOfTraining(self.train_network)]
            epochs = initial_epoch if end.was_before() else epochs
        callbacks.append(StepStops())
        state = _Parameters(
            network=self._network,
            train_network=self.train_network,
            optimizer=self.train_network.optimizer,
            train_dataset=dataset,
            epoch_num=epochs - initial_epoch,
            batch_num=size,
            cur_step_num=0,
            cur_epoch_num=initial_epoch,
            dataset_sink_mode=False,
            list_callback=callbacks,
        )
        return self._run(dataset, state)

    def _run(self, dataset: Dataset, state: Any) -> Iterator[tuple[Any, ...]]:
        context = RunContext(state)
        with _compat.CallbackManager(state.list_callback) as callbacks:
            callbacks.on_train_begin(context)
            for batches in _epochs(dataset, state.epoch_num):
                state.cur_epoch_num += 1
                callbacks.on_train_epoch_begin(context)
                for batch in batches:
                    if not isinstance(batch, (tuple, list)):
                        raise TypeError(f"a batch must be a tuple of Tensors, got {shown(batch)}")
                    state.cur_step_num += 1
                    state.train_dataset_element = batch
                    callbacks.on_train_step_begin(context)
                    before = self._last
                    yield tuple(batch)
                    if self._last is not before:  # else the loop has left out this batch
                        state.net_outputs = self._last
                        callbacks.on_train_step_end(context)
                    if context.get_stop_requested():
                        break
                if self._last is None:
                    warn(_NOT_CALLED, NoEffectWarning)
                callbacks.on_train_epoch_end(context)
                if context.get_stop_requested():
                    break
            callbacks.on_train_end(context)


def _warn_of_outputs(loss: object) -> None:
    """Warn of a network with outputs beside its loss, such as logits: they are minimised, too."""
    others = leaves(loss[1:]) if isinstance(loss, (tuple, list)) else []
    if any(isinstance(one, Tensor) and one.dtype in _FLOATS and one.size > 1 for one in others):
        warn(
            "the network returns outputs beside the loss. Unless ops.stop_gradient is applied to "
            "them, the gradient is that of the sum of all, as in nn.TrainOneStepCell, not that of "
            "the first, as in value_and_grad(has_aux=True): return the loss alone, or apply "
            "ops.stop_gradient to the others"
        )


def _size(dataset: Dataset) -> int:
    """Return how many batches an epoch has."""
    if hasattr(dataset, "get_dataset_size"):
        return int(dataset.get_dataset_size())
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(
            f"dataset must be a MindSpore dataset or have a length, got {shown(dataset)}: "
            "otherwise write 'for batch in dataset: step(*batch)'"
        ) from None


def _epochs(dataset: Dataset, count: int) -> Iterator[Any]:
    if count > 0 and hasattr(dataset, "create_tuple_iterator"):
        # One iterator for all epochs: with a seed, a new one would shuffle as the first did.
        dataset = dataset.create_tuple_iterator(num_epochs=count)
    return itertools.repeat(dataset, count)


def make_train_step(
    network: nn.Cell,
    loss_fn: nn.Cell | None,
    optimizer: nn.Cell,
    *,
    level: str | None = None,
    config: ConfigSource = None,
    loss_scale_manager: LossScaleManager | None = None,
    amp_level: str = "O0",
    algorithms: Sequence[Algorithm] = (),
) -> TrainStep:
    """Build a training step with the accelerators, for scripts without ``ms.Model``.

    It replaces ``value_and_grad``, the reduction over ranks, and the call of the optimizer. If the
    network has several outputs, their sum is minimised, as by ``nn.TrainOneStepCell``. Apply
    ``ops.stop_gradient`` to outputs that are no loss.

    The network trains from here on. If it was in training mode before, parts of it in evaluation
    mode stay so, such as a frozen teacher. If it was not, as a new network is not, call
    ``part.set_train(False)`` afterwards, right before the first step.

    Args:
        network (Cell): the network.
        loss_fn (Cell, optional): takes the network's output and the label, the second Tensor of a
            batch. None if the network returns the loss, as it must if it has several inputs. Write
            a function as the ``construct`` of a Cell.
        optimizer (Cell): the optimizer over its trainable parameters. With one of
            ``mindspore.experimental.optim`` switch off ``less_bn`` and ``grad_freeze`` (on at O1).
        level (str, optional): ``"O0"``, ``"O1"`` or ``"O2"``. Default: None, which is O1 with
            ``config``, else ``MINDSPORE_BOOST_EXT_LEVEL``, else O1 if
            ``MINDSPORE_BOOST_EXT_CONFIG`` is set, else O0.
        config (Union[dict, str, os.PathLike, None]): the settings, as for ``boost_config_dict`` of
            ``ms.Model``. Default: None.
        loss_scale_manager (LossScaleManager, optional): as for ``ms.Model``. Default: None, which
            is the one that ``amp_level`` brings.
        amp_level (str): mixed precision, as for ``ms.Model``. Default: ``"O0"``.
        algorithms (Sequence[Algorithm]): algorithms of your own, which are on. Default: none.

    Returns:
        TrainStep, ``loss = step(*batch)``.

    Raises:
        TypeError, ValueError: for everything wrong with level and settings, in one message; the
            network is then as it was before.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import make_train_step
        >>> net = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> step = make_train_step(net, nn.MSELoss(), optimizer, level="O1",
        ...                        config={"boost": {"mode": "disable_all"}})
        >>> batches = [(Tensor(np.ones((3, 4), np.float32)), Tensor(np.zeros((3, 2), np.float32)))]
        >>> for inputs, labels in step.over(batches, epochs=2):
        ...     loss = step(inputs, labels)
        >>> step.report()["less_bn"].status
        'inactive'
    """
    check_cells(network=network)
    if not isinstance(loss_fn, (nn.Cell, type(None))):
        raise TypeError(
            f"loss_fn must be a Cell or None, got {shown(loss_fn)}: write it as a Cell whose "
            "construct takes output and label, or let the network return its loss, and give None"
        )
    manager = {} if loss_scale_manager is None else {"loss_scale_manager": loss_scale_manager}
    cells = network.cells_and_names() if network.training else ()
    in_evaluation = {name for name, one in cells if not one.training}
    cell = boosted_build_train_network(
        ms.amp.build_train_network,
        network,
        optimizer,
        loss_fn,
        amp_level,
        "O1" if level is None and config else level,
        config,
        algorithms=algorithms,
        any_optimizer=True,
        **manager,
    )
    for name, one in network.cells_and_names():  # layers may have been replaced
        if name in in_evaluation:
            one.add_flags(training=False)
    return TrainStep(cell, network, loss_fn is not None)
