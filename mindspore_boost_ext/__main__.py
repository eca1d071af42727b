"""``python -m mindspore_boost_ext``: run a script with the accelerators, or ask about them.

``python -m mindspore_boost_ext train.py --epochs 3`` runs an unmodified script that was written for
``mindspore.boost``, as plain Python would run it; ``--help`` lists the questions and commands.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module

from mindspore_boost_ext._version import __version__
from mindspore_boost_ext.boost import record
from mindspore_boost_ext.boost_cell_wrapper.runs import FIRST_RUN
from mindspore_boost_ext.cli.cards import CARDS, OTHER_NAMES, card
from mindspore_boost_ext.cli.launcher import (
    INTERRUPTED,
    NoModuleError,
    problem_of_file,
    run_module,
    run_script,
    when_threads_have_ended,
)
from mindspore_boost_ext.config.page import page
from mindspore_boost_ext.config.parse import LEVELS, SECTIONS, BoostConfig
from mindspore_boost_ext.integration import install
from mindspore_boost_ext.integration.outside import (
    CONFIG_VARIABLE,
    LEVEL_VARIABLE,
    keep_path,
    settings_from_outside,
    settings_in,
)
from mindspore_boost_ext.integration.record import BUILT, Built
from mindspore_boost_ext.recipes import NAMES, recipe
from mindspore_boost_ext.report import Report, is_main_process
from mindspore_boost_ext.runtime.machine import tuning
from mindspore_boost_ext.runtime.watch import watch_ranks

DEMO = ("compare", "--network", "resnet", "--report", "fast")
# Commands with options of their own, and their modules. A run of a script does not import these:
# what they import, such as statistics, would hide a module of the same name beside the script.
_COMMANDS = {"compare": "cli.compare", "recommend": "cli.recommend", "selftest": "selftest.command"}
_WITH_VALUE = {"--level", "--config", "--recipe", "--total-steps", "--explain", "--check"}


def _given(text: str) -> str:
    """Refuse an empty argument, which an unset variable of the shell gives."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"needs a file, got {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspore_boost_ext",
        description="Run a training script with mindspore_boost_ext in place of mindspore.boost.",
        epilog="Several processes: msrun [OPTIONS] python -m mindspore_boost_ext SCRIPT [ARGS]. "
        "First look: python -m mindspore_boost_ext demo. Compare algorithms: python -m "
        "mindspore_boost_ext compare --help. Find settings: python -m mindspore_boost_ext "
        "recommend --help. Test the package on this device: python -m mindspore_boost_ext "
        "selftest --help",
    )
    add = parser.add_argument
    add("--version", action="store_true", help="print the version and exit")
    text = "level of Models for which the script sets none; for --explain and --check (O1)"
    add("--level", choices=sorted(LEVELS), help=text)
    text = "file or text of a JSON configuration for those Models (at level O1)"
    add("--config", metavar="FILE", type=_given, help=text)
    text = "tuned settings for those Models, instead of --config"
    add("--recipe", choices=NAMES, help=text)
    text = "for --recipe: number of updates of the whole training"
    add("--total-steps", type=int, metavar="N", help=text)
    ask = parser.add_mutually_exclusive_group().add_argument
    text = (
        "explain a JSON configuration (file or text), list all settings (settings), or show the "
        f"card of an algorithm: {', '.join(CARDS)}"
    )
    ask("--explain", nargs="?", const="", metavar="CONFIG|NAME", help=text)
    text = "check whether a JSON configuration (file or text) is valid"
    ask("--check", metavar="CONFIG", type=_given, help=text)
    ask("--env", action="store_true", help="describe this machine")
    add("-m", dest="module", metavar="MODULE", help="run this module instead of SCRIPT")
    add("script", nargs="?", metavar="SCRIPT", help="the training script to run")
    add("args", nargs="*", metavar="ARGS", help="arguments of the script")
    return parser


def _command(name: str) -> Callable[[Sequence[str], Callable[[str], object]], int]:
    return getattr(import_module(f"mindspore_boost_ext.{_COMMANDS[name]}"), name)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer a question, or run a script; return the exit code."""
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:
        words = [*DEMO, *words[1:]]
    if words and words[0] in _COMMANDS:
        try:
            shown: list[bool] = []
            with _ending_as_by_ctrl_c():
                code = _command(words[0])(words[1:], lambda text: shown.append(_show(text)))
            return code or int(not all(shown))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
    own, args = _split(words)
    options = parser.parse_args(own)
    script, module = options.script, options.module
    runs = script is not None or module is not None
    try:
        answer = _answer(options)
        if runs and not answer:
            _prepare(options)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    if answer:
        return int(not _show(answer))
    if not runs:
        parser.print_help()
        return 2
    install()
    watch_ranks()
    try:
        with summary_of_script():
            if module is not None:
                run_module(module, args)
            else:
                run_script(script, args)
    except NoModuleError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _ending_as_by_ctrl_c() -> Iterator[None]:
    """In the context, ``timeout``, a batch system or a closed terminal ends a command as Ctrl-C.

    So it ends the processes that it has started, and shows what there is.
    """
    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]  # Windows has one
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # a thread cannot set them
    ours = [one for one in numbers if one and signal.getsignal(one) is signal.SIG_DFL]  # no nohup
    for one in ours:
        signal.signal(one, signal.default_int_handler)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


def _answer(options: argparse.Namespace) -> str:
    """Return the answer to the question; empty if none is asked."""
    if options.version:
        return f"mindspore_boost_ext {__version__}"
    if options.env:
        from mindspore_boost_ext.cli.environment import describe

        return describe()
    if options.recipe or options.total_steps is not None:
        options.config = _settings_of_recipe(options)
    _check_words(options)
    level = options.level or "O1"
    if options.explain:
        return _explanation(level, options.explain)
    if options.explain is not None:
        return explain(BoostConfig.parse(level, options.config))
    if options.check is not None:
        notices = BoostConfig.parse(level, settings_in(options.check)).notices()
        return "\n".join([*notices, f"{options.check}: valid"])
    return ""


def _check_words(options: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    asks = options.explain is not None or options.check is not None
    if options.config and (options.explain or options.check):
        raise ValueError(
            "--explain and --check take the configuration as their argument: remove --config and "
            "--recipe, or give --explain without an argument"
        )
    given = options.script if options.module is None else options.module
    if asks and given is not None:
        raise ValueError(f"--explain and --check run no script, got {given!r}: leave it out")
    if (options.config or options.level) and not asks and given is None:
        raise ValueError("--level, --config and --recipe need a script after them")


def _prepare(options: argparse.Namespace) -> None:
    """Check the script, and put level and settings into the environment for its processes."""
    problem = "" if options.script is None else problem_of_file(options.script)
    if problem:
        commands = (*_COMMANDS, "demo")
        if options.script in commands:
            raise ValueError(f"the command {options.script!r} must come first, before its options")
        raise ValueError(f"{problem}{_hint(options.script, commands)}")
    if options.level:
        os.environ[LEVEL_VARIABLE] = options.level
    if options.recipe:
        os.environ[CONFIG_VARIABLE] = json.dumps(options.config)
    elif options.config:
        os.environ[CONFIG_VARIABLE] = options.config
        keep_path()
    settings_from_outside()  # raises if they cannot be used


def _hint(word: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a word, as a question; empty if none is near."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word[:100].lower(), names, n=1)
    return f": did you mean {names[near[0]]!r}?" if near else ""


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words up to the script or module, and its words; argparse drops a "--"."""
    before = ""
    for place, word in enumerate(words, start=1):
        is_option = word.startswith("-")
        is_module = before == "-m" or (word.startswith("-m") and word != "-m")
        if is_module or not (is_option or _takes_value(before)):
            return words[:place], words[place:]
        before = word if is_option else ""
    return words, []


def _takes_value(word: str) -> bool:
    """Return whether a word is an option with a value, also if abbreviated, as argparse allows."""
    return len(word) > len("--") and any(option.startswith(word) for option in _WITH_VALUE)


def _settings_of_recipe(options: argparse.Namespace) -> dict[str, object]:
    if options.config:
        raise ValueError("--recipe cannot be combined with --config: leave one of them out")
    if options.recipe is None:
        raise ValueError(f"--total-steps needs --recipe, one of {', '.join(NAMES)}")
    if options.total_steps is None:
        raise ValueError(
            "--recipe needs --total-steps, the number of updates of the whole training (epochs "
            "times batches per epoch)"
        )
    return recipe(options.recipe, options.total_steps)


@contextlib.contextmanager
def summary_of_script() -> Iterator[None]:
    """If the script ends without an error, rank 0 prints what was applied to which network."""
    built = Built()
    BUILT.append(built)
    FIRST_RUN.append(built.has_run)
    ended_well = False
    try:
        yield
        ended_well = True
    except SystemExit as end:
        ended_well = not end.code and built.last is not None
        raise
    finally:
        when_threads_have_ended(lambda: _end(built, ended_well))


def _end(built: Built, ended_well: bool) -> None:
    """Stop recording; if the script ended without an error, print what was built."""
    BUILT.remove(built)
    FIRST_RUN.remove(built.has_run)
    if ended_well and is_main_process():
        text = f"mindspore_boost_ext: {built.summary()}"
        with contextlib.suppress(ValueError, OSError):  # the script may have closed it
            print(text, file=sys.stderr or sys.__stderr__)


def _show(text: str) -> bool:
    """Print an answer; replace letters that the output lacks. Return False if that failed."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        _say_no_more()
    except OSError as error:
        _say_no_more()
        with contextlib.suppress(OSError):
            print(f"cannot write to standard output: {error.strerror}", file=sys.stderr)
        return False
    return True


def _say_no_more() -> None:
    """Discard all that is printed from now on, including Python's own last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explanation(level: str, source: str) -> str:
    """Return all settings, a card, or what a configuration, in a file or as text, would do."""
    name = OTHER_NAMES.get(source, source)
    if name == "settings":
        return page()
    if name in CARDS:
        return card(name)
    settings = settings_in(source)
    if settings == source and not os.path.exists(source) and not source.endswith(".json"):
        cards = f"; cards: {', '.join(CARDS)}; settings lists all settings"
        hint = _hint(source, ("settings", *CARDS, *OTHER_NAMES)) or cards
        raise ValueError(f"{source!r} is neither a file nor the name of a card{hint}")
    return explain(BoostConfig.parse(level, settings))


def explain(config: BoostConfig) -> str:
    """Return what a configuration would do, as a table, with the settings and the notices."""
    report = Report(f"level {config.level}, mode {config.mode} would do this:")
    record(report, config.plan())
    report.put(*tuning())
    lines = [str(report)]
    for decision in config.plan():
        settings = getattr(config, decision.algorithm, None)
        if decision.wanted and settings is not None:
            lines.append(f"{decision.algorithm}: {settings}")
    for name, kind in SECTIONS.items():
        if kind.for_every_step and name in config.given and config.level != "O0":
            lines.append(f"every step, {name}: {getattr(config, name)}")
    return "\n".join([*lines, *config.notices()])


if __name__ == "__main__":
    sys.exit(main())
