"""FreezeOpt: an optimizer that trains in each step the parameters that a schedule names.

Moments, global step and learning rate are those of the plain optimizer; each group is a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.arguments import members_of
from mindspore_boost_ext.base.cells import leaves
from mindspore_boost_ext.base.rebuild import Centralize, rebuilt
from mindspore_boost_ext.base.view import optimizer_view, parameter_positions
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.grad_freeze.schedule import Strategy, as_schedule, check_highest
from mindspore_boost_ext.grad_freeze.sequences import AT_ONCE
from mindspore_boost_ext.report import NoEffectWarning, warn

POSITION_NAME = "boost.grad_freeze.position"


class GroupOptimizer(nn.Cell):
    """A group's view of the plain optimizer, which advances the schedule with every update.

    A :attr:`reducer`, if it is set, reduces the gradients over ranks before.
    """

    def __init__(self, optimizer: nn.Optimizer, position: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer, self.position = optimizer, position
        self.reducer: nn.Cell | None = None

    @property
    def parameters(self) -> ParameterTuple:
        """The parameters of the group."""
        return self.optimizer.parameters

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Update the group's parameters."""
        if self.reducer is not None:
            gradients = self.reducer(gradients)
        return ops.depend(self.optimizer(gradients), ops.assign_add(self.position, 1))


class FreezeOpt(nn.Optimizer):
    r"""An optimizer with groups of parameters to train, and a schedule of them.

    Its only state is its position in the schedule. Moments, global step and learning rate are those
    of ``opt``, which stays usable. It has the attributes of ``opt`` (``learning_rate``,
    ``global_step``, ``loss_scale``, ``get_lr`` and so on). Called with all gradients, it updates
    everything, and warns that nothing is frozen.

    Args:
        opt (nn.Optimizer): the plain optimizer, or ``nn.LARS`` over one.
        train_parameter_groups (Union[tuple, list], optional): for each group the parameters it
            trains: Parameters, or dicts with ``"params"`` as for an optimizer. Default: None, one
            group of all.
        train_strategy (Union[FreezeSchedule, tuple, list, Tensor], optional): the group of each
            step; a Tensor is int32 [steps]. It starts again at its end, unless the schedule holds.
            Default: None, the groups in turn.

    Inputs:
        - **gradients** (tuple(Tensor)) - one gradient for each of ``parameters``.

    Outputs:
        The output of ``opt``.

    Attributes:
        opt (nn.Optimizer): the plain optimizer.
        opts (tuple): the optimizer of each group; equal groups share one.
        train_parameter_groups (list): the Parameters of each group, in the order of ``parameters``.
        schedule (FreezeSchedule): ``train_strategy``, and what happens at its end; never None.
        position (Parameter): int32 [], updates so far, named ``boost.grad_freeze.position``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a group is empty or holds a parameter that ``opt`` does not train, or the
            strategy names a group that does not exist.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import FreezeOpt
        >>> net = nn.Dense(2, 2)
        >>> weight, bias = net.trainable_params()
        >>> plain = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> optimizer = FreezeOpt(plain, [[weight, bias], [bias]], [0, 1, 1])
        >>> [parameter.name for parameter in optimizer.view(1).parameters]
        ['bias']
        >>> optimizer.view(0) is plain
        True
    """

    def __init__(
        self,
        opt: nn.Optimizer,
        train_parameter_groups: Sequence[Iterable[Any]] | None = None,
        train_strategy: Strategy = None,
    ) -> None:
        if isinstance(opt, FreezeOpt):
            raise TypeError("opt is a FreezeOpt already: give the optimizer that it wraps")
        if not isinstance(opt, nn.Optimizer):
            raise TypeError(f"opt must be an nn.Optimizer, got {shown(opt)}")
        if train_strategy is not None and train_parameter_groups is None:
            raise ValueError("train_strategy needs train_parameter_groups: give both or neither")
        # Optimizer.__init__ would build a second set of state.
        nn.Cell.__init__(self, auto_prefix=False)
        self.opt = opt
        self.group_positions = self._positions(train_parameter_groups)
        self.schedule = as_schedule(train_strategy, len(self.group_positions))
        self._has_schedule = train_strategy is not None
        self.position = Parameter(Tensor(0, ms.int32), name=POSITION_NAME, requires_grad=False)
        self._views: dict[tuple[int, ...], nn.Optimizer] = {}
        self._warned_of_short_training = False
        self.warn_that_none_is_chosen = ops.constexpr(self._warn_of_no_group, reuse_result=False)
        prepare_first_step(self.base)

    def _warn_of_no_group(self) -> bool:
        if self.ever_freezes():
            warn(
                "FreezeOpt: the training step chooses no group, so nothing is frozen: train with "
                "BoostTrainOneStepCell, or with ms.Model or make_train_step at level O1 or O2",
                NoEffectWarning,
            )
        return True

    def __getattr__(self, name: str) -> Any:
        """Return the plain optimizer's attribute if this object has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            opt = _compat.wrapped_optimizer(self)
            if opt is None or name.startswith("_") or not hasattr(opt, name):
                raise
            return getattr(opt, name)

    @property
    def base(self) -> nn.Optimizer:
        """The optimizer that holds the moments: under LARS, the one it wraps."""
        return self.opt.opt if isinstance(self.opt, nn.LARS) else self.opt

    @property
    def train_strategy(self) -> Sequence[int] | None:
        """The group of each step: a tuple, or above 2**20 steps a computed sequence; or None."""
        return self.schedule.groups if self._has_schedule else None

    @train_strategy.setter
    def train_strategy(self, value: object) -> None:
        warn(
            "train_strategy of a FreezeOpt that is made has no effect: make another FreezeOpt with "
            "it",
            NoEffectWarning,
        )

    @property
    def parameters(self) -> ParameterTuple:
        """All parameters, as the plain optimizer lists them."""
        return self.opt.parameters

    @property
    def learning_rate(self) -> Any:
        """The plain optimizer's learning rate: Parameter, schedule, or one for each parameter."""
        return self.base.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Tensor | float) -> None:
        self.base.learning_rate = value

    @property
    def train_parameter_groups(self) -> list[list[Parameter]]:
        """The trained parameters of each group, in the order of ``parameters``."""
        return [[self.parameters[place] for place in group] for group in self.group_positions]

    @property
    def opts(self) -> tuple[nn.Optimizer, ...]:
        """The optimizer of each group; equal groups share one."""
        return tuple(self.view(group) for group in range(len(self.group_positions)))

    def view(self, group: int) -> nn.Optimizer:
        """Return the optimizer of one group: ``opt`` itself if the group is everything.

        Args:
            group: from 0 to the number of groups less one.
        """
        positions = self.group_positions[group]
        if len(positions) == len(self.parameters):
            return self.opt
        if positions not in self._views:
            self._views[positions] = optimizer_view(self.opt, positions)
        return self._views[positions]

    def steps_of_groups(
        self, make: Callable[[nn.Cell, tuple[int, ...]], nn.Cell]
    ) -> tuple[nn.Cell, ...]:
        """Return the training step of each group; equal groups share one.

        ``make`` makes it from the group's optimizer, which advances the schedule, and positions.
        """
        groups = {positions: group for group, positions in enumerate(self.group_positions)}
        steps = {
            positions: make(GroupOptimizer(self.view(group), self.position), positions)
            for positions, group in groups.items()
        }
        return tuple(steps[positions] for positions in self.group_positions)

    def next_group(self) -> int:
        """Return the group to train now: the schedule at the present position."""
        group = self.schedule.at(int(self.position.asnumpy()))
        check_highest(group, len(self.group_positions))  # a function's groups come unchecked
        return group

    def chooses_by_schedule(self) -> bool:
        """Return whether neither a subclass nor a script has set another :meth:`next_group`."""
        return getattr(self.next_group, "__func__", None) is FreezeOpt.next_group

    def _updates_of_groups(self, *part: int) -> dict[int, int]:
        """Return how often each group comes in the schedule, or in a part of it.

        A subclass that chooses by itself may choose any: each counts once.
        """
        if self.chooses_by_schedule():
            return self.schedule.tally(*part)
        return dict.fromkeys(range(len(self.group_positions)), 1)

    def expect_updates(self, updates: int) -> None:
        """Warn, once, if the schedule freezes nothing in the next ``updates`` updates."""
        position = int(self.position.asnumpy())
        freezes = any(map(self._freezes, self._updates_of_groups(position, updates)))
        if self.ever_freezes() and not freezes and not self._warned_of_short_training:
            self._warned_of_short_training = True
            warn(
                f"nothing is frozen in the {updates} updates of this training: the schedule of "
                f"{len(self.schedule.groups)} updates freezes nothing in them; unless you "
                "continue it, set grad_freeze.total_steps to the updates of the training",
                NoEffectWarning,
            )

    def counts(self) -> dict[str, int]:
        """Return figures for a report: groups, distinct ones, % of steps that train everything."""
        distinct = len(set(self.group_positions))
        found = {"groups": len(self.group_positions), "distinct_groups": distinct}
        if self.chooses_by_schedule():
            steps = self.schedule.tally()
            full = sum(count for group, count in steps.items() if not self._freezes(group))
            found["steps_training_everything_percent"] = round(100 * full / sum(steps.values()))
        return found

    def common_to_ranks(self) -> dict[str, object]:
        """Return, by name, what must be equal on ranks that train together."""
        schedule = np.array(self.schedule.groups[:AT_ONCE], np.int32)
        return {"freezing groups": self.group_positions, "freezing schedule": Tensor(schedule)}

    def ever_freezes(self) -> bool:
        """Return whether the schedule freezes anything."""
        return any(map(self._freezes, self._updates_of_groups()))

    def most_frozen(self) -> str:
        """Return, for a report, which parameters the schedule freezes at most."""
        trained = min((self.group_positions[one] for one in self._updates_of_groups()), key=len)
        frozen = [one.name for place, one in enumerate(self.parameters) if place not in trained]
        if len(frozen) > 3:
            return f"at most {len(frozen)} parameters: {frozen[0]}, {frozen[1]}, ... {frozen[-1]}"
        return f"at most {', '.join(frozen)}"

    def _freezes(self, group: int) -> bool:
        return len(self.group_positions[group]) < len(self.parameters)

    def over_other_parameters(self, opt: nn.Optimizer) -> FreezeOpt:
        """Return the same groups, schedule and position in it over another optimizer.

        The position is this object's own Parameter: both go through one schedule. Parameters that
        ``opt`` does not train leave their groups. Those that only ``opt`` trains join all groups.
        """
        before = {id(parameter) for parameter in self.parameters}
        left = {id(parameter) for parameter in opt.parameters}
        joining = [one for one in opt.parameters if id(one) not in before]
        groups = [
            [one for one in group if id(one) in left] + joining
            for group in self.train_parameter_groups
        ]
        made = FreezeOpt(opt, groups, self.schedule)
        self._check_held()
        other: Any = _compat.shallow_copy(self)  # of a subclass's own kind, with what it holds
        for name, cell in _compat.children(self).items():
            _compat.set_child(other, name, opt if cell is self.opt else cell)
        other.group_positions, other._views = made.group_positions, {}
        other.warn_that_none_is_chosen = made.warn_that_none_is_chosen
        return other

    def _check_held(self) -> None:
        """Refuse a subclass that holds optimizers over the one that is replaced."""
        children = [cell for cell in _compat.children(self).values() if cell is not self.opt]
        held = {**_compat.own_attributes(self), "_views": None, "children": children}
        cells = [thing for thing in leaves(held) if isinstance(thing, nn.Cell)]
        within = [one for cell in cells for _, one in cell.cells_and_names()]
        if any(isinstance(one, nn.Optimizer) for one in within):
            raise ValueError(
                f"{type(self).__name__} holds optimizers that were made from the one that less_bn "
                "or gradient centralization replaces: override over_other_parameters(opt), to make "
                "another one over opt"
            )

    def get_lr(self) -> Tensor | tuple[Tensor, ...]:
        """Return the learning rate of this step, as the plain optimizer does."""
        return self.base.get_lr()

    def get_lr_parameter(self, param: Parameter | Sequence[Parameter]) -> Tensor | list[Tensor]:
        """Return the learning rate that belongs to a parameter, or to each of a list."""
        return self.base.get_lr_parameter(param)

    def get_weight_decay(self) -> Tensor | tuple[Tensor, ...]:
        """Return the weight decay of this step, as the plain optimizer does."""
        return self.opt.get_weight_decay()

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Update all parameters, as the plain optimizer does."""
        return ops.depend(self.opt(gradients), self.warn_that_none_is_chosen())

    def _positions(self, groups: Sequence[Iterable[Any]] | None) -> tuple[tuple[int, ...], ...]:
        if groups is None:
            return (tuple(range(len(self.parameters))),)
        if not isinstance(groups, (tuple, list)):
            raise TypeError(f"train_parameter_groups must be a tuple or list, got {shown(groups)}")
        if not groups:
            raise ValueError(
                "train_parameter_groups must have at least one group: give None for one group"
            )
        found = tuple(parameter_positions(self.opt, _flat(group)) for group in groups)
        for number, positions in enumerate(found):
            if not positions:
                raise ValueError(
                    f"train_parameter_groups[{number}] must hold at least one parameter: "
                    "leave it out"
                )
        return found


def prepare_first_step(optimizer: nn.Optimizer) -> None:
    """Write, before the first step, the state that some optimizers set up in it.

    At global step 1, Rprop and ASGD write the learning rate into their step sizes and rates. A
    parameter frozen then would never get them. For parameters trained then, nothing changes. Other
    optimizers, and those that have begun, are left alone.
    """
    state = {nn.Rprop: "step_size", nn.ASGD: "eta"}
    names = [name for kind, name in state.items() if isinstance(optimizer, kind)]
    if not names or int(optimizer.global_step.asnumpy()[0]) != 0:
        return
    for place, parameter in enumerate(getattr(optimizer, names[0])):
        rate = optimizer.learning_rate
        rate = rate[place] if optimizer.is_group_lr else rate
        if isinstance(rate, nn.Cell):
            rate = rate.construct(Tensor([0], ms.int32))
        first = np.full(parameter.shape, rate.asnumpy().reshape(()), np.float32)
        parameter.set_data(Tensor(first, parameter.dtype))


def _flat(group: Iterable[Any]) -> list[Parameter]:
    """Return the Parameters of a group given as Parameters or as optimizer dicts."""
    if isinstance(group, (str, bytes, Parameter, dict)) or not isinstance(group, Iterable):
        raise TypeError(
            "every entry of train_parameter_groups must be a list of Parameters, got "
            f"{shown(group)}"
        )
    members = list(group)
    for one in members:
        ignored = sorted(set(one) - {"params", "order_params"}) if isinstance(one, dict) else ()
        if ignored:
            warn(
                f"train_parameter_groups sets {', '.join(ignored)} of some parameters, which has "
                "no effect: the optimizer, opt, has these settings"
            )
    return members_of(members)


def rebuilt_with_groups(
    optimizer: nn.Optimizer,
    removed: Iterable[Parameter] = (),
    added: Iterable[Parameter] = (),
    centralize: Centralize = None,
) -> nn.Optimizer:
    """Return ``base.rebuild.rebuilt`` with the optimizer's state; keep a FreezeOpt's groups."""
    if isinstance(optimizer, FreezeOpt):
        plain = rebuilt(optimizer.opt, removed, added, centralize, carry_state=True)
        return optimizer.over_other_parameters(plain)
    return rebuilt(optimizer, removed, added, centralize, carry_state=True)
