"""Runs a script, or a module, as plain Python would: same argv, path, traceback, exit code."""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
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
    _hide_launcher_frames(script)
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


def file_of_module(name: str) -> str:
    """Return the file that ``python -m name`` would run; raise a ``ValueError`` without one.

    Nothing is imported: ``run_module`` does that later. The file is "" if only an import would show
    in which folders a package looks for its modules.
    """
    _put_first(os.getcwd())  # as python -m does
    spec: importlib.machinery.ModuleSpec | None = None
    whole, places = "", None
    for part in name.split("."):
        whole, package = f"{whole}.{part}" if whole else part, spec
        spec = _spec_of(whole, places)
        if spec is None and package is not None and _may_look_elsewhere(package):
            return ""
        if spec is None:
            break
        places = _places_in(spec, part, places)
        if places == []:  # a package without __init__ in a zip archive, which only an import opens
            return ""
    if spec is not None and places is not None:
        whole = f"{name}.__main__"
        spec = _spec_of(whole, places)
    if spec is None or not spec.has_location or spec.origin is None:
        raise ValueError(
            f"cannot find the module {name!r}, from {os.getcwd()}: No module named {whole!r}"
        )
    return spec.origin


def _spec_of(name: str, places: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module, or None; ``places`` are the folders of the package around it."""
    package, _, own = name.rpartition(".")
    if not own or (package and places is None):
        return None
    try:
        found = (finder.find_spec(name, places) for finder in sys.meta_path)
        return next(filter(None, found), None)
    except KeyError:  # a folder without __init__, while what is around it is not imported
        return importlib.machinery.ModuleSpec(name, None, is_package=True)


def _places_in(
    spec: importlib.machinery.ModuleSpec, name: str, around: list[str] | None
) -> list[str] | None:
    """Return the folders in which a package finds modules; None if it is a module itself."""
    if spec.origin is not None or spec.submodule_search_locations is None:
        return spec.submodule_search_locations
    # A folder without __init__: its spec knows the folders only when it is imported.
    folders = (os.path.join(one, name) for one in (sys.path if around is None else around))
    return [one for one in folders if os.path.isdir(one)]


def _may_look_elsewhere(package: importlib.machinery.ModuleSpec) -> bool:
    """Return whether a package may find modules outside the folder of its own file."""
    if package.origin is None or not package.has_location:
        return False  # a folder without __init__
    try:
        with open(package.origin, "rb") as file:
            return b"__path__" in file.read()
    except OSError:  # in a zip archive
        return False


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as ``python -m name args`` would."""
    file = file_of_module(name)
    sys.argv[:] = ["-m", *args]  # as Python does while it imports the packages around it
    if file:
        _hide_launcher_frames(file)
        _compat.set_entry_script(file)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


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


def _hide_launcher_frames(script: str) -> None:
    """Let an uncaught error show the script's frames only, as plain Python does."""
    show = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        own = _from(trace, lambda file: file == script)
        # The package of a module may fail before the module begins.
        own = own or _from(trace, lambda file: not file.startswith(("<", runpy.__file__, _PACKAGE)))
        show(kind, error.with_traceback(own), own)

    sys.excepthook = hook


def _from(
    trace: types.TracebackType | None, is_first: Callable[[str], bool]
) -> types.TracebackType | None:
    """Return a traceback from the first frame on whose file is that; None if there is none."""
    while trace is not None and not is_first(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
