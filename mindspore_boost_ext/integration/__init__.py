"""Where the package plugs into MindSpore."""

from mindspore_boost_ext.integration.model import BoostModel
from mindspore_boost_ext.integration.patch import install, installed, is_installed, uninstall

__all__ = ["BoostModel", "install", "installed", "is_installed", "uninstall"]
