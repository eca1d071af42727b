"""The steps of a traced network: which ones pass the scale of values on, and their names."""

from __future__ import annotations

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import has_replaced_construct, is_rewritten
from mindspore_boost_ext.base.order import is_own
from mindspore_boost_ext.less_batch_normalization.graph import FILLED, OPAQUE, SPLITS, Node

# nn.BatchNorm3d is a layer around an nn.BatchNorm2d, which is found in it.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
ACTIVATIONS = frozenset(
    (
        *("relu", "relu6", "gelu", "gelucell", "fastgelu", "silu", "swish", "hswish", "hardswish"),
        *("leakyrelu", "prelu", "elu", "celu", "selu", "mish", "softplus", "sigmoid", "tanh"),
        *("hsigmoid", "hardsigmoid", "hardtanh", "softsign", "logsigmoid", "rrelu"),
    )
)
PRODUCTS = frozenset(("matmul", "bmm", "batchmatmul", "dense", "einsum"))
ADDITIONS = frozenset(("add", "iadd", "radd", "tensoradd", "addn", "tensoraddv2"))
CONCATENATIONS = frozenset(("concat", "cat", "concatenate", "stack"))
_PASSING = frozenset(
    (
        *("identity", "cast", "mixedprecisioncast", "astype", "depend", "dropout", "dropout2d"),
        *("avgpool", "avgpool2d", "maxpool", "maxpool2d", "pad", "removedbatchnorm"),
        *("getitem", "reshape", "view", "transpose", "permute", "swapaxes", "flatten"),
    )
)
_PASSING_ON = ACTIVATIONS | ADDITIONS | CONCATENATIONS | SPLITS | _PASSING
_ZEROS = frozenset(("zeros", "zeroslike"))  # which have no scale
_MULTIPLICATIONS = frozenset(("mul", "multiply"))
_MEANS = frozenset(
    (
        *("mean", "reducemean", "sum", "reducesum", "max", "reducemax", "amax"),
        *("adaptiveavgpool2d", "adaptivemaxpool2d", "globalavgpooling"),
    )
)
_WORDS = {
    **dict.fromkeys(_MEANS, "a mean, sum or maximum over positions or channels"),
    **dict.fromkeys(PRODUCTS, "a matrix product"),
    **dict.fromkeys(("softmax", "logsoftmax"), "a softmax"),
    **dict.fromkeys(("layernorm", "groupnorm"), "a normalisation of another kind"),
    **dict.fromkeys(("conv2dtranspose", "conv3dtranspose"), "a transposed convolution"),
    **dict.fromkeys(("div", "truediv", "realdiv"), "a division"),
    **dict.fromkeys(("interpolate", "upsample", "resizebilinear"), "a resizing of the image"),
    **dict.fromkeys(ADDITIONS, "an addition of a number"),
    **dict.fromkeys(CONCATENATIONS, "a concatenation with a constant"),
    FILLED: "a padding with a number",
    "sub": "a subtraction",
}


def is_batch_norm(node: Node) -> bool:
    """Return whether a node is a BatchNorm over its batch, and nothing else."""
    return isinstance(node.cell, BATCH_NORMS) and not does_else(node.cell)


def does_else(norm: nn.Cell) -> str:
    """Return why a BatchNorm stays, and does not count as removing the scale; else empty."""
    if norm.use_batch_statistics is False:
        return "its statistics are fixed"
    return own_construct(norm)


def own_construct(layer: nn.Cell) -> str:
    """Return why a layer must stay: its own code may do more than MindSpore's; else empty."""
    kind = type(layer)
    if is_rewritten(layer):
        return "auto_mixed_precision has rewritten it: give amp_level='O1' to the Model instead"
    is_plain = is_own(kind.construct.__module__) and not has_replaced_construct(layer)
    return "" if is_plain else f"{kind.__name__} has its own construct"


def is_convolution(node: Node) -> bool:
    """Return whether a node is a convolution, as a layer or as an operator."""
    return node.name in CONVOLUTIONS or isinstance(node.cell, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def passes_on(node: Node) -> bool:
    """Return whether a node passes the scale of its inputs on, and changes in nothing else."""
    if node.name == OPAQUE or _has_a_number(node):
        return False
    known = is_convolution(node) or node.name in _PASSING_ON
    return known or _gates_itself(node) or _is_scaled(node)


def _has_a_number(node: Node) -> bool:
    """Return whether a number or a constant is added, or stands beside the data."""
    only_one = node.name in ADDITIONS and len(node.inputs) == 1  # numbers are not recorded
    joins = node.name in ADDITIONS | CONCATENATIONS
    return only_one or (
        joins and any(one.constant and one.name not in _ZEROS for one in node.inputs)
    )


def words(node: Node) -> str:
    """Return the user's name for a step that does not pass the scale of its input on."""
    if node.name in _MULTIPLICATIONS:
        _, way = _gate(node)
        if any(step.name in _MEANS for step in way):
            return "a squeeze-and-excitation gate"
        return "a gate" if way else "a product of two values"
    if isinstance(node.cell, BATCH_NORMS) and node.cell.use_batch_statistics is False:
        return "a BatchNorm with fixed statistics"
    if node.cell is not None and _compat.has_hooks(node.cell):
        return f"the layer {type(node.cell).__name__}, which has hooks,"
    if node.name == OPAQUE and node.cell is None:
        return "a hook"
    if node.cell is None or node.name in _WORDS:
        return _WORDS.get(node.name, f"the operation {node.name}")
    return f"the layer {type(node.cell).__name__}"


def _is_scaled(node: Node) -> bool:
    """Return whether a node multiplies a value by numbers or weights."""
    one_value = len(node.data) == 1 and node.inputs.count(node.data[0]) == 1
    return node.name in _MULTIPLICATIONS and one_value


def _gates_itself(node: Node) -> bool:
    """Return whether a node is an activation such as ``x * sigmoid(x)``."""
    _, way = _gate(node)
    return bool(way) and all(step.name in ACTIVATIONS for step in way)


def _gate(node: Node) -> tuple[Node | None, list[Node]]:
    """Return a value that is multiplied by a factor made from it, and the steps to the factor."""
    if node.name in _MULTIPLICATIONS and len(node.data) == 2:
        for value, factor in (node.data, node.data[::-1]):
            way: list[Node] = []
            step: Node | None = factor
            while step is not None and step is not value:
                way.append(step)
                step = step.data[0] if len(step.data) == 1 else _gate(step)[0]
            if step is value:
                return value, way
    return None, []
