"""Runs a script as plain Python would: same argv, import path, traceback and exit code."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
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
