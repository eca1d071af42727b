"""Stand-ins for the parts of ``mindspore.boost`` that this version does not have yet."""

from __future__ import annotations

import functools
from typing import Any, NoReturn


def not_implemented(name: str) -> NotImplementedError:
    """Return the error for asking for ``name``."""
    return NotImplementedError(
        f"mindspore_boost_ext does not implement {name} yet: switch it off (mode 'manual' with "
        f"its switch False), or use the built-in package with mindspore_boost_ext.uninstall()"
    )


@functools.cache
def planned(name: str) -> type:
    """Return the class of that name which raises ``NotImplementedError`` when it is called."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_implemented(name)

    return type(name, (), {"__new__": refuse, "__doc__": f"{name} is not implemented yet."})
