"""One family of small networks, as a MindSpore Cell and as NumPy float64 with its own backward."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

BN_EPSILON, BN_MOMENTUM, COSINE_EPSILON, AUX_WEIGHT = 1e-5, 0.9, 1e-4, 0.5
SPARE = (2, 3)


@dataclasses.dataclass(frozen=True)
class NetSpec:
    """What a network is made of.

    ``layers`` are (kind, name, settings ...): conv (inputs, outputs, pad_mode, bias), bn (size),
    dense (inputs, outputs, bias), tied (name of a square dense layer, whether transposed), skip
    (place of the layer whose output is added), relu, tanh, flatten, dropout. ``aux`` is the place
    of the layer whose output a second head sees (None: no such head), ``code_tie`` whether the
    network's own code multiplies by the weight of the layer "square", ``spare`` whether there is a
    parameter that nothing uses, ``frozen`` the names of parameters without gradient, ``marks`` the
    places of layers in front of which a new group of loss scales begins.
    """

    shape: tuple[int, ...]
    layers: tuple[tuple[Any, ...], ...]
    features: int
    outputs: int
    head_bias: bool
    aux: int | None
    aux_size: int
    losses: bool
    loss: str
    code_tie: bool
    spare: bool
    frozen: tuple[str, ...]
    marks: tuple[int, ...]
    seed: int


# ---- MindSpore ----


class Tied(nn.Cell):
    """Multiplies by a weight that belongs to another layer, too; it is given afterwards."""

    def __init__(self, transposed):
        super().__init__()
        self.transposed = transposed
        self.weight = None

    def construct(self, x):
        return ops.matmul(x, self.weight.T if self.transposed else self.weight)


class Skip(nn.Cell):
    def construct(self, x):
        return x


def made(kind, *settings):
    if kind == "conv":
        inputs, outputs, pad_mode, bias = settings
        return nn.Conv2d(inputs, outputs, 3, pad_mode=pad_mode, has_bias=bias)
    if kind == "bn":
        return (nn.BatchNorm2d if settings[1] else nn.BatchNorm1d)(settings[0])
    if kind == "dense":
        return nn.Dense(settings[0], settings[1], has_bias=settings[2])
    if kind == "tied":
        return Tied(settings[1])
    others = {"relu": nn.ReLU, "tanh": nn.Tanh, "flatten": nn.Flatten, "skip": Skip}
    return nn.Dropout(p=0.0) if kind == "dropout" else others[kind]()


class Net(nn.Cell):
    """The network of a specification: one output, or a tuple of two."""

    def __init__(self, spec, manager=None):
        super().__init__()
        cells = OrderedDict((name, made(kind, *rest)) for kind, name, *rest in spec.layers)
        self.body = nn.SequentialCell(cells)
        self.head = nn.Dense(spec.features, spec.outputs, has_bias=spec.head_bias)
        self.aux = None if spec.aux is None else nn.Dense(spec.aux_size, 2)
        self.aux_from = spec.aux
        if spec.spare:
            self.spare = Parameter(Tensor(np.zeros(SPARE, np.float32)), name="spare")
        for kind, name, *rest in spec.layers:
            if kind == "tied":
                cells[name].weight = cells[rest[0]].weight
        self.sources = tuple(rest[0] if kind == "skip" else -1 for kind, _, *rest in spec.layers)
        self.marks = tuple(
            spec.marks.index(i) + 1 if i in spec.marks else 0 for i in range(len(spec.layers))
        )
        self.last_group = len(spec.marks)
        self.manager = manager
        self.criterion = Loss(spec)
        for name, value in first_values(spec).items():
            (parameter,) = [one for one in self.get_parameters() if one.name == name]
            parameter.set_data(Tensor(value))
            parameter.requires_grad = name not in spec.frozen

    def outputs(self, x):
        seen = ()
        for place in range(len(self.sources)):
            if self.marks[place] > 0:
                x = self.manager(x, self.marks[place] - 1, self.marks[place])
            x = self.body[place](x)
            if self.sources[place] >= 0:
                x = x + seen[self.sources[place]]
            seen = (*seen, x)
        x = self.tie(x)
        out = self.head(x)
        if self.last_group > 0:
            out = self.manager(out, self.last_group, self.last_group + 1)
        if self.aux is None:
            return out
        second = self.aux(seen[self.aux_from])
        if self.last_group > 0:
            second = self.manager(second, self.last_group, self.last_group + 1)
        return out, second

    def tie(self, x):
        return x

    def construct(self, x):
        return self.outputs(x)


class CodeTied(Net):
    """Reads the weight of a layer in its own code."""

    def tie(self, x):
        return ops.matmul(x, self.body.square.weight)


class WithLosses(Net):
    """Returns two losses, which train by their sum."""

    def construct(self, x, y):
        out, second = self.outputs(x)
        return self.criterion.main(out, y), self.criterion.second(second)


class Loss(nn.Cell):
    """The loss of one output, or of both."""

    def __init__(self, spec):
        super().__init__()
        self.squares = spec.loss == "mse"
        self.entropy = nn.SoftmaxCrossEntropyWithLogits(sparse=False, reduction="mean")

    def main(self, out, y):
        return ops.square(out - y).mean() if self.squares else self.entropy(out, y)

    def second(self, out):
        return ops.square(out).mean() * AUX_WEIGHT

    def construct(self, out, y):
        if isinstance(out, tuple):
            return self.main(out[0], y) + self.second(out[1])
        return self.main(out, y)


def network(spec, manager=None):
    kind = CodeTied if spec.code_tie else WithLosses if spec.losses else Net
    return kind(spec, manager)


# ---- Names and first values ----


def shapes(spec):
    """Return name -> shape of all parameters, in the order in which the network holds them."""
    found = {"spare": SPARE} if spec.spare else {}
    for kind, name, *rest in spec.layers:
        if kind == "conv":
            found[f"body.{name}.weight"] = (rest[1], rest[0], 3, 3)
        if kind == "dense":
            found[f"body.{name}.weight"] = (rest[1], rest[0])
        if kind in ("conv", "dense") and rest[-1]:
            found[f"body.{name}.bias"] = (rest[1],)
        if kind == "bn":
            found |= {f"body.{name}.{one}": (rest[0],) for one in ("gamma", "beta")}
    found["head.weight"] = (spec.outputs, spec.features)
    if spec.head_bias:
        found["head.bias"] = (spec.outputs,)
    if spec.aux is not None:
        found |= {"aux.weight": (2, spec.aux_size), "aux.bias": (2,)}
    return found


def first_values(spec):
    """Return name -> float32 values drawn from the specification's seed."""
    generator = np.random.default_rng(spec.seed)
    values = {}
    for name, shape in shapes(spec).items():
        size = np.sqrt(1.0 / max(np.prod(shape[1:]), 1)) if len(shape) > 1 else 0.3
        center = 1.0 if name.endswith("gamma") else 0.0
        values[name] = (center + generator.normal(0, size, shape)).astype(np.float32)
    return values


def last_use_order(spec, names):
    """Return names in the order in which the network uses them last."""
    last = {name: float(place) for place, name in enumerate(names)}
    for place, (kind, _, *rest) in enumerate(spec.layers):
        if kind == "tied":  # behind all that stands in front of it
            before = [name for _, name, *_ in spec.layers[:place]]
            own = [name for name in names if name.split(".")[1:2] and name.split(".")[1] in before]
            last[f"body.{rest[0]}.weight"] = max(last[name] for name in own) + 0.5
    if spec.code_tie:
        last["body.square.weight"] = len(names)
    return sorted(names, key=last.get)


# ---- NumPy ----


class Twin:
    """The same network in float64: outputs, and gradients by hand.

    Args:
        spec (NetSpec): the network.
        multiplier: where m of the classifier of cosines starts; None for a Dense classifier.
        dtype: what it computes in.
    """

    def __init__(self, spec, multiplier=None, dtype=np.float64):
        self.spec, self.dtype = spec, dtype
        self.values = {name: dtype(one) for name, one in first_values(spec).items()}
        self.cosines = multiplier is not None
        if self.cosines:
            self.values["head.multiplier"] = np.array([multiplier], dtype)
        self.statistics = {}
        for kind, name, *rest in spec.layers:
            if kind == "bn":
                self.statistics[f"body.{name}.moving_mean"] = np.zeros(rest[0], dtype)
                self.statistics[f"body.{name}.moving_variance"] = np.ones(rest[0], dtype)
        self.margin = np.inf  # distance of the nearest pre-activation from ReLU's kink
        self.reach = 0.0  # the largest pre-activation of a tanh

    def gradients(self, x, y, resting=()):
        """Return name -> gradient of the loss of a batch; moves the statistics of BatchNorm.

        Args:
            x, y: the batch.
            resting: names of the BatchNorms in evaluation mode.
        """
        self.grads = {name: np.zeros_like(value) for name, value in self.values.items()}
        outs, backs = [self.dtype(x)], []
        for kind, name, *rest in self.spec.layers:
            if kind == "skip":
                outs.append(outs[-1] + outs[rest[0] + 1])
                backs.append(None)
                continue
            forward = getattr(self, kind)
            more = (name in resting,) if kind == "bn" else ()
            out, back = forward(outs[-1], f"body.{name}", *rest, *more)
            outs.append(out)
            backs.append(back)
        douts = [np.zeros_like(one) for one in outs]
        self._heads(outs, douts, self.dtype(y))
        for place in reversed(range(len(backs))):
            kind, _, *rest = self.spec.layers[place]
            if kind == "skip":
                douts[place] += douts[place + 1]
                douts[rest[0] + 1] += douts[place + 1]
            else:
                douts[place] += backs[place](douts[place + 1])
        return self.grads

    def _heads(self, outs, douts, y):
        x, tied = outs[-1], None
        if self.spec.code_tie:
            x, tied = self.tied(x, "", "square", False)
        head = self._cosine_head if self.cosines else self.dense
        out, back = head(x, "head", 0, 0, self.spec.head_bias)
        if self.spec.loss == "mse":
            dout = 2 * (out - y) / out.size
        else:
            exponents = np.exp(out - out.max(axis=1, keepdims=True))
            dout = (exponents / exponents.sum(axis=1, keepdims=True) - y) / len(out)
        dx = back(dout)
        douts[-1] += dx if tied is None else tied(dx)
        if self.spec.aux is not None:
            second, back = self.dense(outs[self.spec.aux + 1], "aux", 0, 0, True)
            douts[self.spec.aux + 1] += back(AUX_WEIGHT * 2 * second / second.size)

    def dense(self, x, name, inputs, outputs, bias):
        weight = self.values[f"{name}.weight"]

        def back(dy):
            self.grads[f"{name}.weight"] += dy.T @ x
            if bias:
                self.grads[f"{name}.bias"] += dy.sum(axis=0)
            return dy @ weight

        return x @ weight.T + (self.values[f"{name}.bias"] if bias else 0), back

    def tied(self, x, name, source, transposed):
        name = f"body.{source}.weight"
        weight = self.values[name].T if transposed else self.values[name]

        def back(dy):
            own = x.T @ dy
            self.grads[name] += own.T if transposed else own
            return dy @ weight.T

        return x @ weight, back

    def conv(self, x, name, inputs, outputs, pad_mode, bias):
        weight = self.values[f"{name}.weight"]
        pad = 1 if pad_mode == "same" else 0
        wide = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        height, width = wide.shape[2] - 2, wide.shape[3] - 2
        y = np.zeros((len(x), outputs, height, width), self.dtype)
        for i in range(3):
            for j in range(3):
                part = wide[:, :, i : i + height, j : j + width]
                y += np.einsum("bchw,oc->bohw", part, weight[:, :, i, j])

        def back(dy):
            dwide = np.zeros_like(wide)
            for i in range(3):
                for j in range(3):
                    part = wide[:, :, i : i + height, j : j + width]
                    self.grads[f"{name}.weight"][:, :, i, j] += np.einsum("bohw,bchw->oc", dy, part)
                    dwide[:, :, i : i + height, j : j + width] += np.einsum(
                        "bohw,oc->bchw", dy, weight[:, :, i, j]
                    )
            if bias:
                self.grads[f"{name}.bias"] += dy.sum(axis=(0, 2, 3))
            return dwide[:, :, pad : pad + x.shape[2], pad : pad + x.shape[3]]

        return y + (self.values[f"{name}.bias"].reshape(-1, 1, 1) if bias else 0), back

    def bn(self, x, name, size, image, resting):
        axes, shape = ((0, 2, 3), (-1, 1, 1)) if image else ((0,), (-1,))
        gamma = self.values[f"{name}.gamma"].reshape(shape)
        count = x.size // size
        mean, variance = x.mean(axis=axes), x.var(axis=axes)
        names = f"{name}.moving_mean", f"{name}.moving_variance"
        if resting:
            mean, variance = (self.statistics[one] for one in names)
        else:
            new = mean, variance * count / (count - 1)
            for one, value in zip(names, new):
                old = self.statistics[one]
                self.statistics[one] = BN_MOMENTUM * old + (1 - BN_MOMENTUM) * value
        length = np.sqrt(variance + BN_EPSILON).reshape(shape)
        unit = (x - mean.reshape(shape)) / length

        def back(dy):
            self.grads[f"{name}.gamma"] += (dy * unit).sum(axis=axes)
            self.grads[f"{name}.beta"] += dy.sum(axis=axes)
            dunit = dy * gamma
            if not resting:
                along = (dunit * unit).mean(axis=axes).reshape(shape)
                dunit = dunit - dunit.mean(axis=axes).reshape(shape) - unit * along
            return dunit / length

        return gamma * unit + self.values[f"{name}.beta"].reshape(shape), back

    def relu(self, x, name):
        self.margin = min(self.margin, np.abs(x).min())
        return np.maximum(x, 0), lambda dy: dy * (x > 0)

    def tanh(self, x, name):
        self.reach = max(self.reach, np.abs(x).max())
        y = np.tanh(x)
        return y, lambda dy: dy * (1 - y * y)

    def flatten(self, x, name):
        return x.reshape(len(x), -1), lambda dy: dy.reshape(x.shape)

    def dropout(self, x, name):
        return x, lambda dy: dy

    def _cosine_head(self, x, name, inputs, outputs, bias):
        """m (x^ W^T + b), rows divided by their lengths, or by 0.01 if they are shorter."""
        weight, multiplier = self.values["head.weight"], self.values["head.multiplier"]
        (unit_x, back_x), (unit_w, back_w) = _unit(x), _unit(weight)
        inner = unit_x @ unit_w.T + (self.values["head.bias"] if bias else 0)

        def back(dy):
            self.grads["head.multiplier"] += (dy * inner).sum()
            dinner = dy * multiplier
            if bias:
                self.grads["head.bias"] += dinner.sum(axis=0)
            self.grads["head.weight"] += back_w(dinner.T @ unit_x)
            return back_x(dinner @ unit_w)

        return multiplier * inner, back


def _unit(rows):
    squares = (rows**2).sum(axis=1, keepdims=True)
    length = np.sqrt(np.maximum(squares, COSINE_EPSILON))
    unit = rows / length

    def back(dunit):
        along = (dunit * unit).sum(axis=1, keepdims=True) * (squares > COSINE_EPSILON)
        return (dunit - unit * along) / length

    return unit, back


__all__ = ["Loss", "NetSpec", "Twin", "last_use_order", "ms", "network", "shapes"]
