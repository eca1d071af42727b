"""Runs a script, or a module, as plain Python would: same argv, path, traceback, exit code."""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable, Sequence

from mindspore_boost_ext import _compat

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

INTERRUPTED = 130  # the exit code of a shell for Ctrl-C


def problem_of_file(script: str) -> str:
    """Return why a file cannot be run as a script; empty if it can."""
    if os.path.isdir(script):
        return f"{script!r} is a folder: give the file of a Python script, such as its __main__.py"
    if not os.path.isfile(script):
        return f"cannot open the script {script!r}"
    try:
        with open(script, "rb") as file:
            is_source = b"\0" not in file.read()
    except OSError as error:
        return f"cannot open the script {script!r}: {error.strerror}"
    # Null bytes: a zip archive, or compiled code.
    return "" if is_source else f"{script!r} is not Python source: give the file of a Python script"


def run_script(script: str, args: Sequence[str]) -> None:
    """Run ``script`` as ``python script args`` would: same argv, path, traceback, exit code."""
    sys.argv[:] = [script, *args]
    script = os.path.abspath(script)
    # "python -m" put the working directory first; plain Python puts the script's folder there.
    _put_first(os.path.dirname(os.path.realpath(script)))
    _hide_launcher_frames()
    _compat.set_entry_script(script)
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__file__, module.__dict__["__cached__"] = script, None
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # the user's own script, as the user asked


def _put_first(folder: str) -> None:
    """Replace the first folder of ``sys.path``, unless Python was started with -P."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


class NoModuleError(ImportError):
    """There is no module of that name that ``python -m`` could run."""


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as ``python -m name args`` would; raise a ``NoModuleError`` without one."""
    _put_first(os.getcwd())  # as python -m does
    sys.argv[:] = ["-m", *args]  # as Python does while it imports the packages around it
    _hide_launcher_frames()
    _compat.set_entry_script(_file_of_module(name))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _file_of_module(name: str) -> str:
    """Return the file that ``python -m name`` runs; import the packages around it, as that does."""
    whole, spec = name, None
    try:
        if all(name.split(".")):  # no part of the name is empty
            spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            whole = f"{name}.__main__"
            spec = importlib.util.find_spec(whole)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package around the module fails to import another one
        whole = error.name
    if spec is None or not spec.has_location or spec.origin is None:
        raise NoModuleError(
            f"cannot find the module {name!r}, from {os.getcwd()}: No module named {whole!r}"
        )
    return spec.origin


def when_threads_have_ended(do: Callable[[], object]) -> None:
    """Call ``do`` at the end of a script: now, or when threads that Python waits for have ended.

    Python waits for non-daemon threads at the end of the process. The threads of pools end only
    then, so that this function must not wait for them.
    """
    others = [one for one in threading.enumerate() if one is not threading.current_thread()]
    if any(not one.daemon for one in others):
        atexit.register(do)
    else:
        do()


def _hide_launcher_frames() -> None:
    """Let an uncaught error show the script's frames only, as plain Python does."""
    show = sys.excepthook
    before_script = ("<", runpy.__file__, importlib.util.__file__, _PACKAGE)

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(before_script):
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
