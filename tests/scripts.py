"""Scripts and commands in processes of their own, which need not import MindSpore again.

A server that has imported it is forked for each, which saves most of a short script's time.
Where the start of the interpreter, its end or its tracebacks count, a test starts a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["mindspore"])
TESTS = str(pathlib.Path(__file__).parent)


class Script:
    """A running script; ``words`` are those behind ``python``: a path, ``-c`` or ``-m``."""

    def __init__(self, *words, cwd=None, env=None):
        self.words = [str(word) for word in words]
        self.folder = tempfile.TemporaryDirectory()
        self.files = [os.path.join(self.folder.name, name) for name in ("out", "err")]
        environment = dict(os.environ if env is None else env)
        arguments = (self.words, str(cwd or os.getcwd()), environment, *self.files)
        self.process = _server.Process(target=_run, args=arguments)
        self.process.start()

    def communicate(self, timeout=300):
        """Wait for the end, as subprocess does; return exit code and what was printed."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise subprocess.TimeoutExpired(self.words, timeout)
        shown = [pathlib.Path(one).read_text(errors="replace") for one in self.files]
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.words, self.process.exitcode, *shown)


def run(*words, cwd=None, env=None, timeout=300):
    """Run a script to its end; return what subprocess.run would."""
    return Script(*words, cwd=cwd, env=env).communicate(timeout)


def _run(words, folder, environment, *files):
    """Be a new interpreter, as far as a script can see."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in zip((1, 2), files):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.stdin.close()
    sys.argv = words[1:] if words[0] in ("-c", "-m") else words
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = folder if words[0] in ("-c", "-m") else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [own, *filter(None, paths), *(one for one in sys.path if TESTS not in one)]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")
