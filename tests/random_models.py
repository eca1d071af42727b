"""A random combination as a user would write it: network, optimizer, settings, ``ms.Model``."""

from __future__ import annotations

import mindspore as ms
import random_nets
from mindspore import nn

from mindspore_boost_ext import AutoBoost, FlushAccumulation, GroupLossScaleManager


def schedule_of(rate):
    kind, *values = rate
    if kind == "exponential":
        return nn.ExponentialDecayLR(*values)
    return values if kind == "list" else values[0]


def optimizer_of(case, net):
    """Return the plain optimizer of a case."""
    held = {one.name: one for one in net.trainable_params()}
    params = list(held.values())
    if case.groups:
        params = []
        for names, rate, decay in case.groups:
            group = {"params": [held[name] for name in names]}
            if rate is not None:
                group["lr"] = schedule_of(rate)
            if decay is not None:
                group["weight_decay"] = decay
            params.append(group)
        if case.in_order:
            params.append({"order_params": list(held.values())})
    settings = dict(case.settings)
    if case.scale[0] == "fixed":
        settings["loss_scale"] = case.scale[1]
    return getattr(nn, case.optimizer)(
        params,
        learning_rate=schedule_of(case.rate),
        weight_decay=case.weight_decay,
        **settings,
    )


def manager_of(case):
    """Return the loss-scale manager of a case, or None."""
    kind, *values = case.scale
    if kind == "fixed":
        return ms.FixedLossScaleManager(*values, drop_overflow_update=False)
    if kind == "fixed, skipping":
        return ms.FixedLossScaleManager(*values, drop_overflow_update=True)
    if kind == "dynamic":
        return ms.DynamicLossScaleManager(*values)
    if kind == "grouped":
        return GroupLossScaleManager(case.first_scales().tolist(), [])
    return None


def config_of(case):
    """Return the settings of a case."""
    less_bn = case.centralize or case.multiplier is not None
    boost = {"mode": case.boost_mode}
    if case.boost_mode == "manual":
        boost |= dict.fromkeys(AutoBoost().boost_config, False)
        boost |= {
            "less_bn": less_bn,
            "grad_freeze": case.freeze is not None,
            "grad_accumulation": case.window > 1,
            "loss_scale_group": case.scale[0] == "grouped",
        }
    config = {"boost": boost, "gradients": {"clip_norm": case.clip_norm}}
    if less_bn:
        head = case.multiplier is not None
        config["less_bn"] = {"fn_flag": head, "gc_flag": case.centralize}
        if head:
            config["less_bn"] |= {"multiplier": case.multiplier, "heads": ["head"]}
    if case.freeze is not None:
        config["grad_freeze"] = used_settings(case.freeze)
    if case.shorter is not None:
        config["boost"] |= {"short_schedule": True} if case.boost_mode == "manual" else {}
        config["short_schedule"] = case.shorter
    if case.window > 1:
        config["grad_accumulation"] = {
            "grad_accumulation_step": case.window,
            "weighting": case.weighting,
            "on_overflow": case.on_overflow,
        }
    return config


def used_settings(section):
    """Return a section of freezing without the settings that its schedule makes idle."""
    idle = {"freeze_type", "freeze_p"} if section["schedule"] is not None else set()
    if not isinstance(section["schedule"], str):
        idle |= {"prefix_fraction", "prefix_start"}
    return {name: value for name, value in section.items() if name not in idle}


def trained(case):
    """Train a case through ``ms.Model``; return network and Model."""
    manager = manager_of(case)
    net = random_nets.network(case.net, manager if case.scale[0] == "grouped" else None)
    if case.scale[0] == "grouped":
        held = {one.name: one for one in net.trainable_params()}
        manager.loss_scale_groups = [
            [held[name] for name in names if name in held] for names in case.groups_of_scales()
        ]
    arguments = {} if manager is None else {"loss_scale_manager": manager}
    model = ms.Model(
        net,
        None if case.net.losses else random_nets.Loss(case.net),
        optimizer_of(case, net),
        boost_level=case.level,
        boost_config_dict=config_of(case),
        **arguments,
    )
    data = ms.dataset.NumpySlicesDataset(case.data(), shuffle=False).batch(case.batch)
    callbacks = [FlushAccumulation()] if case.flush else []
    model.train(case.epochs, data, callbacks=callbacks, dataset_sink_mode=False)
    return net, model
