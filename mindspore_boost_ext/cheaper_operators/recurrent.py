"""Recurrent layers: all that does not need the step before is computed for all steps at once."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.mapping import Tensors
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell

_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _gates(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.MatMul(transpose_b=True)(rows, weight) + bias


def _rows(x: Tensor) -> Tensor:
    """Return [T, B, N] as [T * B, N]; also without samples, where -1 as a size would fail."""
    steps, batch, size = x.shape
    return x.reshape((steps * batch, size))


def _by_step(rows: Tensor, like: Tensor) -> Tensors:
    """Return [T * B, N] as a tuple of T, in the order of the steps of ``like``, [T, B, M]."""
    steps, batch, _ = like.shape
    return ops.Unstack(0, steps)(rows.reshape((steps, batch, rows.shape[-1])))


class _Recurrence(nn.Cell):
    """All steps of a layer; its gradient computes the gates anew, from the states.

    Shapes are MindSpore's: inputs ``x`` [T, B, I], the first state ``h`` [B, H], weights
    [gates * H, I] and [gates * H, H], biases [gates * H]; the states that come out [T, B, H].
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.to_float(mstype.float32)  # mixed precision "auto" takes matrix products in float16

    def step(self, of_input: Tensor, of_state: Tensor, h: Tensor) -> Tensor:
        """Return the next state, from the contributions of input and state to the gates."""
        raise NotImplementedError

    def construct(
        self, x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
    ) -> Tensor:
        states: Tensors = ()
        for of_input in _by_step(_gates(_rows(x), w_ih, b_ih), x):
            h = self.step(of_input, _gates(h, w_hh, b_hh), h)
            states = (*states, h)
        return ops.Stack(0)(states)


def _states_before(h: Tensor, out: Tensor) -> Tensor:
    """Return the state before each step, [T * B, H]."""
    return _rows(ops.Concat(0)((ops.ExpandDims()(h, 0), out[:-1])))


def _gradients(
    x: Tensor, before: Tensor, w_ih: Tensor, by_input: Tensor, by_state: Tensor, dh: Tensor
) -> _Six:
    """Return all gradients, from those of the inputs' and states' contributions to the gates."""
    inputs, weight = _rows(x), ops.MatMul(transpose_a=True)
    dx = ops.MatMul()(by_input, w_ih).reshape(x.shape)
    weights = weight(by_input, inputs), weight(by_state, before)
    return dx, dh, weights[0], weights[1], by_input.sum(0), by_state.sum(0)


class _Tanh(_Recurrence):
    def step(self, of_input: Tensor, of_state: Tensor, h: Tensor) -> Tensor:
        return ops.Tanh()(of_input + of_state)

    def slope(self, out: Tensor) -> Tensor:
        """Return the derivative of the activation, from its value."""
        return 1 - out * out

    def bprop(
        self,
        x: Tensor,
        h: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> _Six:
        slopes, douts = _by_step(self.slope(out), x), _by_step(dout, x)
        changes: Tensors = ()
        dh = ops.ZerosLike()(h)
        for back in range(1, len(douts) + 1):
            change = (douts[-back] + dh) * slopes[-back]
            dh = ops.MatMul()(change, w_hh)
            changes = (change, *changes)
        change = ops.Concat(0)(changes)
        return _gradients(x, _states_before(h, out), w_ih, change, change, dh)


class _Relu(_Tanh):
    def step(self, of_input: Tensor, of_state: Tensor, h: Tensor) -> Tensor:
        return ops.ReLU()(of_input + of_state)

    def slope(self, out: Tensor) -> Tensor:
        return ops.Cast()(out > 0, mstype.float32)


def _gates_of_gru(of_input: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gates "reset" and "keep", the candidate, and the state's contribution to it."""
    reset_in, keep_in, candidate_in = ops.Split(1, 3)(of_input)
    reset_state, keep_state, candidate_state = ops.Split(1, 3)(of_state)
    reset = ops.Sigmoid()(reset_in + reset_state)
    keep = ops.Sigmoid()(keep_in + keep_state)
    return reset, keep, ops.Tanh()(candidate_in + reset * candidate_state), candidate_state


def _slopes_of_gru(of_inputs: Tensor, of_states: Tensor, before: Tensor) -> Tensors:
    """Return a state's kept share, and the next state's slopes by both contributions to gates."""
    reset, keep, candidate, share = _gates_of_gru(of_inputs, of_states)
    by_candidate = (1 - keep) * (1 - candidate * candidate)
    by_keep = (before - candidate) * keep * (1 - keep)
    by_reset = by_candidate * share * reset * (1 - reset)
    by_inputs = ops.Concat(1)((by_reset, by_keep, by_candidate))
    return keep, by_inputs, ops.Concat(1)((by_reset, by_keep, by_candidate * reset))


def _thrice(x: Tensor) -> Tensor:
    return ops.Concat(1)((x, x, x))


class _Gru(_Recurrence):
    def step(self, of_input: Tensor, of_state: Tensor, h: Tensor) -> Tensor:
        _, keep, candidate, _ = _gates_of_gru(of_input, of_state)
        return candidate + keep * (h - candidate)

    def bprop(
        self,
        x: Tensor,
        h: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> _Six:
        before = _states_before(h, out)
        of_inputs = _gates(_rows(x), w_ih, b_ih)
        of_states = _gates(before, w_hh, b_hh)
        keep, by_inputs, by_states = _slopes_of_gru(of_inputs, of_states, before)
        slopes, kept, douts = _by_step(by_states, x), _by_step(keep, x), _by_step(dout, x)
        changes: Tensors = ()
        dh = ops.ZerosLike()(h)
        for back in range(1, len(douts) + 1):
            change = douts[-back] + dh
            dh = change * kept[-back] + ops.MatMul()(_thrice(change) * slopes[-back], w_hh)
            changes = (change, *changes)
        change = _thrice(ops.Concat(0)(changes))
        return _gradients(x, before, w_ih, change * by_inputs, change * by_states, dh)


# MindSpore's Cells that run the steps of an nn.RNN or nn.GRU, and what replaces them.
STEPS = {_compat.GRU_STEPS: _Gru, _compat.RNN_STEPS: _Tanh, _compat.RELU_RNN_STEPS: _Relu}


class CheaperRecurrence(CheaperCell):
    """The steps of one layer and direction, with MindSpore's values up to rounding."""

    counted_as = "recurrence"

    def __init__(self, plain: nn.Cell) -> None:
        super().__init__(plain)
        self.steps = STEPS[type(plain)]()

    def construct(
        self, x: Tensor, h: Tensor, seq_length: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states after each step, [T, B, H], and after the last, [B, H]."""
        w_ih, w_hh, b_ih, b_hh = weights
        few = x.shape[0] < 2 or x.shape[1] == 0
        if self.is_plain(x) or self.is_plain(w_ih) or seq_length is not None or few:
            return self.plain(x, h, seq_length, w_ih, w_hh, b_ih, b_hh)
        if b_ih is None:
            b_ih = b_hh = ops.zeros((w_ih.shape[0],), mstype.float32)
        states = self.steps(x, h, w_ih, w_hh, b_ih, b_hh)
        return states, states[-1]
