"""The only file that touches private MindSpore names. Checked against 2.7 to 2.10.

Thin adapters: public names for MindSpore's private ones, and for those of its own boost package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType, ModuleType
from typing import Any, TypeVar

import mindspore as ms
from mindspore import Parameter, Tensor, _c_expression, nn, ops
from mindspore.amp import LossScaleManager
from mindspore.common.sparse_tensor import RowTensorInner as RowTensor  # noqa: F401  (used by gradients)
from mindspore.communication import _comm_helper
from mindspore.nn.layer import rnns
from mindspore.ops.operations import array_ops, math_ops, nn_ops
from mindspore.rewrite.common import namespace
from mindspore.rewrite.parsers.assign_parser import AssignParser
from mindspore.run_check import _check_version
from mindspore.train.callback import _CallbackManager as CallbackManager  # noqa: F401
from mindspore.train.callback import _InternalCallbackParam as CallbackParameters  # noqa: F401
from mindspore.train.train_thor.convert_utils import ConvertModelUtils as BuiltInConversion  # noqa: F401

try:
    from mindspore.graph._parse.resources import convert_object_map as IN_GRAPHS
    from mindspore.graph.jit_context import jit_context
except ImportError:  # before 2.10
    from mindspore._extends.parse.resources import convert_object_map as IN_GRAPHS  # noqa: F401
    from mindspore.common.jit_context import jit_context

_Named = TypeVar("_Named")
# The two methods in which ms.Model builds what it trains, in the order of their calls.
PREPARE_METHOD = "_build_boost_network"
BUILD_METHOD = "_build_train_network"
# The method in which ms.Model opens the data of a training or an evaluation.
OPEN_METHOD = "_exec_preprocess"

VERSION = tuple(int(part) for part in re.findall(r"\d+", ms.__version__)[:2])

# Whether a step of PYNATIVE_MODE may end in a function of ms.jit. In 2.7 such a function sometimes
# reads a Parameter before an operator that ran earlier has written it.
COMPILES_END_OF_STEP = VERSION >= (2, 8)
# The classes of MindSpore's own THOR; their module has the name of the function that makes them.
_thor: Any = sys.modules["mindspore.nn.optim.thor"]
BUILT_IN_THORS = (_thor.ThorGpu, _thor.ThorAscend)
_STATE = "_mindspore_boost_ext"

# The Cells that run the steps of a recurrent layer on CPU.
GRU_STEPS = rnns._DynamicGRUCPUGPU
RNN_STEPS, RELU_RNN_STEPS = rnns._DynamicRNNTanh, rnns._DynamicRNNRelu


def _alias(name: str, doc: str, *default: object) -> property:
    """Return a property for a private attribute of the Model, with its value until it is set."""
    return property(
        lambda self: getattr(self._model, name, *default),
        lambda self, value: setattr(self._model, name, value),
        doc=doc,
    )


class ModelUnderConstruction:
    """Public names for the parts of a ``ms.Model`` whose constructor is running."""

    def __init__(self, model: ms.Model) -> None:
        self._model = model

    network = _alias("_network", "The user's network (nn.Cell).")
    optimizer = _alias("_optimizer", "The user's optimizer, or None.")
    eval_network = _alias("_eval_network", "The user's network for evaluation, or None.")
    loss_fn = _alias("_loss_fn", "The user's loss, or None.")
    boost_level = _alias("_boost_level", "The level as given to ms.Model.")
    has_own_manager = _alias("_loss_scale_manager_set", "Whether the user gave a scale manager.")
    boost = _alias(_STATE, "The AutoBoost of this Model, or None.", None)

    @property
    def loss_scale_manager(self) -> LossScaleManager | None:
        """The manager given by the user, else the one that the amp level brings, or None."""
        if self.has_own_manager:
            return self._model._loss_scale_manager
        return default_loss_scale_manager(self._model._amp_level)

    def plain_train_network(self, build: Callable[[ms.Model], nn.Cell]) -> nn.Cell:
        """Let ms.Model's method build MindSpore's step, without boost and without loss scaling.

        That cell is never run: its network already carries the loss and the mixed precision.
        """
        private = ("_boost_level", "_loss_scale_manager", "_loss_scale_manager_set", _STATE)
        saved = {name: getattr(self._model, name) for name in private}
        vars(self._model).update(zip(private, ("O0", None, True, None)))
        try:
            return build(self._model)
        finally:
            vars(self._model).update(saved)


def default_loss_scale_manager(amp_level: str) -> LossScaleManager | None:
    """Return the loss-scale manager that MindSpore uses at an amp level when none is given."""
    return ms.amp.DynamicLossScaleManager() if amp_level == "O2" else None


# ---- Overflow detection: what the device can do, and the operators that have no public name ----


def ascend_soc() -> str:
    """Return MindSpore's name for the Ascend chip, such as ``"ascend910b"``; empty without one."""
    return str(_c_expression.MSContext.get_instance().get_ascend_soc_version())


def has_all_finite_package() -> bool:
    """Return whether the package that carries AllFinite is there and fits the installed CANN."""
    try:
        return bool(_check_version.AscendEnvChecker(None).check_custom_version())
    except OSError:
        return False


def float_status_register() -> tuple[Any, Any]:
    """Return the operators that read and that clear the float-status register of Ascend."""
    return math_ops.NPUGetFloatStatusV2(), math_ops.NPUClearFloatStatusV2()


def all_finite_operator() -> ops.Primitive:
    """Return AllFinite: one kernel for a tuple of tensors, True when something is NOT finite."""
    return nn_ops.AllFinite()


# ---- Cells: a second Cell over the same parts ----

# Attributes that running a Cell leaves on it; a copy makes its own.
_TRACES = {"_mutable_flags", "_Cell__compile_cell_hook__", "__parse_method__", "_func_graph_flags"}


def im2col(
    kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> ops.Primitive:
    """Return the operator behind ``ops.unfold``: [N, C, H, W] -> [N, C, kernel, positions]."""
    return array_ops.Im2Col(list(kernel), list(stride), list(dilation), 0)


def own_attributes(cell: nn.Cell) -> dict[str, Any]:
    """Return the attributes of a Cell, without those that every Cell has."""
    machinery = _machinery()
    return {name: value for name, value in vars(cell).items() if name not in machinery}


def hooks(cell: nn.Cell) -> dict[str, Any]:
    """Return the attributes in which a Cell keeps its hooks, and not whether one is running."""
    names = _machinery("hook") - _TRACES - {"_is_recursion_hook"}
    return {name: vars(cell)[name] for name in names if name in vars(cell)}


@functools.cache
def _machinery(word: str = "") -> frozenset[str]:
    names = {*vars(nn.Cell(auto_prefix=False)), *_TRACES}
    return frozenset(name for name in names if word in name)


def shallow_copy(cell: nn.Cell, kind: Any = None, follows: bool = False) -> nn.Cell:
    """Return a Cell over the same Parameters, Cells and attributes, of its class or ``kind``.

    The copy is another object, with a compile cache and attributes of its own. If it ``follows``,
    it has the Parameters, buffers and operators that ``cell`` gets later, too.
    """
    kind = type(cell) if kind is None else kind
    copy = kind.__new__(kind)
    nn.Cell.__init__(copy, auto_prefix=False)
    copy.add_flags(**cell.get_flags())
    for name in ("training", *(("_auto_prefix", "_param_prefix") if follows else ())):
        vars(copy)[name] = vars(cell)[name]
    for name, value in own_attributes(cell).items():
        # Amp level "auto" sets a construct on the object.
        bound = isinstance(value, MethodType) and value.__self__ is cell
        vars(copy)[name] = MethodType(value.__func__, copy) if bound else value
    for name in ("_params", "_cells", "_primitives", "_buffers"):
        if name in vars(cell):
            held = vars(cell)[name]
            vars(copy)[name] = held if follows and name != CHILDREN else held.copy()
    return copy


CHILDREN = "_cells"  # the attribute in which a Cell holds them


def children(cell: nn.Cell) -> dict[str, Any]:
    """Return the Cells that a Cell holds as attributes, by name."""
    return cell._cells


def set_child(cell: nn.Cell, name: str, child: Any) -> None:
    """Put a Cell or an operator under a name, without new names for its parameters."""
    if isinstance(child, ops.Primitive):
        cell._cells.pop(name, None)
        setattr(cell, name, child)
        return
    if cell._primitives.pop(name, None) is not None:
        del vars(cell)[name]  # an attribute would hide the Cell
    cell._cells[name] = child


def wrapped_optimizer(optimizer: nn.Cell) -> nn.Cell | None:
    """Return the optimizer inside a wrapper (``FreezeOpt``, ``nn.LARS``); None for others."""
    return vars(optimizer).get("_cells", {}).get("opt")


def with_wrapped(optimizer: nn.Cell | None) -> Iterator[nn.Cell]:
    """Yield an optimizer, then the one that it wraps, and so on."""
    while optimizer is not None:
        yield optimizer
        optimizer = wrapped_optimizer(optimizer)


def lists_of_rates(optimizer: nn.Cell) -> list[Tensor]:
    """Return the learning rates of the groups that have a list of them, one for each step."""
    rates: Any = optimizer.learning_rate
    entries = list(rates) if isinstance(rates, (list, tuple, nn.CellList)) else [rates]
    kind = sys.modules["mindspore.nn.optim.optimizer"]._IteratorLearningRate
    return [entry.learning_rate for entry in entries if isinstance(entry, kind)]


def own_parameters(cell: nn.Cell) -> dict[str, Parameter]:
    """Return the Parameters that a Cell itself holds as attributes, by name; to be read only."""
    return cell._params


def set_own_parameters(cell: nn.Cell, parameters: dict[str, Parameter]) -> None:
    """Let a Cell hold these Parameters as attributes, and no other ones."""
    vars(cell)["_params"] = parameters


def primitives(cell: nn.Cell) -> dict[str, Any]:
    """Return the operators that a Cell itself holds as attributes, by name; to be read only."""
    return cell._primitives


def has_hooks(cell: nn.Cell) -> bool:
    """Return whether somebody has put a hook on a Cell."""
    kinds = ("forward_hook", "forward_pre_hook", "backward_hook", "backward_pre_hook")
    return any(vars(cell).get(start + kind) for kind in kinds for start in ("_", "_lazy_"))


def is_recomputed(cell: nn.Cell) -> bool:
    """Return whether the backward pass runs a Cell again, by ``recompute`` of it or around it."""
    return bool(cell._has_config_recompute)


def not_rewritten(one: _Named) -> _Named:
    """Keep mixed precision O1 from rewriting a function, or the Cells of a class.

    It rewrites others without the globals of their modules.
    """
    black_lists = AssignParser._function_parse_black_list, namespace._subtree_black_list
    black_lists[isinstance(one, type)].append(one)
    return one


def name_trained(optimizer: nn.Optimizer) -> None:
    """Let an optimizer list the names of its parameters, as its constructor does."""
    optimizer._user_parameters = [parameter.name for parameter in optimizer.parameters]


def share_compile_settings(source: nn.Cell, target: nn.Cell) -> None:
    """Give ``target`` the declared inputs and the jit configuration of ``source``."""
    for name in ("_dynamic_shape_inputs", "_jit_config_dict"):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


# ---- Running Cells: eagerly or compiled, and what MindSpore keeps of it ----


def is_tracing() -> bool:
    """Return whether a function of ``ms.jit`` records what Python runs, to make a graph."""
    return jit_context() is not None


def forget_compiled(cell: nn.Cell) -> None:
    """Let a Cell be compiled anew when it runs next."""
    cell.compile_cache.clear()


def parse_by_construct(cells: Iterable[nn.Cell]) -> None:
    """Let graphs use the ``construct`` of Cells again.

    If PYNATIVE_MODE has called a method that is a function of ``ms.jit``, its Cell stays marked
    with it. MindSpore would put that method into a graph instead of ``construct``.
    """
    for cell in cells:
        vars(cell).pop("__parse_method__", None)


def free_compiled(cells: Sequence[nn.Cell]) -> None:
    """Free the graphs compiled for Cells and their ``ms.jit`` methods, which may compile anew."""
    api = _graph_api()
    executor = sys.modules["mindspore.nn.cell"]._cell_graph_executor
    for cell in cells:
        if cell.compile_cache:
            executor.del_net_res(cell, cell.compile_cache)
            forget_compiled(cell)
    # The name of a method's graph contains its Cell's creation time and id.
    marks = [(f".{cell.create_time}", f".{id(cell)}.") for cell in cells]
    methods = {
        name
        for name in api.ms_compile_cache
        if any(made in name and place in name for made, place in marks)
    }
    if methods:
        executor.del_net_res(None, methods)
        if hasattr(api, "JitExecutor_"):
            api.JitExecutor_.get_instance().del_net_res(None, methods)
        api.ms_compile_cache.difference_update(methods)


def without_autograd() -> contextlib.AbstractContextManager[None]:
    """Return a context in which PYNATIVE_MODE records nothing for a backward pass.

    Without it, a value assigned to a weight keeps all that it was made from, from step to step.
    """
    if ms.get_context("mode") == ms.GRAPH_MODE:
        return contextlib.nullcontext()
    return _graph_api()._no_grad()


@contextlib.contextmanager
def running_eagerly() -> Iterator[None]:
    """In the context Cells run operator by operator, in GRAPH_MODE too, and nothing is compiled."""
    context = ms.context._context()
    mode = context.get_mode()
    context.set_mode(ms.PYNATIVE_MODE)
    try:
        with _graph_api()._no_grad():
            yield
    finally:
        context.set_mode(mode)


@contextlib.contextmanager
def forgetting_failures() -> Iterator[None]:
    """In the context, a Cell that raises leaves PYNATIVE_MODE as it was.

    MindSpore itself goes on recording for a backward pass, and computes all that follows in that
    Cell's float16. Inside the user's own recording, which would be lost, the context does nothing.
    """
    executor = sys.modules["mindspore.nn.cell"]._pynative_executor
    is_within = executor.grad_flag()
    try:
        yield
    except BaseException:
        if not is_within:
            executor.clear_res()
        raise


def _graph_api() -> ModuleType:
    """Return ``mindspore.common.api`` up to 2.8, later ``mindspore.graph.api``."""
    executor = sys.modules["mindspore.nn.cell"]._cell_graph_executor
    return sys.modules[type(executor).__module__]


def broadcast_parameters(parameters: dict[str, Parameter]) -> None:
    """Give all ranks the Parameters of rank 0, by name, as MindSpore does when it compiles."""
    _graph_api()._build_broadcast_graph(parameters, "_broadcast_subgraph")


def compiled_graphs() -> int:
    """Return how many graphs this process holds compiled: of Cells, and of ``ms.jit`` functions."""
    api = _graph_api()
    return len(api.ms_compile_cache) + sum(len(one) for one in api.cells_compile_cache.values())


def keeps_graphs() -> bool:
    """Return whether MindSpore writes graphs to files, and reads them from there."""
    return os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1" or bool(
        ms.get_context("enable_compile_cache")
    )


def set_entry_script(file: str) -> None:
    """Tell MindSpore, if it was imported before, which file runs: its cache of graphs uses that."""
    api = _graph_api()
    if hasattr(api, "entry_script_path"):
        vars(api)["entry_script_path"] = os.path.realpath(file)


def differentiated_functions() -> dict[str, str]:
    """Return the functions of ``ms.jit``, except ours, that were compiled to be differentiated.

    Keys are MindSpore's names of the graphs, values module, name, file and line of the function.
    """
    # "module.function.FILE.LINE.grad.TIME..."; ours have gradients of their own.
    own = __name__.partition(".")[0] + "."
    names = [name for name in _graph_api().ms_compile_cache if ".grad." in name]
    return {name: name.partition(".grad.")[0] for name in names if not name.startswith(own)}


# ---- Communication groups ----


def make_group(name: str, ranks: tuple[int, ...]) -> None:
    """Create a communication group unless this process has it already."""
    if name not in _comm_helper._ExistingGroup.ITEMS:
        ms.communication.create_group(name, list(ranks))


def reduces_in_groups() -> bool:
    """Return whether AllReduce works among some of the ranks: on CPU not before 2.8."""
    return VERSION >= (2, 8) or ms.get_context("device_target") != "CPU"


# ---- The machine: settings of MindSpore's CPU backend that have no public name ----

ONEDNN_LACKS_AVX512 = VERSION in ((2, 9), (2, 10))


def no_cpu_training(may_change: bool) -> str:
    """Return why training is not on CPU, or may change from CPU; empty if it stays there."""
    target = ms.get_context("device_target")
    if target != "CPU":
        return f"the device is {target}"
    supports = _c_expression.MSContext.get_instance().is_pkg_support_device
    others = [one for one in ("Ascend", "GPU") if supports(one)]
    return f"{others[0]} may be chosen before the first Model" if others and may_change else ""


def launches_blocking() -> bool:
    """Return whether PYNATIVE_MODE waits for each operator, whoever asked for that."""
    blocking = _c_expression.RuntimeConf.get_instance().is_launch_blocking()
    return bool(blocking or ms.get_context("pynative_synchronize"))


def set_blocking_launch(blocking: bool) -> None:
    """Let PYNATIVE_MODE wait for each operator, or not.

    ``ms.runtime.launch_blocking`` cannot be taken back, and ``ms.set_context`` of this warns.
    """
    setting = _c_expression.ms_ctx_param.pynative_synchronize
    _c_expression.MSContext.get_instance().set_param(setting, blocking)


def executor_class() -> type:
    """Return the class by which PYNATIVE_MODE runs operators, and functions of ``ms.jit``."""
    return type(_graph_api()._pynative_executor)
