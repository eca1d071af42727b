"""``python -m mindspore_boost_ext``: run a script with the accelerators, or ask about them.

``python -m mindspore_boost_ext train.py --epochs 3`` runs an unmodified script that was written for
``mindspore.boost``, as plain Python would run it. ``--explain``, ``--check`` and ``--env`` answer
what a configuration would do or what a method is, whether a configuration is valid, and what this
machine offers. ``compare`` trains with each algorithm and without, and shows what that did.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from mindspore_boost_ext.boost import record
from mindspore_boost_ext.cli.cards import CARDS, OTHER_NAMES, card
from mindspore_boost_ext.cli.launcher import run_script
from mindspore_boost_ext.config.parse import LEVELS, BoostConfig
from mindspore_boost_ext.integration import install
from mindspore_boost_ext.report import Report
from mindspore_boost_ext.runtime.machine import tuning
from mindspore_boost_ext.runtime.watch import watch_ranks


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspore_boost_ext",
        description="Run a training script with mindspore_boost_ext in place of mindspore.boost.",
        epilog="Several processes: msrun [OPTIONS] python -m mindspore_boost_ext SCRIPT [ARGS]. "
        "Side by side: python -m mindspore_boost_ext compare --help",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "--level", default="O1", choices=sorted(LEVELS), help="for --explain and --check"
    )
    questions = parser.add_mutually_exclusive_group()
    questions.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="CONFIG|NAME",
        help="say what a JSON configuration would do, or show the card of an algorithm: "
        + ", ".join(CARDS),
    )
    questions.add_argument(
        "--check", metavar="CONFIG", help="say whether a JSON configuration is valid"
    )
    questions.add_argument("--env", action="store_true", help="say what this machine offers")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the training script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Answer a question, or run a script; return the exit code."""
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["compare"]:
        from mindspore_boost_ext.cli.compare import compare

        return compare(words[1:], print)
    options = parser.parse_args(words)
    try:
        if options.version:
            from mindspore_boost_ext import __version__

            print(f"mindspore_boost_ext {__version__}")
            return 0
        if options.env:
            from mindspore_boost_ext.cli.environment import describe

            print(describe())
            return 0
        if options.explain is not None:
            name = OTHER_NAMES.get(options.explain, options.explain)
            config = None if name in CARDS else _configuration(options.level, name)
            print(explain(config) if config else card(name))
            return 0
        if options.check is not None:
            config = BoostConfig.parse(options.level, options.check)
            print("\n".join([*config.notices(), f"{options.check}: valid"]))
            return 0
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    if options.script is None:
        parser.print_help()
        return 2
    if not os.path.isfile(options.script):
        print(f"{parser.prog}: error: cannot open the script {options.script!r}", file=sys.stderr)
        return 2
    install()
    watch_ranks()
    run_script(options.script, words[words.index(options.script) + 1 :])  # argparse drops a "--"
    return 0


def _configuration(level: str, source: str) -> BoostConfig:
    """Read what was given to ``--explain``; a word that is no file may be meant as a name."""
    if source and not os.path.exists(source) and not source.endswith(".json"):
        raise ValueError(
            f"{source!r} is neither a file nor the name of a card; cards: {', '.join(CARDS)}"
        )
    return BoostConfig.parse(level, source)


def explain(config: BoostConfig) -> str:
    """Return what a configuration would do, as a table, with the settings and the notices."""
    report = Report(f"level {config.level}, mode {config.mode} would do this:")
    record(report, config.plan())
    for row in tuning():
        report.put(row)
    lines = [str(report)]
    for one in config.plan():
        settings = getattr(config, one.algorithm, None)
        if one.wanted and settings is not None:
            lines.append(f"{one.algorithm}: {settings}")
    return "\n".join([*lines, *config.notices()])


def _run() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _run()
