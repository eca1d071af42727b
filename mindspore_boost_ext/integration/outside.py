"""Level and settings of ``ms.Model`` from outside a script: from the environment."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from mindspore_boost_ext.config.files import no_duplicates
from mindspore_boost_ext.config.parse import LEVELS, BoostConfig
from mindspore_boost_ext.config.rules import shown

LEVEL_VARIABLE = "MINDSPORE_BOOST_EXT_LEVEL"
CONFIG_VARIABLE = "MINDSPORE_BOOST_EXT_CONFIG"


def keep_path() -> None:
    """Make the path in the environment absolute: a script may change the working folder."""
    config = os.environ.get(CONFIG_VARIABLE, "")
    if config and not _is_text(config):
        with contextlib.suppress(OSError):  # the folder may be gone
            os.environ[CONFIG_VARIABLE] = os.path.abspath(config)


def _is_text(config: str) -> bool:
    """Return whether it is JSON text, as for a recipe, which then needs no file."""
    return config.lstrip().startswith("{") and not os.path.exists(config)


def settings_from_outside() -> dict[str, Any]:
    """Return level and settings of ``ms.Model`` from the environment; empty if it has neither.

    The settings are the path of a file, or JSON text. Without a level they mean level O1.

    Raises:
        ValueError: naming the variable, if it cannot be used.
    """
    level, config = os.environ.get(LEVEL_VARIABLE, ""), os.environ.get(CONFIG_VARIABLE, "")
    if not level and not config:
        return {}
    level = level or "O1"
    if level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, got {shown(level)}")
    try:
        source = settings_in(config)
        BoostConfig.parse(level, source)
    except ValueError as error:
        raise ValueError(f"--config or {CONFIG_VARIABLE}={config}: {error}") from error
    return {"boost_level": level, "boost_config_dict": source}


def settings_in(config: str) -> dict[str, Any] | str:
    """Return the settings in JSON text; anything else is a path, and stays as it is."""
    if not _is_text(config):
        return config
    try:
        found: dict[str, Any] = json.loads(config, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    return found


def level_and_settings(level: str | None, config: Any) -> tuple[str, Any]:
    """Return level and settings of a call; those from outside if it gives no level."""
    outside = settings_from_outside() if level is None else {}
    default = "O0" if level is None else level
    return outside.get("boost_level", default), outside.get("boost_config_dict") or config
