"""Every algorithm goes through one list of checks; a new one joins by an entry in ``ALGORITHMS``.

Off is bit-identical to plain training; on, the loss falls; the report says so; a run that is saved
and loaded into fresh objects continues bit-identically; the same seed gives the same weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor

from mindspore_boost_ext import AutoBoost, GroupLossScaleManager

STEPS, RESUME_AT = 12, 7  # the resume point divides no window and no schedule


def switched(**switches):
    """Return a configuration in which just these switches are on."""
    off = dict.fromkeys(AutoBoost().boost_config, False)
    return {"boost": {"mode": "manual", **off, **switches}}


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What the suite needs to know of an algorithm.

    ``on`` switches it on, with settings that act within a few steps; ``row`` is its row in the
    report (None for no algorithm at all); ``net`` makes the network; ``model`` gives further
    arguments of ms.Model from the network; ``gains`` are parameters that the network itself gains.
    """

    name: str
    on: dict[str, Any]
    row: str | None = None
    net: Callable[[], Any] = nets.MLP
    model: Callable[[Any], dict[str, Any]] = lambda net: {}
    gains: tuple[str, ...] = ()


def grouped_net():
    """A network with markers between two groups of loss scales."""
    manager = GroupLossScaleManager([64.0, 4.0], [], growth_factor=2.0)

    class Marked(nets.MLP):
        def construct(self, x):
            x = self.relu(self.first(manager(x, 0, 1)))
            return manager(self.second(manager(x, 1, 2)), 2, 3)

    net = Marked()
    manager.loss_scale_groups = [net.first.trainable_params(), net.second.trainable_params()]
    net.__dict__["groups"] = manager  # beside the network's own attributes, so that names stay
    return net


ALGORITHMS = [
    Algorithm("nothing", switched()),
    Algorithm(
        "dynamic loss scale",
        switched(),
        "overflow detection",
        model=lambda net: {"loss_scale_manager": ms.DynamicLossScaleManager(2**10, 2, 5)},
    ),
    Algorithm(
        "loss_scale_group",
        switched(loss_scale_group=True),
        "loss_scale_group",
        net=grouped_net,
        model=lambda net: {"loss_scale_manager": net.groups},
    ),
]
ALGORITHMS += [
    Algorithm(
        "grad_accumulation",
        {**switched(grad_accumulation=True), "grad_accumulation": {"grad_accumulation_step": 3}},
        "grad_accumulation",
    ),
    Algorithm(
        "grad_freeze",
        {
            **switched(grad_freeze=True),
            "grad_freeze": {"param_groups": 2, "freeze_p": 0.5, "total_steps": 5},
        },
        "grad_freeze",
        net=nets.Deep,
    ),
    Algorithm(
        "grad_freeze, prefix",
        {
            **switched(grad_freeze=True),
            "grad_freeze": {"param_groups": 3, "schedule": "cubic", "total_steps": 10},
        },
        "grad_freeze",
        net=nets.Deep,
    ),
]
ALGORITHMS += [
    Algorithm(
        "less_bn, head",
        {**switched(less_bn=True), "less_bn": {"multiplier": 4.0}},
        "less_bn",
        gains=("second.multiplier",),
    ),
    Algorithm(
        "thor",
        {**switched(thor=True), "thor": {"damping": 0.1, "frequency": 3, "moving_average": 0.5}},
        "thor",
    ),
    Algorithm(
        "thor, trace rule, dynamic loss scale",
        {**switched(thor=True), "thor": {"damping": 0.1, "frequency": 2, "trace_rule": [0.1, 0]}},
        "thor",
        model=lambda net: {"loss_scale_manager": ms.DynamicLossScaleManager(2**10, 2, 5)},
    ),
]
ALGORITHMS += [
    Algorithm(
        f"dim_reduce, {method}",
        {
            **switched(dim_reduce=True),
            "dim_reduce": {"method": method, "n_components": 8, "pca_mat_path": nets.basis_file()},
        },
        "dim_reduce",
    )
    for method in ("p-bfgs", "p-sgd", "twa")
]
# Counters of MindSpore's own dynamic loss scale, under the names that MindSpore gave them.
MINDSPORES_OWN = {"current_iterator_step", "last_overflow_iterator_step"}
everyone = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)


def build(algorithm, config, level="O1", model_arguments=None):
    ms.set_seed(3)
    net = algorithm.net()
    arguments = {
        "optimizer": nets.momentum(net.trainable_params()),
        "boost_level": level,
        "boost_config_dict": config,
    }
    arguments.update(model_arguments(net) if model_arguments else {})
    return net, ms.Model(net, nets.loss_fn(), **arguments)


def switched_on(algorithm):
    return build(algorithm, algorithm.on, model_arguments=algorithm.model)


def run(model, steps):
    losses = []
    for x, y in steps:
        output = model.train_network(Tensor(x), Tensor(y))
        losses.append(float((output[0] if isinstance(output, tuple) else output).asnumpy()))
    return losses


@everyone
def test_off_is_bit_identical_to_plain_training(mode, algorithm):
    off = copy.deepcopy(algorithm.on)
    off["boost"].update(dict.fromkeys(AutoBoost().boost_config, False))
    sections = [name for name in off if name != "boost"]
    for name in sections:  # a section without its switch would be told as ineffective
        del off[name]
    steps = nets.batches(STEPS)
    net, model = build(algorithm, off)
    plain_net, plain = build(algorithm, None, level="O0")
    assert run(model, steps) == run(plain, steps)
    nets.assert_same_weights(net, plain_net)


@everyone
def test_on_the_loss_is_finite_and_falls(mode, algorithm):
    net, model = switched_on(algorithm)
    ((x, _),) = nets.batches(1)
    losses = run(model, [(x, x.argmax(axis=1).astype(np.int32))] * 60)
    assert np.isfinite(losses).all()
    # One batch with labels that can be learned: plain runs fall to 0.5-0.7, a prefix frozen early
    # or a window of 3 to 0.8.
    assert losses[-1] < 0.9 * losses[0]
    model.train(1, nets.dataset(4), dataset_sink_mode=False)  # no window is longer
    assert all(np.isfinite(value).all() for value in nets.weights(net).values())


@everyone
def test_report_says_what_was_applied(algorithm):
    _, model = switched_on(algorithm)
    report = model.train_network.report()
    applied = {row.algorithm for row in report.rows if row.status == "applied"}
    applied = {name for name in applied if not name.startswith("machine: ")}  # the import's doing
    if algorithm.row in ("loss_scale_group", "thor"):
        applied.discard("overflow detection")  # every scale needs it
    if algorithm.row == "less_bn":
        applied.discard("gradient centralization")  # it has a switch inside that of less_bn
    assert applied == ({algorithm.row} if algorithm.row else set())


@everyone
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(mode, algorithm, tmp_path):
    steps = nets.batches(STEPS)
    _, whole = switched_on(algorithm)
    expected = run(whole, steps)

    _, first = switched_on(algorithm)
    run(first, steps[:RESUME_AT])
    path = str(tmp_path / "run.ckpt")
    ms.save_checkpoint(first.train_network, path)

    _, second = switched_on(algorithm)
    not_loaded, _ = ms.load_param_into_net(second.train_network, ms.load_checkpoint(path))
    assert not not_loaded
    assert run(second, steps[RESUME_AT:]) == expected[RESUME_AT:]
    nets.assert_same_weights(second.train_network, whole.train_network)


@everyone
def test_the_same_seed_gives_the_same_weights(mode, algorithm):
    runs = []
    for _ in range(2):
        _, model = switched_on(algorithm)
        run(model, nets.batches(STEPS))
        runs.append(model.train_network)
    nets.assert_same_weights(*runs)


@everyone
def test_state_has_stable_names(algorithm):
    """User parameters keep their names; own state is named ``boost.<algorithm>.<name>``."""
    plain_net, plain = build(algorithm, None, level="O0")
    net, model = switched_on(algorithm)
    names = [name for name in nets.weights(net) if name not in algorithm.gains]
    assert names == list(nets.weights(plain_net))
    own = nets.weights(model.train_network).keys() - nets.weights(plain.train_network).keys()
    own = {name for name in own if not name.endswith(algorithm.gains)}
    # accum and stat: the SGD that takes the place of the user's optimizer under dim_reduce.
    assert all(name.startswith(("boost.", "accum.", "stat.")) for name in own - MINDSPORES_OWN)
