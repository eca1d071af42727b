"""Every algorithm goes through one list of checks; a new one joins by an entry in ``ALGORITHMS``.

Off is bit-identical to plain training; on, the loss falls; the report says so; a run continues
bit-identically from its state, in fresh objects and in the same ones, and from old checkpoints.
"""

from __future__ import annotations

import itertools
import types

import contract
import mindspore as ms
import nets
import numpy as np
import old_checkpoints
import pytest
from contract import RESUME_AT, STEPS, build, everyone, run, switched, switched_on

# Counters of MindSpore's own dynamic loss scale, under the names that MindSpore gave them.
MINDSPORES_OWN = {"current_iterator_step", "last_overflow_iterator_step"}
# With all switches off, algorithms differ by their networks alone.
NETWORKS = list({one.net: one for one in reversed(contract.ALGORITHMS)}.values())
# Parts of these have methods that are functions of ms.jit.
NAMES = ("thor", "dim_reduce, p-bfgs", "dim_reduce, p-sgd", "dim_reduce, twa")
OF_METHODS = [one for one in contract.ALGORITHMS if one.name in NAMES]
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
CASES = list(itertools.product(MODES, contract.ALGORITHMS))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].name}")
def trained(request, tmp_path_factory):
    """Train with an algorithm: compiled once, for all that looks at it."""
    mode, algorithm = request.param
    before = ms.get_context("mode")
    ms.set_context(mode=MODES[mode])
    steps = algorithm.batches(STEPS)
    net, model = switched_on(algorithm)
    start = nets.weights(model.train_network)
    losses = run(model, steps[:RESUME_AT])
    path = str(tmp_path_factory.mktemp("contract") / "run.ckpt")
    ms.save_checkpoint(model.train_network, path)
    losses += run(model, steps[RESUME_AT:])
    end = nets.weights(model.train_network)
    yield types.SimpleNamespace(**locals())
    ms.set_context(mode=before)


@pytest.mark.parametrize("algorithm", NETWORKS, ids=lambda one: one.name)
def test_off_is_bit_identical_to_plain_training(mode, algorithm):
    steps = algorithm.batches(STEPS)
    net, model = build(algorithm, switched())
    plain_net, plain = build(algorithm, None)
    assert run(model, steps) == run(plain, steps)
    nets.assert_same_weights(net, plain_net)


def test_a_run_goes_on_bit_identically_from_its_state(trained):
    """From a checkpoint in fresh objects, and from what is loaded into the very step that runs.

    Compiled functions must not go on with the memory that the Parameters had before. So equal
    seeds give equal weights, too: equal starts do, and all that follows.
    """
    _, resumed = switched_on(trained.algorithm)
    nets.assert_same(nets.weights(resumed.train_network), trained.start)
    saved = ms.load_checkpoint(trained.path)
    not_loaded, _ = ms.load_param_into_net(resumed.train_network, saved)
    assert not not_loaded
    assert run(resumed, trained.steps[RESUME_AT:]) == trained.losses[RESUME_AT:]
    nets.assert_same(nets.weights(resumed.train_network), trained.end)

    for _ in range(2):
        nets.set_weights(trained.model.train_network, trained.start)
        assert run(trained.model, trained.steps) == trained.losses
        nets.assert_same(nets.weights(trained.model.train_network), trained.end)


@pytest.mark.parametrize("algorithm", OF_METHODS, ids=lambda one: one.name)
def test_the_mode_may_change(algorithm):
    """MindSpore would put a method of ``ms.jit`` that has run in the place of ``construct``."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    steps = algorithm.batches(STEPS)
    _, model = switched_on(algorithm)
    start = nets.weights(model.train_network)
    losses = run(model, steps)
    nets.set_weights(model.train_network, start)
    ms.set_context(mode=ms.GRAPH_MODE)
    # The modes round otherwise, by 1e-7 in each of a few steps.
    np.testing.assert_allclose(run(model, steps), losses, rtol=1e-5)


def test_on_the_loss_is_finite_and_falls(trained):
    nets.set_weights(trained.model.train_network, trained.start)
    ((x, _),) = nets.batches(1)
    batch = trained.algorithm.inputs(x), x.argmax(axis=1).astype(np.int32)
    losses = run(trained.model, [batch] * 60)
    assert np.isfinite(losses).all()
    # One batch with labels that can be learned: plain runs fall to 0.5-0.7, a prefix frozen early
    # or a window of 3 to 0.8.
    assert losses[-1] < 0.9 * losses[0]
    data = trained.algorithm.dataset(4)  # no window is longer
    trained.model.train(1, data, dataset_sink_mode=False)
    assert all(np.isfinite(value).all() for value in nets.weights(trained.net).values())


def test_training_goes_on_from_an_old_checkpoint(trained):
    """It loads strictly, and the steps behind it are those of the code that wrote it."""
    algorithm, step = trained.algorithm, trained.model.train_network
    old = ms.load_checkpoint(old_checkpoints.path_of(algorithm, RESUME_AT))
    ms.load_param_into_net(step, old, strict_load=True)
    run(trained.model, trained.steps[RESUME_AT:])
    expected = ms.load_checkpoint(old_checkpoints.path_of(algorithm, STEPS))
    found = nets.weights(step)
    assert found.keys() == expected.keys()
    writer = old_checkpoints.writers()[old_checkpoints.stem_of(algorithm)]
    same = writer == old_checkpoints.processor() and trained.mode == "graph"
    # Else five steps of float32 with numbers around 1: some roundings of 6e-8 each.
    tolerance = {"rtol": 0, "atol": 0} if same else {"rtol": 1e-5, "atol": 1e-6}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.asnumpy(), err_msg=name, **tolerance)


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
