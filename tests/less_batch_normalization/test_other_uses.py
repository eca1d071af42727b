"""A BatchNorm stays if the script uses its result elsewhere too, however it says so."""

from __future__ import annotations

import array
import collections
import functools
import gc
import threading
from dataclasses import dataclass

import mindspore as ms
import pytest
import residual_nets
from mindspore import Tensor, nn, ops
from residual_nets import InHalves as Block

from mindspore_boost_ext.less_batch_normalization.rewrite import less_bn
from mindspore_boost_ext.less_batch_normalization.tracing import trace_both

WIDTH = residual_nets.WIDTH
GLOBAL_LIST, GLOBAL_DICT, COUNT, OF_THREAD = [], {}, 0, threading.local()


class Kept:
    """An object of the script."""

    def __init__(self):
        self.features = None


class Slotted:
    __slots__ = ("features",)

    def __init__(self):
        self.features = None


@dataclass
class Output:
    features: Tensor
    result: Tensor


def done(net):
    return {one.name.rpartition(".")[2]: one.done for one in less_bn(net).changes}


def test_without_another_use_it_goes():
    assert done(Block()) == {"bn1": "removed", "bn2": "kept"}
    assert done(nn.SequentialCell(Block()))["bn1"] == "removed"


def test_it_stays_in_evaluation_mode_in_a_network_that_trains():
    net = Block()
    net.set_train()
    net.bn1.set_train(False)
    (reason,) = [one.reason for one in less_bn(net).changes if one.name == "bn1"]
    assert reason == "it is in evaluation mode while the network trains"
    assert done(Block().set_train())["bn1"] == "removed"


@pytest.mark.parametrize("given", [None, True, False])
def test_one_in_evaluation_mode_does_not_end_a_branch(given):
    net = Block().set_train()
    net.bn2.set_train(False)
    net.bn2.use_batch_statistics = given
    assert done(net) == {"bn1": "kept", "bn2": "kept"}
    assert net.bn2.use_batch_statistics is given


# ---- Arguments that a call may leave out ----


class OptionalLabel(Block):
    def construct(self, x, label=None):
        y = self.first(x)
        result = self.last(x, y)
        return result if label is None else ops.mse_loss(y, label)


class Flag(Block):
    def construct(self, x, with_features=False):
        y = self.first(x)
        return (self.last(x, y), y) if with_features else self.last(x, y)


class OneOfTwoFlags(Block):
    def construct(self, x, plain=False, with_features=False):
        y = self.first(x)
        return (self.last(x, y), y) if with_features and not plain else self.last(x, y)


class KeywordOnly(Block):
    def construct(self, x, *, label=None):
        y = self.first(x)
        return self.last(x, y) if label is None else ops.mse_loss(y, label)


class Star(Block):
    def construct(self, *batch):
        y = self.first(batch[0])
        result = self.last(batch[0], y)
        return result if len(batch) == 1 else ops.mse_loss(y, batch[1])


class StarAfterOne(Block):
    def construct(self, x, *labels):
        y = self.first(x)
        return ops.mse_loss(y, labels[0]) if labels else self.last(x, y)


@pytest.mark.parametrize(
    "kind", [OptionalLabel, Flag, OneOfTwoFlags, KeywordOnly, Star, StarAfterOne]
)
def test_a_use_that_an_optional_argument_brings(kind):
    assert done(kind())["bn1"] == "kept"


class FixedStar(Block):
    def construct(self, x, *labels):
        return ops.mse_loss(self.last(x, self.first(x)), labels[0])


class UnpackedStar(Block):
    def construct(self, x, *labels):
        (label,) = labels
        return ops.mse_loss(self.last(x, self.first(x)), label)


@pytest.mark.parametrize("kind", [FixedStar, UnpackedStar])
def test_a_number_of_tensors_that_the_code_does_not_take_does_not_count(kind):
    assert done(kind())["bn1"] == "removed"


def test_an_error_in_the_code_keeps_what_it_may_use():
    class Wrong(Block):
        def construct(self, x):
            return self.last(x, self.first(x), 1)

    rewriting = less_bn(Wrong(), fn_flag=True)
    assert {one.done for one in rewriting.changes} == {"kept"}


class Wrapped(nn.Cell):
    """Takes any number of inputs, as the Cells of mixed precision do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, *inputs):
        return self.net(*inputs)


def test_a_call_that_no_script_can_make_does_not_count():
    assert done(Wrapped(Block()))["bn1"] == "removed"
    assert done(ms.amp.auto_mixed_precision(Block(), "O2"))["bn1"] == "removed"


class Mixing(Block):
    """Its addition and its branch are not in one Cell; ``share`` is a number, if it is given."""

    def construct(self, x, share=None):
        if share is not None:
            x = x * float(share)
        return self.last(x, self.first(x))


def test_the_reason_names_the_argument_that_is_not_understood():
    net = Mixing()
    net.half = nn.SequentialCell(nn.SequentialCell(nn.Conv2d(WIDTH, WIDTH, 3), net.bn1))
    said = {one.name: one.reason.partition(" not ")[0] for one in less_bn(net).changes}
    reason = "with share given, Mixing.construct was"
    assert said == {"half.0.1": reason, "bn2": reason}


# ---- Features that are put somewhere ----


def in_an_object(self, y):
    self.kept.features = y


def in_a_list(self, y):
    self.entries.append(y)


def in_a_dict(self, y):
    self.table["y"] = [y]


def in_a_queue(self, y):
    self.queue.append(y)


def in_slots(self, y):
    self.slotted.features = y


def in_a_list_of_the_module(self, y):
    GLOBAL_LIST.append(y)


def in_a_dict_of_the_module(self, y):
    GLOBAL_DICT["y"] = y


def in_a_global_name(self, y):
    global FEATURES
    FEATURES = y


def in_an_attribute_of_a_dict(self, y):
    self.__dict__["features"] = y


def in_vars(self, y):
    vars(self)["features"] = y


def in_a_default(self, y, kept=[]):  # noqa: B006
    kept.append(y)


def a_nonlocal_name():
    features = None

    def in_a_nonlocal_name(self, y):
        nonlocal features
        features = y

    return in_a_nonlocal_name


class Store:
    """Keeps features for all."""

    features, last, entries = {}, None, []

    @classmethod
    def put(cls, y):
        cls.features["y"] = y

    def add(self, y):
        self.entries.append(y)


STORE = Store()


def by_a_class_method(self, y):
    Store.put(y)


def in_a_dict_of_a_class(self, y):
    Store.features["z"] = y


def in_an_attribute_of_a_class(self, y):
    Store.last = y


def by_a_method(self, y):
    STORE.add(y)


def in_an_attribute_of_a_function(self, y):
    in_a_list.kept = y


def in_a_variable_of_the_thread(self, y):
    OF_THREAD.features = y


OTHERS = [by_a_class_method, in_a_dict_of_a_class, in_an_attribute_of_a_class, by_a_method]
OTHERS += [in_an_attribute_of_a_function, in_a_variable_of_the_thread]


@pytest.mark.parametrize("put", OTHERS, ids=lambda one: one.__name__)
def test_features_that_the_code_puts_where_the_trace_does_not_look(put):
    assert done(Putting(put))["bn1"] == "kept"


def count(self, y):
    global COUNT
    COUNT += 1


def test_a_number_in_a_global_name_is_no_feature():
    assert done(Putting(count))["bn1"] == "removed"
    assert COUNT == 0


PLACES = [in_an_object, in_a_list, in_a_dict, in_a_queue, in_slots, in_a_list_of_the_module]
PLACES += [in_a_dict_of_the_module, in_a_global_name, in_an_attribute_of_a_dict, in_vars]
PLACES += [in_a_default, a_nonlocal_name()]


class Putting(Block):
    def __init__(self, put):
        super().__init__()
        self.put, self.queue = put, collections.deque()
        self.kept, self.slotted, self.entries, self.table = Kept(), Slotted(), [], {}

    def construct(self, x):
        y = self.first(x)
        self.put(self, y)
        return self.last(x, y)


@pytest.mark.parametrize("put", PLACES, ids=lambda one: one.__name__)
def test_features_that_the_code_puts_somewhere(put):
    net = Putting(put)
    assert done(net)["bn1"] == "kept"
    assert (net.kept.features, net.slotted.features) == (None, None)
    places = net.entries, net.table, net.queue, GLOBAL_LIST, GLOBAL_DICT
    assert not any(places)
    assert not in_a_default.__defaults__[0]
    assert "FEATURES" not in globals()


class InADataclass(Block):
    def construct(self, x):
        y = self.first(x)
        return Output(y, self.last(x, y))


class InAnIterator(Block):
    def construct(self, x):
        y = self.first(x)
        result = self.last(x, y)
        return (one for one in (y, result))


class InALambda(Block):
    def construct(self, x):
        y = self.first(x)
        return ops.ForiLoop()(0, 3, lambda _, z: z + y, self.last(x, y))


class InTwoLambdas(Block):
    def construct(self, x):
        y = self.first(x)
        result = self.last(x, y)
        return result, (lambda: result), (lambda: result), (lambda: y)


class InAView(Block):
    def construct(self, x):
        y = self.first(x)
        return {"y": y, "result": self.last(x, y)}.values()


class InAViewGivenOn(Block):
    def construct(self, x):
        y = self.first(x)
        return self.sum_of({"y": y, "result": self.last(x, y)}.values())

    def sum_of(self, features):
        return ops.addn(features)


class ByAGivenObject(Block):
    def construct(self, x, options):
        y = self.first(x)
        result = self.last(x, y)
        return (result, y) if options.mode == "features" else result


class InADefault(Block):
    def construct(self, x):
        y = self.first(x)
        return ops.ForiLoop()(0, 3, lambda _, z, y=y: z + y, self.last(x, y))


class InAPartial(Block):
    def construct(self, x):
        y = self.first(x)
        return ops.ForiLoop()(0, 3, functools.partial(torn, y), self.last(x, y))


def torn(y, _, z):
    return z + y


INSIDE = [InADataclass, InAnIterator, InALambda, InADefault, InAPartial]
INSIDE += [InTwoLambdas, InAView, InAViewGivenOn, ByAGivenObject]


@pytest.mark.parametrize("kind", INSIDE)
def test_features_inside_of_what_is_returned_or_given_on(kind):
    assert done(kind())["bn1"] == "kept"


class Recursive(Block):
    def construct(self, x):
        y = self.first(x)

        def through(count):
            return y if count == 0 else self.act(through(count - 1))

        return self.last(x, through(2))


class KeepsAnError(Block):
    def construct(self, x):
        y, error = self.first(x), None
        try:
            y = self.missing(y)
        except AttributeError as found:
            error = found
        return self.last(x, y if error else x)


class InACircle(Block):
    def construct(self, x):
        features = {"y": self.first(x)}
        features["all"] = features
        return self.last(x, features["y"])


class ByAnIterator(nn.Cell):
    """Gives an iterator on to a Cell that is understood."""

    def __init__(self):
        super().__init__()
        self.block = OfAnIterator()

    def construct(self, x):
        return self.block(reversed([x, x]))


class OfAnIterator(Block):
    def construct(self, inputs):
        x, other = inputs
        return self.last(x, self.first(x)) + other


@pytest.mark.parametrize("kind", [Recursive, KeepsAnError, InACircle, ByAnIterator])
def test_features_that_are_gone_when_the_call_is_over(kind):
    """A circle of references holds some of them for a while."""
    gc.disable()
    try:
        assert done(kind())["bn1"] == "removed"
    finally:
        gc.enable()


# ---- Code that compares layers and functions ----


def by_equality(self, layer, y):
    return layer == self.bn1


def by_identity(self, layer, y):
    return layer is self.bn1


def by_id(self, layer, y):
    return id(layer) in self.ids


def by_its_text(self, layer, y):
    return "BatchNorm" in str(layer)


def by_a_set(self, layer, y):
    return layer in {self.bn1, self.bn2}


def by_dtype(self, layer, y):
    return layer is not self.conv1 and y.dtype is ms.float32


class Comparing(Block):
    """Takes the features where a comparison says so; it is true for bn1."""

    def __init__(self, compare):
        super().__init__()
        self.compare, self.ids = compare, {id(self.bn1)}

    def construct(self, x):
        y, features = x, None
        for layer in (self.conv1, self.bn1):
            y = layer(y)
            if self.compare(self, layer, y):
                features = y
        result = self.last(x, y)
        return result if features is None else (result, features)


@pytest.mark.parametrize(
    "compare", [by_equality, by_identity, by_id, by_its_text, by_a_set, by_dtype]
)
def test_features_of_a_layer_found_by_a_comparison(compare):
    assert done(Comparing(compare))["bn1"] == "kept"


def by_kind(self, layer, y):
    return type(y) is tuple or y.dtype is None


def test_a_comparison_with_a_known_type_is_understood():
    assert done(Comparing(by_kind))["bn1"] == "removed"


class ByFunction(Block):
    """Takes features where the activation is a certain function, or a certain operator."""

    def __init__(self, activation):
        super().__init__()
        self.activation, self.same = activation, activation

    def construct(self, x):
        y = self.first(x)
        result = self.last(x, y)
        return (result, y) if self.activation is self.same else result


@pytest.mark.parametrize("activation", [ops.sigmoid, ops.ReLU(), torn], ids=["ops", "ReLU", "own"])
def test_features_found_by_comparing_functions(activation):
    assert done(ByFunction(activation))["bn1"] == "kept"


# ---- Hooks, and another construct ----


@pytest.mark.parametrize("name", ["conv1", "act", "conv2"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "backward_hook"])
def test_what_a_hook_on_another_layer_sees(name, kind):
    net = nn.SequentialCell(Block())
    getattr(getattr(net[0], name), f"register_{kind}")(lambda *_: None)
    (change,) = [one for one in less_bn(net).changes if one.name == "0.bn1"]
    assert (change.done, "hooks" in change.reason) == (
        ("removed", False) if name == "conv1" else ("kept", True)
    )


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "backward_hook"])
def test_a_hook_on_a_block_sees_what_enters_and_leaves_it_alone(kind):
    net = nn.SequentialCell(Block(), Block())
    getattr(net[1], f"register_{kind}")(lambda *_: None)
    found = {one.name: one.done for one in less_bn(net).changes if "bn1" in one.name}
    assert found == {"0.bn1": "removed", "1.bn1": "removed"}


class Nested(Block):
    """Its first half is a Cell of its own."""

    def __init__(self):
        super().__init__()
        self.half = nn.SequentialCell(self.conv1, self.bn1)

    def first(self, x):
        return self.half(x)


def test_a_hook_on_a_part_of_a_branch():
    net = Nested()
    handle = net.half.register_forward_hook(lambda *_: None)
    assert "a hook inside the branch" in [one.reason for one in less_bn(net).changes]
    handle.remove()
    assert "removed" in done(net).values()


class RestOfABranch(nn.Cell):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.SequentialCell(block.act, block.conv2, block.bn2)

    def construct(self, y):
        return self.layers(y)


class RestInACell(Block):
    """What comes behind its first half is a Cell of its own."""

    def __init__(self):
        super().__init__()
        self.rest = RestOfABranch(self)

    def last(self, x, y):
        return self.act(x + self.rest(y))


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "backward_hook"])
def test_a_hook_on_the_rest_of_a_branch_sees_what_enters_it(kind):
    assert done(RestInACell())["bn1"] == "removed"
    net = RestInACell()
    getattr(net.rest, f"register_{kind}")(lambda *_: None)
    (reason,) = [one.reason for one in less_bn(net).changes if one.name == "bn1"]
    assert reason == "a hook inside the branch"


@pytest.mark.parametrize("name", ["act", "conv2"])
def test_hooks_that_were_removed_do_not_count(name):
    net = Block()
    for kind in ("forward_hook", "forward_pre_hook", "backward_hook"):
        getattr(getattr(net, name), f"register_{kind}")(lambda *_: None).remove()
    assert done(net)["bn1"] == "removed"


def with_features(net):
    plain = net.construct

    def construct(self, x):
        y = self.first(x)
        return self.last(x, y), y

    net.construct = construct.__get__(net)
    return plain


def around(net):
    plain = net.construct
    net.construct = lambda x: ops.softmax(plain(x))


def a_callable(net):
    net.construct = functools.partial(torn, ops.ones(1), 0)


@pytest.mark.parametrize("give", [with_features, a_callable], ids=lambda one: one.__name__)
def test_a_block_whose_construct_the_script_has_replaced(give):
    block = Block()
    give(block)
    assert done(nn.SequentialCell(block))["bn1"] == "kept"
    block = Block()
    give(block)
    assert done(block)["bn1"] == "kept"


def test_a_construct_around_that_of_the_class():
    block = Block()
    around(block)
    assert done(nn.SequentialCell(block)) == {"bn1": "removed", "bn2": "kept"}


# ---- Numbers that are added ----


class Added(Block):
    def __init__(self, addend):
        super().__init__()
        self.addend = addend

    def construct(self, x):
        y = self.first(x)
        return self.last(x, y + self.addend(x))


@pytest.mark.parametrize(
    "addend",
    [lambda x: Tensor(3.0), lambda x: x.shape[2], lambda x: 3.0, lambda x: ops.ones(1)],
    ids=["tensor", "size", "number", "ones"],
)
def test_an_addition_of_a_number_feels_the_scale(addend):
    assert done(Added(addend))["bn1"] == "kept"


# ---- What the trace must not move ----


class Moving(nn.Cell):
    def __init__(self, move):
        super().__init__()
        self.move, self.dense = move, nn.Dense(2, 2)
        self.entries = (one for one in range(3))
        self.numbers, self.bytes, self.slotted = array.array("l", [0]), bytearray(1), Slotted()

    def construct(self, x):
        self.move(self)
        return self.dense(x)


def a_generator(self):
    next(self.entries)


def an_array(self):
    self.numbers[0] += 1


def bytes_of_an_array(self):
    self.bytes[0] += 1


def a_slot(self):
    self.slotted.features = 1


@pytest.mark.parametrize("move", [a_generator, an_array, bytes_of_an_array, a_slot])
def test_the_trace_moves_nothing_that_the_script_holds(move):
    net = Moving(move)
    trace_both(net)
    assert list(net.entries) == [0, 1, 2]
    assert (net.numbers[0], net.bytes[0], net.slotted.features) == (0, 0, None)
