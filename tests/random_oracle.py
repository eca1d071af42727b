"""What a random combination must end with: optimizers and the whole step in NumPy float64."""

from __future__ import annotations

import math

import numpy as np
from oracles import clip_by_global_norm, dynamic_scale
from random_nets import Twin, first_values, last_use_order


def single(number):
    """Return a setting as float32 holds it, in float64."""
    return float(np.float32(number))


def rate_at(rate, step):
    """Return a learning rate after so many updates."""
    kind, *values = rate
    if kind == "constant":
        return single(values[0])
    if kind == "list":
        return single(values[step])
    start, factor, steps = values
    return start * factor ** (step / steps)


# ---- Optimizers: one function each, of one parameter ----


def sgd(w, g, state, lr, step, momentum, dampening=0.0, nesterov=False):
    if momentum == 0:
        return w - lr * g
    first = "v" not in state
    state["v"] = g if first else momentum * state["v"] + (1 - dampening) * g
    return w - lr * (g + momentum * state["v"] if nesterov else state["v"])


def momentum(w, g, state, lr, step, momentum):
    state["v"] = momentum * state.get("v", 0) + g
    return w - lr * state["v"]


def adam(w, g, state, lr, step, beta1, beta2, eps, use_nesterov=False):
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    lr *= math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
    m = beta1 * state["m"] + (1 - beta1) * g if use_nesterov else state["m"]
    return w - lr * m / (np.sqrt(state["v"]) + eps)


def adam_weight_decay(w, g, state, lr, step, decay, beta1, beta2, eps):
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    return w - lr * (state["m"] / (np.sqrt(state["v"]) + eps) + decay * w)


def rms_prop(w, g, state, lr, step, decay, momentum, epsilon=1e-10):
    state["s"] = decay * state.get("s", 1.0) + (1 - decay) * g * g  # begins at 1
    state["v"] = momentum * state.get("v", 0) + lr * g / np.sqrt(state["s"] + epsilon)
    return w - state["v"]


def adagrad(w, g, state, lr, step, accum):
    state["s"] = state.get("s", accum) + g * g
    return w - lr * g / np.sqrt(state["s"])


def ada_max(w, g, state, lr, step, beta1, beta2, eps):
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["u"] = np.maximum(beta2 * state.get("u", 0), np.abs(g))
    return w - lr / (1 - beta1 ** (step + 1)) * state["m"] / (state["u"] + eps)


def adadelta(w, g, state, lr, step, rho, epsilon):
    state["s"] = rho * state.get("s", 0) + (1 - rho) * g * g
    change = np.sqrt((state.get("d", 0) + epsilon) / (state["s"] + epsilon)) * g
    state["d"] = rho * state.get("d", 0) + (1 - rho) * change * change
    return w - lr * change


RULES = {
    "SGD": sgd,
    "Momentum": momentum,
    "Adam": adam,
    "LazyAdam": adam,
    "AdamWeightDecay": adam_weight_decay,
    "RMSProp": rms_prop,
    "Adagrad": adagrad,
    "AdaMax": ada_max,
    "Adadelta": adadelta,
}


class Optimizer:
    """An optimizer over named values, which begins each state at its first update."""

    def __init__(self, case, names):
        self.case, self.names = case, names
        self.settings = {
            name: single(value) if isinstance(value, float) else value
            for name, value in case.settings.items()
        }
        self.states = {name: {} for name in names}
        self.updates = 0

    @property
    def position(self):
        """The place in the schedules of rates."""
        if self.case.shorter is None:
            return self.updates
        total, parts = self.case.shorter["total_steps"], self.case.shorter["parts"]
        updates = round(self.case.shorter["share"] * total) * parts
        return min(self.updates * total // updates, total - 1)

    def settings_of(self, name):
        """Return rate and weight decay of a parameter."""
        rate, decay = self.case.rate, self.case.weight_decay
        for names, own_rate, own_decay in self.case.groups:
            if name in names:
                return own_rate or rate, decay if own_decay is None else own_decay
        if name.endswith(("gamma", "beta")):  # no weight decay, but in a group that asks for it
            decay = 0.0
        return rate, decay

    def update(self, values, gradients):
        """Update in place the values of which there are gradients."""
        for name, gradient in gradients.items():
            rate, decay = self.settings_of(name)
            decay, more = single(decay), {}
            if self.case.optimizer == "AdamWeightDecay":
                more["decay"] = decay
            else:
                gradient = gradient + decay * values[name]
            if self.case.centralized(name, gradient):
                axes = tuple(range(1, gradient.ndim))
                gradient = gradient - gradient.mean(axis=axes, keepdims=True)
            lr = rate_at(rate, self.position)
            rule, state = RULES[self.case.optimizer], self.states[name]
            new = rule(values[name], gradient, state, lr, self.updates, **more, **self.settings)
            values[name] = new.astype(values[name].dtype)
        self.updates += 1


# ---- Comparing ----

# Ways shorter than this count as this one: a weight of size 1 is rounded to 6e-8 in every step.
SHORTEST = 0.02


def shares_off(case, found, expected):
    """Return name -> how far ``found`` is off, as a share of the way from the first values."""
    first, shares = first_values(case.net), {}
    for name, value in expected.items():
        start = first.get(name, 1.0 if name.endswith(("variance", "multiplier")) else 0.0)
        way = max(np.abs(value - start).max(), SHORTEST)
        shares[name] = float(np.abs(found[name] - value).max() / way)
    return shares


# ---- Freezing ----


def groups_of(case, names):
    """Return the trained names of each group of freezing: chunks, and ever longer parts of them."""
    chunks = []
    for name in last_use_order(case.net, names):
        stays = any(part in name for part in ("bn", "bias", "multiplier"))
        if not chunks or (len(chunks[-1]) >= 3 and not stays):
            chunks.append([])
        chunks[-1].append(name)
    count = min(case.freeze["param_groups"], len(chunks))
    stride = len(chunks) // count
    return [[name for chunk in chunks[k * stride :] for name in chunk] for k in range(count)]


def group_at(freeze, groups, position):
    """Return the group of an update; for the drawn schedule of freeze type 1, None."""
    schedule, total = freeze["schedule"], freeze["total_steps"]
    if isinstance(schedule, list):
        return schedule[position % len(schedule)]
    if callable(schedule):
        return schedule(position % total)
    if schedule is None:
        if freeze["freeze_type"] == 1:
            return None
        p = freeze["freeze_p"]
        zeros = int(p * (groups - 1) // (1 - p) + 0.5) if groups > 1 else 1
        return ([0] * zeros + list(range(1, groups)))[position % (zeros + groups - 1)]
    start, count = freeze["prefix_start"], math.floor(freeze["prefix_fraction"] * (groups - 1))
    begin = {
        "linear": lambda k: start + (1 - start) * k / count,
        "cubic": lambda k: (start ** (1 / 3) + (1 - start ** (1 / 3)) * k / count) ** 3,
        "step": lambda k: start,
    }[schedule]
    position = min(position, total - 1)  # the last one is kept
    # 1e-5: a share of the steps that is a whole number but for rounding
    return sum(position >= begin(k) * total - 1e-5 for k in range(count))


# ---- The whole training ----


class Expected:
    """Trains a case in float64.

    Args:
        case (Case): the combination.
        drawn: the drawn schedule of freeze type 1, which the optimizer shows.
        dtype: what is computed in.

    Attributes:
        values: the weights, and the statistics of BatchNorm.
        skipped: how many steps overflowed.
        scale: the dynamic loss scale after the last step.
        scales: the loss scales of groups after the last step.
    """

    def __init__(self, case, drawn=None, dtype=np.float64):
        self.case, self.drawn = case, drawn
        self.twin = Twin(case.net, case.multiplier, dtype)
        self.names = case.trained_names()
        self.optimizer = Optimizer(case, self.names)
        self.groups = groups_of(case, self.names) if case.freeze else [self.names]
        self.overflows, self.used_groups, self.factors = [], [], []
        self._clear()
        for _ in range(case.epochs):
            for batch in case.batches():
                for part in case.parts(*batch) if not self._is_over() else ():
                    self._step(*part)
            if case.flush and self.count:
                self._close_window()
        self.skipped = sum(self.overflows)
        if case.scale[0] == "dynamic":
            self.scale = dynamic_scale(*case.scale[1:], self.overflows)[-1]
        if case.scale[0] == "grouped":
            self.scales = case.first_scales()
            for factors in self.factors:
                self.scales = self.scales * factors
        self.values = {**self.twin.values, **self.twin.statistics}

    def _is_over(self):
        shorter = self.case.shorter
        return shorter and self.optimizer.position == shorter["total_steps"] - 1

    def _trained(self):
        if not self.case.freeze:
            return self.names
        position = self.optimizer.updates
        group = group_at(self.case.freeze, len(self.groups), position)
        group = self.drawn[position % len(self.drawn)] if group is None else group
        self.used_groups.append(group)
        return self.groups[group]

    def _resting(self, trained):
        """Return the BatchNorms that stand still: all they could train is frozen."""
        if not (self.case.freeze and self.case.freeze["eval_frozen"]):
            return ()
        owned = {}
        for name in self.names:
            parts = name.split(".")
            owned.setdefault(parts[1] if len(parts) > 1 else "", []).append(name)
        return [cell for cell, names in owned.items() if not set(names) & set(trained)]

    def _step(self, x, y):
        trained = self._trained()
        with np.errstate(invalid="ignore"):  # labels may be inf
            gradients = self.twin.gradients(x, y, self._resting(trained))
        gradients = {name: gradients[name] for name in trained}
        overflow = not all(np.isfinite(one).all() for one in gradients.values())
        self.overflows.append(overflow)
        if self.case.scale[0] == "grouped":
            self.factors.append(self._factors(trained, overflow))
        if overflow:
            if self.case.on_overflow == "drop_window":
                self._clear()
            return
        weight = len(x) if self.case.weighting == "samples" else 1
        for name, gradient in gradients.items():
            self.window[name] = self.window.get(name, 0) + weight * gradient
        self.weight += weight
        self.count += 1
        if self.count == self.case.window:
            self._close_window()

    def _factors(self, trained, overflow):
        """Return what the scale of each group is multiplied by in a step.

        Overflow comes from the labels alone, so from the last group. One that is frozen has no say.
        """
        factors = [
            2 ** (1 / 1000) if not set(group).isdisjoint(trained) else 1.0
            for group in self.case.groups_of_scales()
        ]
        if overflow:
            factors[-1] = 2**-0.5
        return np.array(factors)

    def _close_window(self):
        gradients = {name: one / self.weight for name, one in self.window.items()}
        if self.case.clip_norm is not None:
            clipped = clip_by_global_norm(gradients.values(), self.case.clip_norm)
            gradients = dict(zip(gradients, clipped))
        self.optimizer.update(self.twin.values, gradients)
        self._clear()

    def _clear(self):
        self.window, self.weight, self.count = {}, 0, 0


__all__ = ["Expected", "groups_of", "shares_off"]
