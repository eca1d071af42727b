"""Runs a script, or a module, as plain Python would: same argv, path, traceback, exit code."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence

INTERRUPTED = 130  # the exit code of a shell for Ctrl-C


def run_script(script: str, args: Sequence[str]) -> None:
    """Run ``script`` as ``python script args`` would: same argv, path, traceback, exit code."""
    sys.argv[:] = [script, *args]
    script = os.path.abspath(script)
    # "python -m" put the working directory first; plain Python puts the script's folder there.
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    _hide_launcher_frames(script)
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__file__, module.__dict__["__cached__"] = script, None
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # the user's own script, as the user asked


def file_of_module(name: str) -> str:
    """Return the file that ``python -m name`` would run; raise a ``ValueError`` without one."""
    sys.path[0] = os.getcwd()  # as for every module
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise ValueError(f"cannot find the module {name!r}: {error}") from error
    if spec is None or not spec.has_location or spec.origin is None:
        raise ValueError(f"cannot find the module {name!r}, from {os.getcwd()}")
    return spec.origin


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as ``python -m name args`` would."""
    file = file_of_module(name)
    sys.argv[:] = [file, *args]
    _hide_launcher_frames(file)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _hide_launcher_frames(script: str) -> None:
    """Let an uncaught error show the script's frames only, as plain Python does."""
    show = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
