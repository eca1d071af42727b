"""Sequence-length warm-up: against plain training on sequences that NumPy has cut."""

from __future__ import annotations

import contextlib

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn
from models import model_of

from mindspore_boost_ext import AutoBoost, NoEffectWarning
from mindspore_boost_ext.seq_length_warmup import ShortSequences
from mindspore_boost_ext.seq_length_warmup.algorithm import are_source_and_target

LENGTH, VOCABULARY, TOTAL = 8, 5, 8
LENGTHS = [2] * 2 + [4] * 2 + [8] * 3  # of the first updates


class NextToken(nn.Cell):
    """Predicts each next token from all before it: takes sequences of any length."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Dense(4, VOCABULARY)
        self.loss = nets.loss_fn()
        nets.fill(self)

    def construct(self, tokens, targets, weight):
        hidden = ms.ops.tanh(ms.ops.cumsum(self.embedding(tokens), 1))
        logits = self.head(hidden).reshape((-1, VOCABULARY))
        return self.loss(logits, targets.reshape((-1,))) * weight.mean()


def test_shapes_that_are_left_open_are_refused_or_left_alone(graph_mode):
    """The graph would not know how long a sequence is."""
    (batch, *_) = batches(1)
    batch = [Tensor(one) for one in batch]
    for if_unfit in ("refuse", "skip"):
        step = step_of(NextToken(), if_unfit=if_unfit)
        step.set_inputs(*(Tensor(shape=[None, None], dtype=ms.int32) for _ in range(2)), batch[2])
        if if_unfit == "refuse":
            with pytest.raises(ValueError, match=r"needs the shapes .* set_inputs leaves them op"):
                step(*batch)
            continue
        step(*batch)
        assert step.report()["seq_length_warmup"].status == "skipped"


def batches(count):
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (count, nets.BATCH, LENGTH + 1)).astype(np.int32)
    weight = np.ones((1,), np.float32)  # of no sample
    return [(one[:, :-1], one[:, 1:], weight) for one in tokens]


def step_of(net, **section):
    off = dict.fromkeys(AutoBoost().boost_config, False)
    settings = {"phases": [[0.25, 0.25], [0.25, 0.5]], "total_steps": TOTAL, **section}
    config = {
        "boost": {"mode": "manual", **off, "seq_length_warmup": True},
        "seq_length_warmup": settings,
    }
    return model_of(net, config, loss_fn=None).train_network


def window_of_two(net, **section):
    """Return a step that updates every second time, on growing sequences if it has a section."""
    off = dict.fromkeys(AutoBoost().boost_config, False)
    on = {"grad_accumulation": True, "seq_length_warmup": bool(section)}
    config = {"boost": {"mode": "manual", **off, **on}}
    config["grad_accumulation"] = {"grad_accumulation_step": 2}
    if section:
        config["seq_length_warmup"] = {"total_steps": TOTAL, **section}
    return model_of(net, config, loss_fn=None).train_network


def cut(batch, length, method):
    """Return inputs of another length, by plain loops."""
    ends = [length] if method == "truncate" else range(length, LENGTH + 1, length)
    chosen = [[ends[place] for place in places(one, ends, length)] for one in batch[0]]
    return [
        each
        if each.ndim == 1  # of no sample
        else np.array([row[end - length : end] for row, own in zip(each, chosen) for end in own])
        for each in batch
    ]


def places(sequence, ends, length):
    """Return which pieces to take: the first that is no padding in place of each that is."""
    if len(ends) == 1:
        return [0]
    real = [
        place
        for place, end in enumerate(ends)
        if any((one != sequence[-1]).any() for one in sequence[end - length :])
        and any((one != sequence[0]).any() for one in sequence[:end])
    ]
    return [place if place in real else (real or [0])[0] for place in range(len(ends))]


@pytest.mark.parametrize("method", ["truncate", "reshape"])
def test_a_training_is_plain_training_on_growing_sequences(mode, method):
    net, plain = NextToken(), NextToken()
    step = step_of(net, method=method)
    reference = nn.TrainOneStepCell(plain, nets.momentum(plain.trainable_params())).set_train()
    for length, batch in zip(LENGTHS, batches(len(LENGTHS))):
        found = step(*map(Tensor, batch)).asnumpy()
        expected = reference(*map(Tensor, cut(batch, length, method))).asnumpy()
        np.testing.assert_array_equal(found, expected)  # the same operators on the same numbers
    nets.assert_same(nets.weights(net), nets.weights(plain))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("method", ["truncate", "reshape"])
def test_a_window_is_of_one_length(mode, method):
    """Updates are counted, not micro-batches."""
    net, plain = NextToken(), NextToken()
    step = window_of_two(net, phases=[[0.25, 0.25], [0.25, 0.5]], method=method)
    reference = window_of_two(plain)
    lengths = [length for length in LENGTHS[:5] for _ in range(2)]
    for length, batch in zip(lengths, batches(len(lengths))):
        found = step(*map(Tensor, batch)).asnumpy()
        expected = reference(*map(Tensor, cut(batch, length, method))).asnumpy()
        np.testing.assert_array_equal(found, expected)  # the same operators on the same numbers
    nets.assert_same(nets.weights(net), nets.weights(plain))


@pytest.mark.parametrize(("scale", "multiple", "length"), [
    (0.4, 1, 3),  # of 3.2; 2 of 8 places are left out when it reshapes
    (0.4, 4, 4),
    (0.01, 1, 1),
    (0.95, 5, LENGTH),  # 10 would be more than there is
])  # fmt: skip
@pytest.mark.parametrize("method", ["truncate", "reshape"])
def test_lengths_are_rounded_to_a_multiple(mode, method, scale, multiple, length):
    sequences = np.arange(2 * LENGTH * 3).reshape(2, LENGTH, 3).astype(np.float32)
    length = max(length, 2) if method == "reshape" else length
    (found,) = ShortSequences(scale, multiple, method)(Tensor(sequences))
    np.testing.assert_array_equal(found.asnumpy(), cut([sequences], length, method)[0])


PADDED = np.array([
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 4, 0, 0, 0, 0],
    [1, 2, 3, 0, 0, 0, 0, 0],  # the second piece has content, too
    [0, 0, 0, 0, 0, 1, 2, 3],
    [1, 0, 0, 2, 2, 3, 3, 4],  # equal values that reach no end
    [0, 0, 0, 0, 0, 0, 0, 0],
], np.int32)  # fmt: skip


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_a_piece_of_padding_gives_way_to_one_of_its_sequence(mode, kind):
    """In all inputs alike, so that labels stay beside their tokens."""
    labels = np.arange(PADDED.size).reshape(PADDED.shape).astype(np.int32)
    features = np.stack([PADDED, PADDED], -1)  # of two numbers a place
    for first in (PADDED, features):
        found = ShortSequences(0.25, 1, "reshape")(Tensor(first.astype(kind)), Tensor(labels))
        expected = np.array([  # the first places of the pieces of two that are taken
            [0, 2, 4, 6], [0, 2, 0, 0], [0, 2, 0, 0], [4, 4, 4, 6], [0, 2, 4, 6], [0, 0, 0, 0],
        ])  # fmt: skip
        expected += labels[:, :1]
        np.testing.assert_array_equal(found[1].asnumpy()[:, 0], expected.ravel())
        np.testing.assert_array_equal(found[1].asnumpy()[:, 1], expected.ravel() + 1)
        np.testing.assert_array_equal(
            found[0].asnumpy(), first.reshape(-1, *first.shape[2:])[found[1].asnumpy()].astype(kind)
        )


@pytest.mark.parametrize(
    ("method", "scale"), [("truncate", 0.25), ("reshape", 0.25), ("reshape", 0.4)]
)
def test_labels_of_one_axis_stay_beside_their_tokens(mode, method, scale):
    """As those of shape (N, L) do; weights of as many classes are not cut."""
    labels = np.arange(PADDED.size).reshape(PADDED.shape).astype(np.int32)
    weights = np.arange(PADDED.size).astype(np.float32)
    inputs = map(Tensor, (PADDED, labels, labels.reshape(-1), weights))
    found = ShortSequences(scale, 1, method)(*inputs)
    np.testing.assert_array_equal(found[2].asnumpy(), found[1].asnumpy().reshape(-1))
    np.testing.assert_array_equal(found[3].asnumpy(), weights)


def test_a_mask_of_one_sequence_is_cut_along_its_second_axis(mode):
    """Also where the last batch has one sequence, so that the mask has a row for each place."""
    mask = np.arange(LENGTH * LENGTH).reshape(LENGTH, LENGTH).astype(np.int32)
    found = ShortSequences(0.5)(Tensor(PADDED[:1]), Tensor(mask), Tensor(mask[0]))
    np.testing.assert_array_equal(found[1].asnumpy(), mask[:, : LENGTH // 2])
    np.testing.assert_array_equal(found[2].asnumpy(), mask[0])


@pytest.mark.parametrize("rows", [1, 3, LENGTH])
def test_an_input_of_other_samples_is_cut_as_it_is(mode, rows):
    """Such as a mask or the positions, which belong to no sample of the first input."""
    first, other = Tensor(PADDED[1:3]), np.arange(rows * LENGTH).reshape(rows, LENGTH)
    found = ShortSequences(0.25, 1, "reshape")(first, Tensor(other))
    np.testing.assert_array_equal(found[1].asnumpy(), other.reshape(-1, 2))


class Attention(nn.Cell):
    """Attends to all places but those of the token 0; predicts the token of each place."""

    def __init__(self, masked):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Dense(4, 9)
        self.loss = nn.CrossEntropyLoss(ignore_index=0)
        self.masked = masked
        nets.fill(self)

    def construct(self, tokens, targets, weight):
        hidden = self.embedding(tokens)
        scores = ms.ops.matmul(hidden, hidden.swapaxes(1, 2))
        scores = scores.masked_fill(ms.ops.equal(tokens, 0).expand_dims(1), self.masked)
        logits = self.head(hidden + ms.ops.matmul(ms.ops.softmax(scores, -1), hidden))
        return self.loss(logits.reshape((-1, 9)), targets.reshape((-1,))) * weight.mean()


@pytest.mark.parametrize(
    ("mode", "rows"),
    [("graph", PADDED[1:3]), ("pynative", PADDED[1:3]), ("pynative", PADDED[3:4])],
    indirect=["mode"],
)
def test_attention_that_masks_padding_has_a_place_to_look_at(mode, rows):
    """MindSpore's softmax leaves other memory where a row is -inf throughout."""
    batch = [rows, rows, np.ones((1,), np.float32)]
    whole = [PADDED[[0, 4]], PADDED[[0, 0]], batch[2]]  # what the trial sees
    losses = []
    for masked in (float("-inf"), -1e9):
        step = step_of(Attention(masked), method="reshape", if_unfit="skip")
        losses.append([float(step(*map(Tensor, one)).asnumpy()) for one in (whole, batch, batch)])
        assert step.report()["seq_length_warmup"].status == "applied"
    np.testing.assert_array_equal(*losses)  # exp gives 0 for either


class Positions(nn.Cell):
    """Adds an embedding of every position: fixes the length of its sequences."""

    def __init__(self):
        super().__init__()
        self.positions = ms.Parameter(Tensor(np.ones((LENGTH, 3), np.float32)))

    def construct(self, x):
        return (x + self.positions).mean()


def test_a_network_that_fixes_the_length_is_refused_before_training(mode):
    step = step_of(Positions())
    with pytest.raises(ValueError, match=r"seq_length_warmup cannot train .* at scale 0\.25"):
        step(Tensor(np.ones((2, LENGTH, 3), np.float32)))


class Tried(nn.Cell):
    """Notes each run in a Parameter; given a length it fails at others, in float16."""

    def __init__(self, length=None):
        super().__init__()
        self.runs = ms.Parameter(Tensor([0.0]), requires_grad=False)
        self.weight = ms.Parameter(Tensor([1.0]))
        fixed = nn.Dense(length, 3, weight_init="ones") if length else nn.Identity()
        self.layer = fixed.to_float(ms.float16)

    def construct(self, x):
        ms.ops.assign_add(self.runs, Tensor([1.0]))
        return (self.layer(x) * self.weight).mean()


@pytest.mark.parametrize("length", [LENGTH, None])
def test_the_trial_leaves_no_mark(mode, length):
    """Not on Parameters, nor on what MindSpore computes in, where the trial ends in an error."""
    net = Tried(length)
    step = step_of(net, if_unfit="skip")
    step(Tensor(np.ones((2, LENGTH), np.float32)))
    assert net.runs.asnumpy().tolist() == [1.0]
    assert nn.Dense(2, 2)(Tensor(np.ones((1, 2), np.float32))).dtype == ms.float32
    status = step.report()["seq_length_warmup"].status
    assert status == ("skipped" if length else "applied")


class OneValueEach(nn.Cell):
    """Predicts a number from a whole sequence; its loss broadcasts one label to more samples."""

    def __init__(self):
        super().__init__()
        self.head, self.loss = nn.Dense(3, 1), nn.MSELoss()

    def construct(self, x, y):
        return self.loss(self.head(x.mean(1)), y)


def assert_unfit(step, batch, if_unfit, reason):
    if if_unfit == "refuse":
        with pytest.raises(ValueError, match=reason):
            step(*batch)
        return
    step(*batch)
    row = step.report()["seq_length_warmup"]
    assert row.status == "skipped"
    assert reason in row.reason


@pytest.mark.parametrize(("samples", "label"), [(1, (1, 1)), (4, (4,))])
@pytest.mark.parametrize("if_unfit", ["refuse", "skip"])
def test_labels_of_whole_sequences_are_not_given_to_their_parts(mode, samples, label, if_unfit):
    step = step_of(OneValueEach(), method="reshape", if_unfit=if_unfit)
    batch = [Tensor(np.ones(shape, np.float32)) for shape in ((samples, LENGTH, 3), label)]
    reason = "samples and labels no longer match"
    assert_unfit(step, batch, if_unfit, reason)


class OverItsMask(nn.Cell):
    """Divides a sum over places by that of a mask, which comes in a tuple or a dict."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(3, 1)

    def construct(self, x, given):
        mask = given[0] if isinstance(given, tuple) else given["mask"]
        return self.head(x).sum() / mask.sum()


@pytest.mark.parametrize("given", [tuple, dict])
@pytest.mark.parametrize("if_unfit", ["refuse", "skip"])
def test_a_mask_within_a_tuple_would_stay_as_long_as_it_is(mode, given, if_unfit):
    step = step_of(OverItsMask(), if_unfit=if_unfit)
    mask = Tensor(np.ones((4, LENGTH), np.float32))
    batch = (
        Tensor(np.ones((4, LENGTH, 3), np.float32)),
        given(mask=mask) if given is dict else (mask,),
    )
    reason = r"makes Tensors smaller, but not those in a tuple, list or dict"
    assert_unfit(step, batch, if_unfit, reason)


def padded(ids, fill=0):
    """Return symbols, of which half of the rows end early."""
    ids = ids + 2
    ids[::2, -3:] = fill
    return ids


def sentences():
    """Return what a decoder is given, begin and five words, and what it says, these and an end."""
    given, said = np.zeros((BATCH, LENGTH), np.int32), np.full((BATCH, LENGTH), -100, np.int32)
    given[:, 1:6] = said[:, :5] = TARGETS[:, :5] + 3
    given[:, 0], said[:, 5] = 1, 2
    return given, said


BATCH, LINE = nets.BATCH, np.tile(np.arange(LENGTH, dtype=np.int32), (nets.BATCH, 1))
TARGETS = np.random.default_rng(1).integers(0, VOCABULARY - 2, (BATCH, LENGTH)).astype(np.int32)
# Inputs behind the source, and whether they are those of a decoder.
TAUGHT = {
    "translation": (lambda x, y: (np.roll(TARGETS, 1, 1), TARGETS), True),
    "padded": (lambda x, y: (np.roll(padded(TARGETS), 1, 1), padded(TARGETS, -100)), True),
    "ends of sentences": (lambda x, y: sentences(), True),
    "with a mask": (lambda x, y: (np.roll(TARGETS, 1, 1), TARGETS, np.ones_like(x)), True),
    "language model": (lambda x, y: (y,), False),
    "with a mask behind": (lambda x, y: (y, np.ones_like(x)), False),
    "with a float mask behind": (lambda x, y: (y, np.ones(x.shape, np.float32)), False),
    "masks around": (lambda x, y: (np.ones_like(x), y, np.ones_like(x)), False),
    "segments": (lambda x, y: (LINE // 2, y), False),
    "positions": (lambda x, y: (LINE, y), False),
    "positions that begin anew": (lambda x, y: (LINE % 3, y), False),
    "filled positions": (lambda x, y: (LINE * (LINE < 3), (TARGETS + 5) * (LINE < 3)), False),
    "sparse features": (lambda x, y: (3 * (LINE == 4), 2 * (LINE == 2)), False),
    "one label each": (
        lambda x, y: (TARGETS, np.where(LINE == 3, np.roll(TARGETS, -1, 1), -100)),
        False,
    ),
    "no labels": (lambda x, y: (TARGETS, np.full_like(TARGETS, -100)), False),
    "types": (lambda x, y: (1 + LINE % 2, y), False),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_source_and_target_are_told_from_other_inputs(name):
    (tokens, targets, _) = batches(1)[0]
    behind, taught = TAUGHT[name]
    batch = [Tensor(np.ascontiguousarray(one)) for one in (tokens, *behind(tokens, targets))]
    assert are_source_and_target(*batch) == taught


class Taught(nn.Cell):
    """Takes a source, what a decoder is given, and what it is to say."""

    def __init__(self):
        super().__init__()
        self.body = NextToken()

    def construct(self, source, given, said):
        return self.body((source + given) % VOCABULARY, said, ms.ops.ones(1, ms.float32))


class TwoEncoders(nn.Cell):
    """Encodes sequences by an RNN, and takes those of other samples for wrong answers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, 4), nn.RNN(4, 3, batch_first=True)
        nets.fill(self)

    def construct(self, one, other):
        one, other = (self.rnn(self.embedding(each))[0][:, -1] for each in (one, other))
        return nets.loss_fn()(one @ other.T, ms.ops.arange(one.shape[0]).astype(ms.int32))


class Labelled(NextToken):
    """The language model, without a weight of its loss."""

    def construct(self, tokens, targets):
        return super().construct(tokens, targets, ms.ops.ones(1, ms.float32))


class Masked(NextToken):
    """The language model; places that a mask leaves out do not count."""

    def construct(self, tokens, targets, mask):
        hidden = ms.ops.tanh(ms.ops.cumsum(self.embedding(tokens), 1))
        losses = ms.ops.cross_entropy(
            self.head(hidden).reshape((-1, VOCABULARY)), targets.reshape((-1,)), reduction="none"
        )
        return (losses * mask.reshape((-1,))).sum() / mask.sum()


class TimeFirst(NextToken):
    """The language model on batches of shape (L, N), as recurrent layers take them by default."""

    def construct(self, tokens, targets):
        return super().construct(tokens.T, targets.T, ms.ops.ones(1, ms.float32))


MASK = np.ones((nets.BATCH, LENGTH), np.float32)
MASK[::2, -3:] = 0
RECIPES = {
    "language model": (Labelled, lambda x, y: (x, y), ""),
    "with a mask": (Masked, lambda x, y: (x, y, MASK), ""),
    "translation": (Taught, lambda x, y: (x, np.roll(y, 1, 1), y), "do not belong together"),
    "time first": (TimeFirst, lambda x, y: (x.T, y.T), "changes with the order of its rows"),
    "two encoders": (TwoEncoders, lambda x, y: (x, y), "neither the mean nor the sum of those"),
}


@pytest.mark.parametrize(
    ("if_unfit", "method"), [("skip", "reshape"), ("skip", "truncate"), ("refuse", "reshape")]
)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_pieces_of_language_models_alone(mode, name, if_unfit, method):
    """Piece 2 of a source says nothing about piece 2 of its translation, nor of a document."""
    net, inputs, reason = RECIPES[name]
    (tokens, targets, _) = batches(1)[0]
    batch = [Tensor(np.ascontiguousarray(one)) for one in inputs(tokens, targets)]
    step = step_of(net(), if_unfit=if_unfit, method=method)
    step(*batch)
    row = step.report()["seq_length_warmup"]
    left = bool(reason) and (if_unfit, method) == ("skip", "reshape")
    assert row.status == ("skipped" if left else "applied"), row.reason
    assert (reason in row.reason) is (left or not reason)


class OfWholeRows(nn.Cell):
    """A mean over the places of each sequence that are not padding."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor([1.0]))

    def construct(self, x):
        mask = (x > 0).astype(ms.float32)
        return ((x * mask).sum(1) / mask.sum(1)).mean() * self.weight


def test_a_loss_that_short_sequences_make_infinite_is_refused(mode):
    """A gap in a sequence makes rows of nothing else; padding at its end makes none."""
    x = np.ones((2, LENGTH), np.float32)
    x[:, LENGTH // 2 :] = 0
    step = step_of(OfWholeRows(), method="reshape")
    assert np.isfinite(step(Tensor(x)).asnumpy())
    x[:, -1] = 1
    step = step_of(OfWholeRows(), method="reshape")
    with pytest.raises(ValueError, match=r"at scale 0\.25 .* the loss is not finite"):
        step(Tensor(x))


def test_with_skip_the_error_of_a_network_is_its_own(mode):
    """Not that of short sequences."""
    step = step_of(nn.Dense(LENGTH + 1, 3), if_unfit="skip")
    with pytest.raises(ValueError, match=f"{LENGTH}.*{LENGTH + 1}"):
        step(Tensor(np.ones((2, LENGTH), np.float32)))
    row = step.report()["seq_length_warmup"]
    assert row.status == "skipped"
    assert row.reason.startswith("cannot be tried on the first batch: ")


class OfWholeBatches(Labelled):
    def construct(self, tokens, targets):
        if tokens.shape[0] < BATCH:
            raise ValueError("too few samples")
        return super().construct(tokens, targets)


def test_with_skip_a_network_that_fails_on_half_a_batch_is_left_alone():
    """Whether its loss compares samples is not known."""
    step = step_of(OfWholeBatches(), if_unfit="skip", method="reshape")
    step.look_before_first(*map(Tensor, batches(1)[0][:2]))
    row = step.report()["seq_length_warmup"]
    assert row.status == "skipped"
    assert row.reason.startswith("the loss cannot be tried on half of the first batch: ")


@pytest.mark.parametrize("net", [Tried, Positions])
def test_with_skip_the_warning_of_an_early_end_waits_for_the_first_batch(net):
    """Which shows whether sequences are short at first."""
    step = step_of(net(), if_unfit="skip")
    step.expect_training(1, 2)
    warns = pytest.warns(NoEffectWarning, match="ends at update 2, before its inputs have their")
    with warns if net is Tried else contextlib.nullcontext():
        step(Tensor(np.ones((2, LENGTH, 3), np.float32)))


@pytest.mark.parametrize("shape", [(8,), (2, 3, 4, 5)])
def test_inputs_that_are_no_sequences_are_refused(shape):
    step = step_of(Positions())
    with pytest.raises(
        ValueError, match=r"a batch of sequences, of shape \(N, L\) or \(N, L, feat"
    ):
        step(Tensor(np.ones(shape, np.float32)))


def test_the_method_is_checked():
    with pytest.raises(ValueError, match=r"method must be one of 'truncate', 'reshape', got 'cut'"):
        AutoBoost("O1", {"seq_length_warmup": {"total_steps": 4, "method": "cut"}})


def test_beside_progressive_resizing_each_has_its_own_counts():
    """Two sections of this kind: the names of their Parameters differ."""
    sections = {
        name: {"phases": [[0.5, 0.5]], "total_steps": 4}
        for name in ("progressive_resizing", "seq_length_warmup")
    }
    net = nn.Conv2d(1, 1, 1)
    boost = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    step = model_of(net, {"boost": boost, **sections}, loss_fn=None).train_network
    counts = [one for one in nets.weights(step) if one.endswith(".updates")]
    assert sorted(counts) == [
        "boost.progressive_resizing.updates",
        "boost.seq_length_warmup.updates",
    ]


def test_with_skip_graphs_choose_the_length_once_a_batch_has_fitted(pynative_mode):
    step = step_of(NextToken(), if_unfit="skip")
    assert step.choice_part.takes_last  # full size: no batch has been seen
    step(*map(Tensor, batches(1)[0]))
    assert not step.choice_part.takes_last
