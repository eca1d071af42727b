"""Where a name that is not known in its place may belong. Imports no MindSpore."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from mindspore_boost_ext.config.sections import SECTIONS

_MOST = 4  # places that are named


def hint(section: str, name: str, known: Collection[str], in_boost: Collection[str]) -> str:
    """Return what may have been meant by a name that is not known where it stands.

    Args:
        section (str): the section that it stands in; empty for the document.
        name (str): the name.
        known (Collection[str]): the names that section has.
        in_boost (Collection[str]): the names that section ``boost`` has.
    """
    if section and name in SECTIONS:
        switch = f", or as the switch boost.{name}" if name in in_boost else ""
        return f"it is a section: give it beside {section}{switch}"
    places = [f"{one}.{name}" for one, kind in SECTIONS.items() if name in kind.rules()]
    places += [f"boost.{name}"] if name in in_boost else []
    if places:
        return f"did you mean {' or '.join(places[:_MOST])}{', ...' if places[_MOST:] else ''}?"
    near = difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known) or 'none'}"
