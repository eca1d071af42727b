"""Reads a configuration from a file, and says why a path cannot be read as one."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from typing import Any

from mindspore_boost_ext.config.rules import described, plain, printable, shown

_LIMIT = 1 << 20
_PATH_SHOWN = 60
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
_KINDS = {
    stat.S_IFDIR: "a directory: give the file in it",
    stat.S_IFIFO: "a FIFO: write the settings into a file",
    stat.S_IFSOCK: "a socket: write the settings into a file",
    stat.S_IFCHR: "a device: write the settings into a file",
    stat.S_IFBLK: "a device: write the settings into a file",
}
_REASONS = {
    errno.ENOENT: "there is no such file: check the path",
    errno.ENOTDIR: "there is no such file, because a folder of its path is a file: check the path",
    errno.ELOOP: "its symbolic links form a loop: give the file itself",
    errno.ENAMETOOLONG: "the path is too long: shorten it",
    errno.EACCES: "no permission to read it: give this user the permission",
    errno.EPERM: "no permission to read it: give this user the permission",
}


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in a file (UTF-8, at most 1 MiB, no name given twice).

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        path = str(plain(os.fsdecode(source)))
    except Exception as error:  # the user's class may raise anything
        problem = f"cannot use the file {shown(source)}: {described(error)}: give a str"
        raise ValueError(problem) from error
    try:
        document = json.loads(_text(path), object_pairs_hook=no_duplicates)
        if not isinstance(document, dict):
            raise ValueError(f"it must hold a JSON object, got {shown(document)}")
    except (OSError, ValueError, RecursionError) as error:
        # The end of a long path says more than its beginning.
        where = shown(path if len(path) < _PATH_SHOWN else "..." + path[-_PATH_SHOWN:])
        raise ValueError(f"cannot use the file {where}: {_reason(path, error)}") from error
    return document


def _text(path: str) -> str:
    """Return the text of a regular file. To open or read anything else could block forever."""
    _check_kind(os.stat(path))
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAITING)) as file:
        _check_kind(os.fstat(file.fileno()))  # the path may name another file by now
        content = file.read(_LIMIT + 1)
    if content is None:
        raise ValueError("it has nothing to read yet: write the settings into a file")
    if len(content) > _LIMIT:
        raise ValueError("it is larger than 1 MiB: pass long lists in a dict")
    if not content.strip():
        raise ValueError("it is empty: write {} for the defaults")
    return content.decode("utf-8-sig")


def _check_kind(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file: give one")
        raise ValueError(f"it is {kind}")


def _reason(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return f"it is a link to {shown(os.readlink(path))}, which does not exist: repair the link"
    if isinstance(error, OSError) and path.strip()[:1] == "{" and path.strip()[-1:] == "}":
        return "it is JSON text, not a path: give a dict, or write it into a file"
    if isinstance(error, FileNotFoundError) and path.replace("-", "").isalpha():
        return f"there is no such file; if it is a recipe, give recipe({path!r}, total_steps)"
    if isinstance(error, OSError):
        default = printable(error.strerror or type(error).__name__)
        return _REASONS.get(error.errno or 0, default)
    if isinstance(error, json.JSONDecodeError):
        return f"it is not valid JSON: {error}"
    if isinstance(error, UnicodeDecodeError):
        return f"{error}: save it as UTF-8"
    if isinstance(error, UnicodeEncodeError) or "\0" in path:
        return "no file can have this name: check the path"
    return str(error) or type(error).__name__


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object. Of two equal names, ``json`` would use the last.

    Raises:
        ValueError: with the names that are given twice.
    """
    seen = dict(pairs)
    if len(seen) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        names = printable(", ".join(twice[:8])[:200]) + (", ..." if len(twice) > 8 else "")
        raise ValueError(f"{names} given twice: keep one")
    return seen
