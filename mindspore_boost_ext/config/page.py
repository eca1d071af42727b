"""The page that lists every setting, made from the sections themselves. Imports no MindSpore."""

from __future__ import annotations

import dataclasses
import json

from mindspore_boost_ext.config.parse import ALGORITHMS, LEVELS, MODES, SECTIONS, STRICT_VARIABLE
from mindspore_boost_ext.config.section import Section
from mindspore_boost_ext.report import markdown

_MODES = {
    "auto": "the algorithms of the level",
    "manual": "the algorithms of the level, changed by the given switches",
    "enable_all": "all that can act, except dim_reduce; names in bold only with their section",
    "disable_all": "no algorithm, but sections `gradients` and `loss_scale` still act",
}
_HEAD = f"""# Configuration

This page is the output of `python -m mindspore_boost_ext --explain settings`.

`boost_config_dict` is an argument of `ms.Model`: a dict, or the path of a JSON file. Sections and
settings may be left out. Before anything is built, one error names everything that is wrong: wrong
types, values out of range, unknown names (warnings, if the environment has `{STRICT_VARIABLE}=0`).
A warning names each switch, section or setting that has no effect because of the mode, the level or
another setting.

The argument `boost_level` sets the level. At `O0`, the default of `ms.Model`, no method of this
package acts; an algorithm of your own acts at every level. `make_train_step` and `--config` take
level `O1` if settings are given. Check before a run:

```bash
python -m mindspore_boost_ext --explain examples/configs/accumulation.json
python -m mindspore_boost_ext --explain grad_freeze
python -m mindspore_boost_ext --check examples/configs/accumulation.json
python -m mindspore_boost_ext --env
```

[Their cards](CARDS.md) describe what the methods do.
"""


def page() -> str:
    """Return the page in Markdown."""
    sections = [line for section in SECTIONS.values() for line in _of(section)]
    return "\n".join([_HEAD, *_boost(), *sections]).rstrip()


def _boost() -> list[str]:
    modes = ["`boost.mode`", "switched on (at level O0: nothing)"]
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
        f"Switches, true or false: {', '.join(switches)}. If a name is in bold, its section",
        "switches it on, too, unless the switch is false.\n",
    ]


def _of(section: type[Section]) -> list[str]:
    """Return the part of the page that describes one section."""
    words = (section.__doc__ or "").split("\n\n")
    title = " ".join(words[0].split()).partition(": ")[2]
    rows = [
        [
            f"`{field.name}`",
            f"`{json.dumps(field.default)}`",
            field.metadata["rule"].text,
            field.metadata["meaning"],
        ]
        for field in dataclasses.fields(section)
    ]
    settings = markdown(["setting", "default", "must be", "meaning"], rows)
    return [
        f"## `{section.path}`\n",
        f"{title[:1].upper()}{title[1:]}\n",
        f"{settings if rows else 'It has no settings: `{}`.'}\n",
    ]
