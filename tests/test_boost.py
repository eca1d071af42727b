"""AutoBoost: no singleton, nothing mutated, the Model's configuration inside a step cell."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import residual_nets
from mindspore import nn
from mindspore.experimental import optim

from mindspore_boost_ext import AutoBoost, BoostConfigError, FreezeOpt, NoEffectWarning

OFF = {"boost": {"mode": "disable_all"}}


def test_each_autoboost_has_its_own_configuration():
    first = AutoBoost("O1", {"grad_freeze": {"freeze_p": 0.25}})
    with pytest.raises(BoostConfigError):
        AutoBoost("O1", {"grad_freeze": {"freeze_p": 2}})
    second = AutoBoost("O2")
    assert (first.level, first.config.grad_freeze.freeze_p) == ("O1", 0.25)
    assert (second.level, second.config.grad_freeze.freeze_p) == ("O2", 0.7)
    assert AutoBoost().level == "O0"


def test_manual_mode_changes_no_table():
    source = {"boost": {"mode": "manual", "less_bn": False, "adasum": True}}
    before = copy.deepcopy(source)
    AutoBoost("O1", source)
    assert source == before
    on = {name for name, wanted in AutoBoost("O1").boost_config.items() if wanted}
    assert on == {"less_bn", "grad_freeze"}


def test_without_arguments_it_is_the_one_being_built():
    boost = AutoBoost("O1", OFF)
    with boost.building():
        assert AutoBoost().config is boost.config
        assert AutoBoost("O2").level == "O2"
        with AutoBoost("O2").building():
            assert AutoBoost().level == "O2"
        assert AutoBoost().level == "O1"
    assert AutoBoost().level == "O0"


def test_a_failed_build_leaves_nothing_behind():
    with pytest.raises(RuntimeError, match="build failed"), AutoBoost("O1").building():
        raise RuntimeError("build failed")
    assert AutoBoost().level == "O0"


def test_threads_do_not_see_each_other():
    seen = []
    with AutoBoost("O2").building():
        thread = threading.Thread(target=lambda: seen.append(AutoBoost().level))
        thread.start()
        thread.join()
    assert seen == ["O0"]


def test_what_has_no_effect_is_told_once():
    with pytest.warns(NoEffectWarning) as caught:
        AutoBoost(
            "O1",
            {"boost": {"mode": "disable_all", "less_bn": True}, "common": {"device_number": 2}},
        )
    assert len(caught) == 1
    assert "boost.less_bn=True" in str(caught[0].message)
    assert "section 'common'" in str(caught[0].message)


def test_report_says_who_asked():
    boost = AutoBoost("O1", {"boost": {"mode": "manual", "grad_accumulation": False}})
    assert boost.report()["less_bn"].asked_by == "level O1"
    assert boost.report()["grad_accumulation"].reason == "boost.grad_accumulation=False"
    assert boost.report()["adasum"].reason == "not in level O1"
    assert boost.report()["thor"].reason == "in no level"


@pytest.mark.filterwarnings("ignore::mindspore_boost_ext.NoEffectWarning")
def test_report_says_that_a_section_alone_switches_nothing_on():
    """A project may silence the warning."""
    boost = AutoBoost("O1", {"grad_accumulation": {"grad_accumulation_step": 2}})
    reason = "in no level, and its section alone does not switch it on"
    assert boost.report()["grad_accumulation"].reason == reason


def test_enable_all_leaves_out_what_needs_an_optimizer_of_mindspore_nn():
    boost = AutoBoost("O1", {"boost": {"mode": "enable_all"}})
    net = nn.SequentialCell(nn.Dense(4, 3), nn.BatchNorm1d(3), nn.Dense(3, 2))
    other = optim.SGD(net.trainable_params(), 0.1)
    assert boost.network_auto_process_train(net, other) == (net, other)
    for name in ("less_bn", "grad_freeze"):
        row = boost.report()[name]
        assert row.status == "skipped"
        assert "needs an nn.Optimizer, got mindspore.experimental" in row.reason
    # The same settings for a network with another optimizer.
    with pytest.warns(NoEffectWarning, match="less_bn"):  # it has no residual block
        _, freezing = boost.network_auto_process_train(net, nn.SGD(net.trainable_params(), 0.1))
    assert isinstance(freezing, FreezeOpt)
    assert boost.report()["grad_freeze"].status == "applied"


def test_enable_all_reports_what_the_run_does_not_allow():
    boost = AutoBoost("O1", {"boost": {"mode": "enable_all"}})
    boost.leave_out("adasum", "one process only")
    row = boost.report()["adasum"]
    assert (row.status, row.reason) == ("skipped", "one process only")
    assert not boost.boost_config["adasum"]


def test_an_autoboost_holds_no_network_that_it_has_changed():
    boost, held = AutoBoost("O1"), []
    for _ in range(2):
        net = nn.SequentialCell(residual_nets.Block(), nn.Dense(4, 2))
        boost.network_auto_process_train(net, nn.SGD(net.trainable_params(), 0.1))
        held.append(weakref.ref(net))
    del net
    gc.collect()
    assert [one() is None for one in held] == [True, True]
