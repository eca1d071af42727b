"""Rebuilding an optimizer: other parameters, other groups, centralized gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Union

from mindspore import Parameter, nn

from mindspore_boost_ext.base.arguments import (
    ORDER,
    Group,
    base_of,
    construct_like,
    groups_of,
    members_of,
)
from mindspore_boost_ext.base.centralization import (
    UNTOUCHED,
    install_centralization,
    installed_axes,
    output_axes,
    output_axis_of,
    owned_parameters,
)
from mindspore_boost_ext.base.state import share_state
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import NoEffectWarning, warn

Centralize = Union[Mapping[str, int], Container[Any], None]


def rebuilt(
    optimizer: nn.Optimizer,
    removed: Iterable[Parameter | str] = (),
    added: Iterable[Parameter] = (),
    centralize: Centralize = None,
    carry_state: bool = False,
) -> nn.Optimizer:
    """Return an optimizer like another, over other parameters or with centralized gradients.

    Args:
        optimizer (nn.Optimizer): an optimizer of ``mindspore.nn``, also under ``nn.LARS``, or one
            of a class whose ``__init__`` keeps its arguments. It does not change.
        removed (Iterable[Union[Parameter, str]]): parameters to train no longer, or their names;
            those that the optimizer does not train are ignored. Default: none.
        added (Iterable[Parameter]): parameters to train as well. One with the name of a removed one
            takes its place, in its group and order. The others come last, with the default learning
            rate and weight decay of the optimizer. Default: none.
        centralize (Union[dict, Container, None]): parameters with gradients to centralize: names or
            Parameters, or a dict from names to output axes, as ``output_axes`` returns it. Groups
            with ``grad_centralization``, and what ``optimizer`` centralizes already, are included
            in any case. Default: None, no others.
        carry_state (bool): as for :meth:`OptimizerProcess.generate_new_optimizer`.
            Default: ``False``.

    Returns:
        nn.Optimizer of the same class, with the same hyper-parameters and the present learning
        rates; every parameter keeps the settings of its group.

    Raises:
        TypeError: if ``optimizer`` is not an ``nn.Optimizer``, wraps one and is not LARS, or its
            arguments are not known.
        ValueError: if no parameter is left, or an added one is trained already.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext.base.rebuild import rebuilt
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> new = rebuilt(optimizer, removed=["bias"], centralize=["weight"])
        >>> type(new).__name__, [parameter.name for parameter in new.parameters]
        ('Momentum', ['weight'])
    """
    params = changed(groups_of(optimizer), list(removed), list(added))
    return _made(optimizer, params, centralize, carry_state)


def _made(
    optimizer: nn.Optimizer, params: Sequence[Any], centralize: Centralize, carry_state: bool
) -> nn.Optimizer:
    """Return an optimizer like another over ``params``, which centralizes what is asked for."""
    if isinstance(centralize, (str, Iterator)):
        centralize = (centralize,) if isinstance(centralize, str) else tuple(centralize)
    new = construct_like(optimizer, params)
    base, before = base_of(new), installed_axes(base_of(optimizer))
    flags = getattr(base, "grad_centralization_flags", (False,) * len(base.parameters))
    flagged = zip(base.parameters, flags)
    axes = [before.get(id(one), _axis(one, centralize, flag)) for one, flag in flagged]
    if any(axis != UNTOUCHED for axis in axes) or any(flags):
        install_centralization(base, axes)
    if carry_state:
        share_state(optimizer, new)
    return new


def _axis(parameter: Parameter, centralize: Centralize, in_group: bool) -> int:
    """Return the output axis of a parameter if its gradient is to be centralized."""
    if isinstance(centralize, Mapping) and parameter.name in centralize:
        return int(centralize[parameter.name])
    if in_group or (centralize is not None and _holds(centralize, parameter)):
        return output_axis_of(parameter)
    return UNTOUCHED


def _holds(container: Container[Any], parameter: Parameter) -> bool:
    """Return whether a container holds a parameter (the very object) or its name."""
    if not isinstance(container, Iterable):
        return parameter.name in container
    names = [one for one in container if isinstance(one, str)]
    return parameter.name in names or any(one is parameter for one in container)


# ---- Parameters and groups ----


def changed(
    params: Sequence[Any], removed: Sequence[Parameter | str], added: Sequence[Parameter]
) -> list[Any]:
    """Return Parameters or groups, without ``removed`` and with ``added``."""
    trained = members_of(params)
    leaving = {id(one) for one in trained if _holds(removed, one)}
    kept = {one.name for one in trained if id(one) not in leaving}
    for one in added:
        if one.name in kept:
            raise ValueError(
                f"added must be parameters that the optimizer does not train yet, got {one.name!r}"
            )
    by_name = {one.name: one for one in added}
    replacements = {id(one): by_name.pop(one.name, None) for one in trained if id(one) in leaving}

    def edited(parameters: Iterable[Parameter]) -> list[Parameter]:
        replaced = (replacements.get(id(parameter), parameter) for parameter in parameters)
        return [one for one in replaced if one is not None]

    last = list(by_name.values())
    result: list[Any] = []
    if is_grouped(params):
        for group in (*params, {"params": last}):
            if ORDER in group:
                result.append({ORDER: edited(group[ORDER]) + last})
            elif members := edited(group["params"]):
                result.append({**group, "params": members})
    else:
        result = edited(params) + last
    if not members_of(result):
        raise ValueError("removed must leave the optimizer at least one parameter to train")
    return result


def is_grouped(params: Sequence[Any]) -> bool:
    """Return whether parameters are groups; raise unless all are Parameters or all are dicts."""
    if not params:
        raise ValueError("the optimizer must have at least one parameter, got an empty list")
    for kind in (Parameter, dict):
        if all(isinstance(entry, kind) for entry in params):
            return kind is dict
    raise TypeError(
        f"parameters must be a list of Parameters, or a list of dicts, got {shown(params)}"
    )


# ---- The steps of mindspore.boost ----


# What an OptimizerProcess has read from the old optimizer.
_READ = ("single_opt", "opt_class", "is_lars", "learning_rate")


class OptimizerProcess:
    """Makes a new optimizer from another: with other parameters, or with centralized gradients.

    It has the methods of ``mindspore.boost``. It centralizes plain and grouped parameters. It
    splits no group, so a group's learning rate stays one Parameter.

    Source: Yong et al., Gradient Centralization, ECCV 2020.

    Args:
        opt (Cell): an optimizer of ``mindspore.nn``, also under ``nn.LARS``, or one of a class
            whose ``__init__`` keeps its arguments. It is left as it is.

    Attributes:
        origin_params (list): the parameters or groups for the new optimizer, with present learning
            rates; can be set.
        single_opt (nn.Optimizer): the optimizer; for LARS, the one inside.
        opt_class (type): its class.
        is_lars (bool): whether ``opt`` is ``nn.LARS``.

    Raises:
        TypeError: if ``opt`` is not an ``nn.Optimizer``, or wraps one and is not LARS.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import OptimizerProcess
        >>> net = nn.SequentialCell(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Dense(16, 2))
        >>> process = OptimizerProcess(nn.Momentum(net.trainable_params(), 0.1, 0.9))
        >>> process.add_grad_centralization(net)
        >>> optimizer = process.generate_new_optimizer()
        >>> type(optimizer).__name__, optimizer.grad_centralization_flags
        ('Momentum', (True, True, False))
    """

    def __init__(self, opt: nn.Optimizer) -> None:
        self.single_opt = base_of(opt)
        self.opt_class = type(self.single_opt)
        self.is_lars = isinstance(opt, nn.LARS)
        self.learning_rate: Any = self.single_opt.learning_rate
        self.origin_params: list[Any] = groups_of(opt)
        self._opt = opt
        self._output_axes: dict[str, int] = {}
        self._marked_groups: list[Any] | None = None
        self._whole_groups: list[Any] = []

    def __setattr__(self, name: str, value: object) -> None:
        """Warn of what the new optimizer does not get."""
        own = type(self).generate_new_optimizer is not OptimizerProcess.generate_new_optimizer
        if name in _READ and not own and self.__dict__.get(name, value) is not value:
            warn(
                f"OptimizerProcess.{name} has no effect on the new optimizer, which is made like "
                "the old one: give it to the old one, or set origin_params",
                NoEffectWarning,
            )
        super().__setattr__(name, value)

    @staticmethod
    def build_params_dict(network: nn.Cell) -> dict[int, nn.Cell]:
        """Return for each parameter of a network the Cell it belongs to.

        Args:
            network (Cell): the network.

        Returns:
            dict, ``id`` of the parameter -> Cell; if several Cells share it, the last of them.
        """
        return {id(parameter): cell for parameter, cell in owned_parameters(network)}

    @staticmethod
    def build_gc_params_group(
        params_dict: Mapping[int, nn.Cell], parameters: Sequence[Any]
    ) -> list[Group]:
        """Split groups into those to centralize, marked ``grad_centralization``, and the others.

        Args:
            params_dict (dict): ``id`` of a parameter -> its Cell, from ``build_params_dict``.
            parameters (list): groups, or Parameters, which are grouped first.

        Returns:
            list[dict], new groups; every parameter keeps the settings of its group. Weights of
            transposed convolutions are not marked: only :meth:`add_grad_centralization` can
            centralize them.
        """
        groups = parameters if is_grouped(parameters) else _grouped(list(parameters))
        return _marked(groups, lambda one: output_axis_of(one, params_dict.get(id(one))) == 0)

    def add_grad_centralization(self, network: nn.Cell, exclude: Iterable[str] = ()) -> None:
        """Centralize the gradients of a network's weights in the new optimizer.

        Args:
            network (Cell): the network. It shows which convolutions are grouped or transposed, and
                which Dense is the normalised head. If ``origin_params`` are groups, a subclass with
                its own ``generate_new_optimizer`` finds the marks of :meth:`build_gc_params_group`
                there.
            exclude (Iterable[str]): patterns of names to leave out as well, as for ``fnmatch``.
                Default: none.
        """
        self._output_axes = output_axes(network, exclude)
        own = type(self).generate_new_optimizer is not OptimizerProcess.generate_new_optimizer
        if own and is_grouped(self.origin_params):  # the subclass reads the marks of groups
            self._whole_groups = self.origin_params
            self._marked_groups = self.origin_params = _marked(
                self.origin_params, lambda one: self._output_axes.get(one.name) == 0
            )
        if not any(one.name in self._output_axes for one in members_of(self.origin_params)):
            warn(
                "gradient centralization has no effect: no weight of the network that the "
                "optimizer trains has more than one input per output",
                NoEffectWarning,
            )

    def generate_new_optimizer(self, carry_state: bool = False) -> nn.Optimizer:
        """Return the new optimizer: same class, hyper-parameters and learning rates.

        Args:
            carry_state (bool): if True, moments, global step and learning rates continue: both
                optimizers then have the same Parameters. If False, they start anew, with the
                present rates. Default: ``False``.

        Raises:
            TypeError: if the arguments of the optimizer cannot be known.
            ValueError: if ``origin_params`` is empty.
        """
        params = self.origin_params
        if params is self._marked_groups:  # only a method of a subclass needs the marks
            params = self._whole_groups
        is_grouped(params)
        return _made(self._opt, params, self._output_axes, carry_state)


class ParameterProcess:
    """Groups parameters for an optimizer, and sets the points where gradient reductions are split.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import ParameterProcess
        >>> net = nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 2))
        >>> weight, bias, *rest = net.trainable_params()
        >>> groups = [{"params": [weight], "lr": 0.1}, {"params": [bias, *rest]}]
        >>> new = ParameterProcess.generate_group_params([weight, bias], groups)
        >>> [[one.name for one in group["params"]] for group in new]
        [['0.weight'], ['0.bias']]
        >>> parameters = ParameterProcess().assign_parameter_group(net.trainable_params(), [2])
        >>> [one.comm_fusion for one in parameters]
        [1, 1, 2, 2]
    """

    def __init__(self) -> None:
        self._fusion_group = 1

    @staticmethod
    def generate_group_params(
        parameters: Iterable[Parameter], origin_params: Iterable[Any]
    ) -> list[Group]:
        """Return groups for other parameters, with the settings of the groups so far.

        Args:
            parameters (list): the parameters to train. One with the name of an earlier one takes
                its place and settings; the others form a group of their own with the defaults of
                the optimizer.
            origin_params (list): the parameters or groups of the optimizer so far. If these are
                not groups, parameters named ``gamma`` or ``beta`` get a group without weight decay,
                as MindSpore treats them.

        Returns:
            list[dict], groups, none of them empty; ``order_params``, if there is one, holds
            ``parameters``.

        Raises:
            TypeError: if ``origin_params`` holds anything but Parameters, or anything but dicts.
            ValueError: if ``parameters`` or ``origin_params`` is empty.
        """
        new, origin = list(parameters), list(() if origin_params is None else origin_params)
        if not is_grouped(origin):
            return _grouped(new)
        groups = changed(origin, members_of(origin), new)
        return [{ORDER: new} if ORDER in group else group for group in groups]

    def assign_parameter_group(
        self, parameters: Sequence[Parameter], split_point: int | Sequence[int] | None = None
    ) -> Sequence[Parameter]:
        """Divide parameters into fusion groups, whose gradients are reduced over ranks together.

        A further call goes on counting: its first group has the last number of the call before.

        Args:
            parameters (list): the parameters, in their order. Anything but a list or tuple is
                returned as it is.
            split_point (Union[int, list, tuple], optional): positions in ``parameters`` at which
                a new group begins; those past the end are ignored. Default: None, in the middle.

        Returns:
            ``parameters``, each with its group as ``comm_fusion``, from 1 on.

        Raises:
            TypeError: if ``split_point`` holds anything but ints.
            ValueError: if one of them is negative.
        """
        if not isinstance(parameters, (list, tuple)) or not parameters:
            return parameters
        points = _split_points(split_point) or {len(parameters) // 2}
        for place, parameter in enumerate(parameters):
            self._fusion_group += place in points
            parameter.comm_fusion = self._fusion_group
        return parameters


def _marked(groups: Sequence[Group], is_chosen: Callable[[Parameter], bool]) -> list[Group]:
    """Split groups into those to centralize, which get the mark, and the others.

    MindSpore's optimizer takes axis 0 of a marked weight for the outputs; in a transposed
    convolution these are axis 1. So callers choose weights of output axis 0 only.
    """
    result: list[Group] = []
    for group in groups:
        if ORDER in group:
            result.append(group)
            continue
        members = list(group["params"])
        for mark in ({"grad_centralization": True}, {}):
            part = [member for member in members if is_chosen(member) == bool(mark)]
            if part:
                result.append({**group, "params": part, **mark})
    return result


def _split_points(given: int | Sequence[int] | None) -> set[int]:
    if given is None:
        return set()
    points = given if isinstance(given, (list, tuple)) else (given,)
    for point in points:
        if isinstance(point, bool) or not isinstance(point, int):
            raise TypeError(f"split_point must be an int or a list of ints, got {shown(given)}")
        if point < 0:
            raise ValueError(f"split_point must be >= 0, got {shown(given)}")
    return set(points)


def _grouped(parameters: list[Parameter]) -> list[Group]:
    """Return groups for ungrouped parameters, without decay for those MindSpore does not decay."""
    is_grouped(parameters)
    whole = [one for one in parameters if "gamma" in one.name or "beta" in one.name]
    decayed = [parameter for parameter in parameters if not _holds(whole, parameter)]
    if not whole:
        return [{"params": parameters}]
    groups: list[Group] = [{"params": decayed}] if decayed else []
    return [*groups, {"params": whole, "weight_decay": 0.0}, {ORDER: parameters}]
