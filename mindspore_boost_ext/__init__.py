"""Training accelerators for MindSpore, a drop-in for ``mindspore.boost``.

Importing the package plugs it into ``ms.Model``: from then on this package reads ``boost_level``
and ``boost_config_dict``. ``MINDSPORE_BOOST_EXT_INSTALL=0`` in the environment switches that off;
``install``, ``uninstall`` and ``installed`` do it by hand. The import also tunes
MindSpore for this machine's processor (``tune_machine``), unless ``MINDSPORE_BOOST_EXT_TUNE=0``.
"""

from __future__ import annotations

from mindspore_boost_ext._collector import release
from mindspore_boost_ext._version import __version__
from mindspore_boost_ext.adasum.cell import AdaSum
from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.base.rebuild import OptimizerProcess, ParameterProcess
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.boost_cell_wrapper import (
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
)
from mindspore_boost_ext.callbacks.checkpoint import save_checkpoint
from mindspore_boost_ext.callbacks.flush import FlushAccumulation
from mindspore_boost_ext.callbacks.history import plot_history, read_history
from mindspore_boost_ext.callbacks.monitor import BoostMonitor
from mindspore_boost_ext.callbacks.resume import BoostCheckpoint, restore
from mindspore_boost_ext.config.parse import BoostConfig, BoostConfigError
from mindspore_boost_ext.config.rules import switched_off
from mindspore_boost_ext.dim_reduce.p_bfgs import DimReduce
from mindspore_boost_ext.dim_reduce.sampler import TrajectorySampler
from mindspore_boost_ext.grad_accumulation.window import GradientAccumulation
from mindspore_boost_ext.grad_freeze.freezing import FreezeOpt, GradientFreeze, freeze_cell
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager
from mindspore_boost_ext.integration import BoostModel, install, installed, is_installed, uninstall
from mindspore_boost_ext.integration.convert import ConvertModelUtils
from mindspore_boost_ext.integration.functional import TrainStep, make_train_step
from mindspore_boost_ext.integration.patch import INSTALL_VARIABLE
from mindspore_boost_ext.less_batch_normalization.cell import LessBN
from mindspore_boost_ext.recipes import recipe
from mindspore_boost_ext.report import BoostWarning, NoEffectWarning, Report
from mindspore_boost_ext.runtime.machine import tune_machine, tuning
from mindspore_boost_ext.stages.update import Update, UpdateAround
from mindspore_boost_ext.thor.optimizer import THOR

release()
tuning(at_import=True)  # it also looks for convolutions made before
if not switched_off(INSTALL_VARIABLE):
    install()

__all__ = [
    "THOR",
    "AdaSum",
    "Algorithm",
    "AutoBoost",
    "BoostCheckpoint",
    "BoostConfig",
    "BoostConfigError",
    "BoostModel",
    "BoostMonitor",
    "BoostTrainOneStepCell",
    "BoostTrainOneStepWithLossScaleCell",
    "BoostWarning",
    "ConvertModelUtils",
    "DimReduce",
    "FlushAccumulation",
    "FreezeOpt",
    "GradientAccumulation",
    "GradientFreeze",
    "GroupLossScaleManager",
    "LessBN",
    "NoEffectWarning",
    "OptimizerProcess",
    "ParameterProcess",
    "Report",
    "TrainStep",
    "TrajectorySampler",
    "Update",
    "UpdateAround",
    "__version__",
    "freeze_cell",
    "install",
    "installed",
    "is_installed",
    "make_train_step",
    "plot_history",
    "read_history",
    "recipe",
    "restore",
    "save_checkpoint",
    "tune_machine",
    "uninstall",
]
