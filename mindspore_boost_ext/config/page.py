"""The page that lists every setting, made from the sections themselves. Imports no MindSpore."""

from __future__ import annotations

import dataclasses
import json

from mindspore_boost_ext.config.parse import ALGORITHMS, LEVELS, MODES, SECTIONS, STRICT_VARIABLE
from mindspore_boost_ext.config.section import Section
from mindspore_boost_ext.report import markdown

_MODES = {
    "auto": "follows the level",
    "manual": "the level's table, overridden by the given switches",
    "enable_all": "all that can act, but dim_reduce never, and names in bold only by their section",
    "disable_all": "nothing; sections `gradients` and `loss_scale` act all the same",
}
_HEAD = f"""# Configuration

This page is what `python -m mindspore_boost_ext --explain settings` prints.

`boost_config_dict`, an argument of `ms.Model` beside `boost_level` (`O0` by default, where nothing
acts), is a dict, or the path of a JSON file; sections and settings may be left out. All that is
wrong in it is named in one error before anything is built: wrong types, values out of range,
unknown names (a warning each, if the environment has `{STRICT_VARIABLE}=0`).
A switch, a section or a setting that the mode, the level or another setting makes ineffective is
named in a warning. Ask before a run:

```bash
python -m mindspore_boost_ext --explain examples/configs/accumulation.json
python -m mindspore_boost_ext --explain grad_freeze
python -m mindspore_boost_ext --check examples/configs/accumulation.json
python -m mindspore_boost_ext --env
```

What the methods do is described in [their cards](CARDS.md).
"""


def page() -> str:
    """Return the page in Markdown."""
    sections = [line for one in SECTIONS.values() for line in _of(one)]
    return "\n".join([_HEAD, *_boost(), *sections]).rstrip()


def _boost() -> list[str]:
    modes = ["`boost.mode`", "switched on (at level O0 nothing, whatever the mode)"]
    rows = [[f"`{mode}`", _MODES[mode]] for mode in MODES]
    levels = [
        [f"`{level}`", ", ".join(f"`{one}`" for one in ALGORITHMS if one in wanted) or "nothing"]
        for level, wanted in LEVELS.items()
    ]
    by_section = {name for name, section in SECTIONS.items() if section.given_means_on}
    switches = [f"**`{one}`**" if one in by_section else f"`{one}`" for one in ALGORITHMS]
    return [
        "## `boost`: levels, modes and switches\n",
        f"{markdown(['level', 'switched on'], levels)}\n",
        f"{markdown(modes, rows)}\n",
        f"Switches, true or false: {', '.join(switches)}. A section of a name in bold switches",
        "that on, too, unless the switch is false.\n",
    ]


def _of(section: type[Section]) -> list[str]:
    """Return the part of the page that describes one section."""
    words = (section.__doc__ or "").split("\n\n")
    title = " ".join(words[0].split()).partition(": ")[2]
    rows = [
        [
            f"`{one.name}`",
            f"`{json.dumps(one.default)}`",
            one.metadata["rule"].text,
            one.metadata["meaning"],
        ]
        for one in dataclasses.fields(section)
    ]
    settings = markdown(["setting", "default", "must be", "meaning"], rows)
    return [
        f"## `{section.path}`\n",
        f"{title[:1].upper()}{title[1:]}\n",
        f"{settings if rows else 'It has no settings: `{}`.'}\n",
    ]
