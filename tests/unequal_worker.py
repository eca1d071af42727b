"""What ranks find out before they train when they were not given the same."""

from __future__ import annotations

import contextlib
import tempfile
import warnings

import mindspore as ms
import nets
import numpy as np
from mindspore import Tensor, experimental, nn

from mindspore_boost_ext import (
    BoostModel,
    BoostWarning,
    FreezeOpt,
    make_train_step,
    restore,
    save_checkpoint,
)

OFF = {"boost": {"mode": "disable_all"}}


def settings(rank, name):
    """Return level and settings of a rank in a case."""
    level, switches = "O1", dict.fromkeys(("less_bn", "grad_freeze"), False)
    config = {"boost": {"mode": "manual", **switches}}
    if name == "clip" and rank == 0:
        config["gradients"] = {"clip_norm": 1.0}
    elif name in ("window", "micro-batches"):
        config["boost"]["grad_accumulation"] = True
        more = rank if name == "window" else 0
        config["grad_accumulation"] = {"grad_accumulation_step": 2 + more}
    elif name == "first batch":
        config["boost"]["short_schedule"] = True
        config["short_schedule"] = {"total_steps": 4, "parts": 2, "if_unfit": "skip"}
    elif name == "labels":
        config["boost"]["short_schedule"] = True
        config["short_schedule"] = {"total_steps": 4, "if_unfit": "skip"}
    elif name == "smoothing":
        config["label_smoothing"] = {"if_unfit": "skip"}
    elif name == "padding":
        config["boost"]["seq_length_warmup"] = True
        section = {"phases": [[0.5, 0.4]], "total_steps": 4, "if_unfit": "skip"}
        config["seq_length_warmup"] = section
    elif name == "lengths":
        config["boost"]["seq_length_warmup"] = True
        section = {"phases": [[0.25, 0.25], [0.25, 0.5]], "total_steps": 4, "multiple": 2}
        config["seq_length_warmup"] = section
    elif name == "broadcast":
        config["boost"]["grad_freeze"] = True
        window = {"schedule": "adaptive", "adaptive_window": 1}
        config["grad_freeze"] = {"param_groups": 3, "prefix_fraction": 0.5, **window}
    elif name == "broadcast place":
        config["boost"]["grad_freeze"] = True
        config["grad_freeze"] = {"param_groups": 3, "schedule": [0, 1], "total_steps": 2}
    elif name == "level" and rank == 1:
        level, config = "O0", None
    return {"boost_level": level, "boost_config_dict": config}


class OverPlaces(nn.Cell):
    """Sees the mean over the places of a sequence that are not padding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(1, nets.CLASSES)

    def construct(self, x):
        mask = (x > 0).astype(ms.float32)
        return self.head(((x * mask).sum(1) / mask.sum(1)).expand_dims(1))


def model_of_rank(rank, name):
    """Build the Model of a case; ``net`` is trained by it."""
    ms.set_seed(rank if name in ("seed", "broadcast") or "own loop" in name else 7)
    hidden = 5 if name == "shape" and rank == 1 else 6
    net = nn.SequentialCell(nn.Dense(nets.FEATURES, hidden), nn.Dense(hidden, nets.CLASSES))
    if name in ("broadcast", "broadcast place"):
        inner = [nn.Dense(hidden, hidden) for _ in range(4)]
        net = nn.SequentialCell(net[0], *inner, net[1])
    if name == "broadcast files":
        net = nn.SequentialCell(net[0], nn.BatchNorm1d(hidden), net[1])
    net = OverPlaces() if name in ("padding", "lengths") else net
    falling = [0.4, 0.3, 0.2, 0.1]
    rate = {
        "rate": 0.1 * (1 + rank),
        "again": 0.1 * (1 + rank),
        "first batch": falling,
        "labels": falling,
    }.get(name, 0.1)
    if name == "rates":
        rate = [*falling[:3], 0.1 * (1 + rank)]
    elif name == "schedule":
        rate = nn.CosineDecayLR(0.0, 0.1 * (1 + rank), 4)
    weights = net.trainable_params()
    if name == "order" and rank == 1:  # as by a set of names, whose order is the process's own
        weights = weights[::-1]
    optimizer = nn.Momentum(weights, rate, 0.9)
    if name == "own seed":  # an int of the rank's own, such as for noise
        optimizer.seed = ms.Parameter(Tensor(rank, ms.int32), name="seed", requires_grad=False)
    if name == "freezing":
        head = net[1].trainable_params()
        groups = [net.trainable_params(), head]
        optimizer = FreezeOpt(optimizer, groups, [0, rank])
    elif name == "alone" and rank == 0:  # a Model to evaluate with
        twin = nn.Dense(nets.FEATURES, nets.CLASSES)
        ms.Model(twin, nets.loss_fn(), nn.SGD(twin.trainable_params(), 0.1))
    manager = {}
    if name == "scale":
        manager["loss_scale_manager"] = ms.FixedLossScaleManager(64.0 + rank, False)
    elif name == "broadcast place":
        manager["loss_scale_manager"] = ms.DynamicLossScaleManager(64)
    elif name == "dynamic scale":
        manager["loss_scale_manager"] = ms.DynamicLossScaleManager(64 * (1 + rank))
    elif name == "scale window":
        manager["loss_scale_manager"] = ms.DynamicLossScaleManager(64, scale_window=2 + rank)
    loss = nn.MSELoss() if name == "labels" else nets.loss_fn()
    return BoostModel(net, loss, optimizer, **settings(rank, name), **manager), net


NAMES = (
    "clip",
    "window",
    "level",
    "shape",
    "rate",
    "rates",
    "schedule",
    "scale",
    "dynamic scale",
    "scale window",
    "batches",
    "first batch",
    "labels",
    "smoothing",
    "padding",
    "lengths",
    "freezing",
    "again",
    "later",
    "loop",
    "alone",
    "broadcast",
    "broadcast place",
    "broadcast files",
    "order",
    "counter",
    "experimental",
    "micro-batches",
    "moments",
    "own seed",
    "own loop",
    "own loop O0",
    "seed",
    "equal",
)
# In GRAPH_MODE alone MindSpore broadcasts. The others left out there are compared on the host, and
# would only be compiled to be trained after that.
NOT_RUN = {
    "graph": ("moments", "own seed", "later"),
    "pynative": ("broadcast", "broadcast place", "broadcast files"),
}


def data_of_rank(rank, name):
    """Return the batches of a case."""
    if name == "first batch":  # rank 1 has too few samples to cut it in two
        size = 64 if rank == 0 else 56
        return nets.dataset(size // nets.BATCH, batch=size)
    if name == "labels":  # on rank 1 they are no shares of classes
        x, y = np.ones((2, nets.BATCH, nets.FEATURES), np.float32), np.eye(3, dtype=np.float32)
        y = y[np.zeros((2, nets.BATCH), int)] + rank
        return ms.dataset.NumpySlicesDataset((x, y), shuffle=False)
    if name == "smoothing":  # on rank 1 each place of a sequence has a label
        x = np.ones((2, nets.BATCH, nets.FEATURES), np.float32)
        y = np.zeros((2, nets.BATCH, *[4] * rank), np.int32)
        return ms.dataset.NumpySlicesDataset((x, y), shuffle=False)
    if name == "lengths":  # on rank 1 two phases have one length
        x = np.ones((2, nets.BATCH, 8 if rank == 0 else 4), np.float32)
        y = np.zeros((2, nets.BATCH), np.int32)
        return ms.dataset.NumpySlicesDataset((x, y), shuffle=False)
    if name == "padding":  # on rank 1 the first places
        x = np.ones((2, nets.BATCH, nets.FEATURES), np.float32)
        x[:, :, 0] -= rank
        y = np.zeros((2, nets.BATCH), np.int32)
        return ms.dataset.NumpySlicesDataset((x, y), shuffle=False)
    return nets.dataset({"batches": 2 + rank, "broadcast": 4}.get(name, 2))


def set_state(step, rank, name):
    """Give a step on rank 1 the state of another training, as checkpoints of two times would."""
    if name == "counter":
        step.optimizer.global_step.set_data(Tensor([3 * rank], ms.int32))
    elif name == "moments":
        moment = step.optimizer.moments[0]
        moment.set_data(Tensor(np.full(moment.shape, rank, np.float32)))
    elif name == "broadcast place":  # as by a checkpoint that rank 0 alone has loaded
        step.optimizer.position.set_data(Tensor(1 - rank, ms.int32))
        step.optimizer.learning_rate.set_data(Tensor(0.1 * (2 - rank), ms.float32))
        step.scale_sense.set_data(Tensor(64.0 * (2 - rank), ms.float32))
    elif name == "broadcast files":
        mean = step.network.parameters_dict()["1.moving_mean"]
        mean.set_data(Tensor(np.full(mean.shape, 100 * rank, np.float32)))
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(step, f"{folder}/{rank}.ckpt", append_dict={"epoch": 1})
            restore(step, f"{folder}/{{rank}}.ckpt")
    elif name == "micro-batches":
        step.window_part.counter.set_data(Tensor(rank, ms.int32))


def plain_loop(net, rate, **level):
    """Train in a loop of one's own; without a level by MindSpore's own step."""
    optimizer = nn.SGD(net.trainable_params(), rate)
    step = make_train_step(net, nets.loss_fn(), optimizer, **level)
    for x, y in nets.batches(2):
        step(Tensor(x), Tensor(y))


def outcome(rank, name):
    """Train a case; return what was raised or warned of, and whether a weight has moved."""
    broadcast = {"parameter_broadcast": name.startswith("broadcast")}
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, **broadcast)
    found, weights = [], None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model, net = model_of_rank(rank, name)
            weights = nets.weights(net)
            set_state(model.train_network, rank, name)
            if name == "again":  # what was refused once is refused as long as it differs
                with contextlib.suppress(ValueError):
                    model.train(1, data_of_rank(rank, name), dataset_sink_mode=False)
            if name == "later":  # a callback sets the rate of one rank
                model.train(1, data_of_rank(rank, name), dataset_sink_mode=False)
                model.train_network.optimizer.learning_rate.set_data(Tensor(0.1 * (1 + rank)))
                weights = nets.weights(net)
            if name == "loop":  # of one's own, at level O0
                plain_loop(net, 0.1 * (1 + rank))
            if name == "experimental":  # which counts in state_step
                optimizer = experimental.optim.Adam(net.trainable_params(), 0.1)
                optimizer.state_step.set_data(Tensor([7 * rank], ms.int32))
                make_train_step(net, nets.loss_fn(), optimizer)(*map(Tensor, nets.batches(1)[0]))
            if name.startswith("own loop"):
                level = {} if name.endswith("O0") else {"level": "O1", "config": OFF}
                plain_loop(net, 0.1, **level)
            else:
                model.train(1, data_of_rank(rank, name), dataset_sink_mode=False)
        except ValueError as error:
            found.append(str(error))
    found += [str(one.message) for one in warned if isinstance(one.message, BoostWarning)]
    moved = weights is not None and any(
        not np.array_equal(value, nets.weights(net)[key]) for key, value in weights.items()
    )
    result = {"messages": found, "moved": moved}
    if name == "broadcast":
        result["largest changes"] = model.train_network.optimizer.fastest.asnumpy().tolist()
    if name == "broadcast place":
        step = model.train_network
        result["place"] = int(step.optimizer.position.asnumpy())
        held = (step.optimizer.learning_rate, step.scale_sense)
        result["rate and scale"] = [float(one.asnumpy()) for one in held]
        result["sums"] = [float(one.sum()) for one in nets.weights(net).values()]
    if name == "broadcast files":
        result["mean"] = nets.weights(net)["1.moving_mean"].tolist()
    if name == "lengths":
        result["begins"] = model.train_network.report()["seq_length_warmup"].reason
    return result


def outcomes(rank, mode):
    """Return what this rank finds in each case of a mode."""
    return {name: outcome(rank, name) for name in NAMES if name not in NOT_RUN[mode]}
