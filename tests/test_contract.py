"""Every algorithm goes through one list of checks; a new one joins by an entry in ``ALGORITHMS``.

Off is bit-identical to plain training; on, the loss falls; the report says so; a run continues
bit-identically from its state, in fresh objects and in the same ones.
"""

from __future__ import annotations

import copy

import mindspore as ms
import nets
import numpy as np
from contract import RESUME_AT, STEPS, build, everyone, run, switched_on

from mindspore_boost_ext import AutoBoost

# Counters of MindSpore's own dynamic loss scale, under the names that MindSpore gave them.
MINDSPORES_OWN = {"current_iterator_step", "last_overflow_iterator_step"}


@everyone
def test_off_is_bit_identical_to_plain_training(mode, algorithm):
    off = copy.deepcopy(algorithm.on)
    off["boost"].update(dict.fromkeys(AutoBoost().boost_config, False))
    sections = [name for name in off if name != "boost"]
    for name in sections:  # a section without its switch would be told as ineffective
        del off[name]
    steps = algorithm.batches(STEPS)
    net, model = build(algorithm, off)
    plain_net, plain = build(algorithm, None)
    assert run(model, steps) == run(plain, steps)
    nets.assert_same_weights(net, plain_net)


@everyone
def test_on_the_loss_is_finite_and_falls(mode, algorithm):
    net, model = switched_on(algorithm)
    ((x, _),) = nets.batches(1)
    batch = algorithm.inputs(x), x.argmax(axis=1).astype(np.int32)
    losses = run(model, [batch] * 60)
    assert np.isfinite(losses).all()
    # One batch with labels that can be learned: plain runs fall to 0.5-0.7, a prefix frozen early
    # or a window of 3 to 0.8.
    assert losses[-1] < 0.9 * losses[0]
    model.train(1, algorithm.dataset(4), dataset_sink_mode=False)  # no window is longer
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
def test_a_run_goes_on_bit_identically_from_its_state(mode, algorithm, tmp_path):
    """From a checkpoint in fresh objects, and from what is loaded into the very step that runs.

    Compiled functions must not go on with the memory that the Parameters had before. So equal
    seeds give equal weights, too: equal starts do, and all that follows.
    """
    steps = algorithm.batches(STEPS)
    _, model = switched_on(algorithm)
    step = model.train_network
    saved = nets.weights(step)
    losses = run(model, steps[:RESUME_AT])
    path = str(tmp_path / "run.ckpt")
    ms.save_checkpoint(step, path)
    expected = run(model, steps[RESUME_AT:])
    weights = nets.weights(step)

    _, resumed = switched_on(algorithm)
    nets.assert_same(nets.weights(resumed.train_network), saved)  # equal seeds, equal starts
    not_loaded, _ = ms.load_param_into_net(resumed.train_network, ms.load_checkpoint(path))
    assert not not_loaded
    assert run(resumed, steps[RESUME_AT:]) == expected
    nets.assert_same(nets.weights(resumed.train_network), weights)

    for _ in range(2):
        nets.set_weights(step, saved)
        assert run(model, steps) == losses + expected
        nets.assert_same(nets.weights(step), weights)


@everyone
def test_state_has_stable_names(algorithm):
    """User parameters keep their names; own state is named ``boost.<algorithm>.<name>``."""
    plain_net, plain = build(algorithm, None)
    net, model = switched_on(algorithm)
    names = [name for name in nets.weights(net) if name not in algorithm.gains]
    assert names == list(nets.weights(plain_net))
    own = nets.weights(model.train_network).keys() - nets.weights(plain.train_network).keys()
    own = {name for name in own if not name.endswith(algorithm.gains)}
    # accum and stat: the SGD that takes the place of the user's optimizer under dim_reduce.
    assert all(name.startswith(("boost.", "accum.", "stat.")) for name in own - MINDSPORES_OWN)
