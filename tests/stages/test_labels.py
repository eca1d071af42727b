"""Which labels are one class of each sample."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindspore_boost_ext.stages.labels import next_tokens, no_class_a_sample, rows_of_places

TOKENS = Tensor(np.ones((4, 8), np.int32))
NUMBERS = Tensor(np.ones((4, 8), np.float32))


WORDS = np.array([[3, 1, 4, 1, 5, 9, 0, 0], [2, 6, 5, 3, 5, 0, 0, 0]], np.int32)  # 0: padding
PADDED = np.pad(WORDS, ((0, 0), (0, 8)))
STREAM = np.random.default_rng(0).permutation(40).astype(np.int32) % 11
LENGTHS = Tensor(np.array([6, 5], np.int32))


def rows(*row):
    return Tensor(np.tile(np.array(row, np.float32), (4, 1)))


@pytest.mark.parametrize(("inputs", "words"), [
    ((NUMBERS, Tensor(np.ones(4, np.int32))), ""),
    ((TOKENS, rows(0.0, 1.0)), ""),
    ((TOKENS, rows(0.3, 0.3, 0.4).astype(ms.bfloat16)), ""),  # 1 but for rounding
    ((NUMBERS, rows(0.0, 1.0, 1.0)), ""),  # numbers to predict, or several classes
    ((NUMBERS, rows(0, 0, 0, 0, 0, 1, 0, 0)), ""),  # as many classes as features
    ((TOKENS, rows(2.5)), ""),  # one number a sequence
    ((TOKENS, TOKENS, rows(1, 1, 1, 1, 0, 0, 0, 0)), "do not add up to 1"),  # a mask
    ((TOKENS, rows(1, 1, 0)), "do not add up to 1"),  # weights of masked places
    ((TOKENS, rows(np.nan, 1)), "do not add up to 1"),
    ((NUMBERS, NUMBERS), "do not add up to 1"),  # a series
    ((TOKENS, TOKENS), "shape"),
    ((TOKENS, Tensor(np.ones(32, np.int32))), "shape"),
])  # fmt: skip
def test_labels_of_places_are_told_from_classes(inputs, words):
    found = no_class_a_sample(*inputs) or rows_of_places(*inputs)
    assert words in found
    assert bool(words) == bool(found)


def test_several_classes_of_a_text_are_no_shares_but_classes():
    """What loss takes them is another question: by their shape they belong to samples."""
    assert no_class_a_sample(TOKENS, rows(1, 1, 0)) == ""


def test_a_batch_of_one_input_has_no_labels():
    assert no_class_a_sample(rows(1, 1, 0)).endswith("the batch has one input and no labels")


def one_place_on(words):
    return np.concatenate([words[:, 1:], words[:, :1]], axis=1)


@pytest.mark.parametrize(("inputs", "is_language_model"), [
    ((WORDS, one_place_on(WORDS), LENGTHS), True),
    ((STREAM[:-1], STREAM[1:]), True),
    ((STREAM[:-1], STREAM[:-1] % 2), False),
    ((STREAM[:9], STREAM[1:10]), False),  # so few may be a feature and its classes
    ((STREAM[:-1] % 2, STREAM[1:] % 2), False),  # and so may two kinds: one the other's opposite
    ((WORDS, LENGTHS, np.where(one_place_on(WORDS) > 0, one_place_on(WORDS), -100)), True),
    ((WORDS, WORDS, LENGTHS), False),
    ((WORDS, WORDS > 0, LENGTHS), False),  # a mask
    ((WORDS, np.zeros_like(WORDS), LENGTHS), False),  # segments: 0 as padding is
    ((PADDED, np.zeros_like(PADDED), LENGTHS), False),  # more padding than words
    ((PADDED, one_place_on(PADDED), LENGTHS), True),
    ((WORDS.astype(np.int64), one_place_on(WORDS).astype(np.int64), LENGTHS), True),
    ((WORDS, WORDS[:, 1:4], LENGTHS), False),  # of another length
    ((WORDS[0], one_place_on(WORDS)[0], LENGTHS), False),  # numbers of users
    ((np.array([[1, 2, 3, 4, 5]]), np.array([[2, 3, 0, 0, 0]]), LENGTHS), False),  # half of them
    ((WORDS.astype(np.float32), one_place_on(WORDS).astype(np.float32), LENGTHS), False),
    ((WORDS[:, :1], WORDS[:, :1], LENGTHS), False),
    ((WORDS, 3, LENGTHS), False),
    ((WORDS, Tensor(np.ones((2, 8)), ms.bfloat16), LENGTHS), False),
    ((3, WORDS), False),
])  # fmt: skip
def test_a_language_model_whose_targets_do_not_stand_last(inputs, is_language_model):
    found = next_tokens(*(Tensor(one) if isinstance(one, np.ndarray) else one for one in inputs))
    assert ("tokens shifted by one" in found) == is_language_model == bool(found)


def test_the_input_that_has_the_tokens_one_place_on_is_named():
    words, targets = Tensor(WORDS), Tensor(one_place_on(WORDS))
    assert "input 2 has" in next_tokens(words, targets, LENGTHS)
    assert "input 3 has" in next_tokens(words, LENGTHS, targets)


@pytest.mark.parametrize(("ignored", "are_labels"), [(-100, True), (0, False)])
def test_labels_of_masked_words_are_seen_before_the_class_of_a_pair(ignored, are_labels):
    """As of BERT: the last input, a class for each sample, is not all that is learned."""
    random = np.random.default_rng(5)
    words = random.integers(1, 50, (4, 16)).astype(np.int32)
    kinds = np.repeat([[0, 1]], 8, axis=1).repeat(4, 0).astype(np.int32)
    labels = np.where(random.random((4, 16)) < 0.2, words, ignored).astype(np.int32)
    batch = [Tensor(one) for one in (words, kinds, labels, np.zeros(4, np.int32))]
    assert not no_class_a_sample(*batch)
    assert ("input 3 has the number -100 among" in next_tokens(*batch)) is are_labels
    differences = Tensor(random.integers(-9, 9, (4, 16)).astype(np.int32))
    assert not next_tokens(batch[0], differences, batch[3])  # numbers of a sample, such as changes
