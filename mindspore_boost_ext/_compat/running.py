"""How Cells run: eagerly or compiled, and what of it MindSpore keeps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import mindspore as ms
from mindspore import nn


def forget_compiled(cell: nn.Cell) -> None:
    """Let a Cell be compiled anew when it runs next."""
    cell.compile_cache.clear()


def free_compiled(cells: Sequence[nn.Cell]) -> None:
    """Free the graphs compiled for Cells and their ``ms.jit`` methods, which may compile anew."""
    api = _graph_api()
    executor = sys.modules["mindspore.nn.cell"]._cell_graph_executor
    for cell in cells:
        if cell.compile_cache:
            executor.del_net_res(cell, cell.compile_cache)
            forget_compiled(cell)
    # The name of a method's graph holds when its Cell was made, and where it lies.
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


def without_autograd() -> Any:
    """Return a context in which PYNATIVE_MODE writes down nothing for a backward pass.

    Without it what is assigned to a weight keeps all that it was made from, from step to step.
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
    """In the context a Cell that raises leaves PYNATIVE_MODE as it was.

    MindSpore would go on recording for a backward pass, and compute all that follows in the float16
    of such a Cell. Within a recording of the user's own, which would be lost, nothing is done.
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


def compiled_graphs() -> int:
    """Return how many graphs this process holds compiled: of Cells, and of ``ms.jit`` functions."""
    api = _graph_api()
    return len(api.ms_compile_cache) + sum(len(one) for one in api.cells_compile_cache.values())


def differentiated_functions() -> dict[str, str]:
    """Return the functions of ``ms.jit``, but ours, that were compiled to be differentiated.

    Returns:
        dict, what each was compiled for -> module, name, file and line of the function.
    """
    # "module.function.FILE.LINE.grad.TIME..."; ours have gradients of their own.
    own = __name__.partition(".")[0] + "."
    names = [name for name in _graph_api().ms_compile_cache if ".grad." in name]
    return {name: name.partition(".grad.")[0] for name in names if not name.startswith(own)}
