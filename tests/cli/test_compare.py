"""``python -m mindspore_boost_ext compare``: its figures, its table, its picture, real runs."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from mindspore import nn
from mindspore.train import RunContext

import mindspore_boost_ext
from mindspore_boost_ext import AutoBoost, BoostConfig
from mindspore_boost_ext import __main__ as command_line
from mindspore_boost_ext.__main__ import main
from mindspore_boost_ext._compat import CallbackParameters as State
from mindspore_boost_ext.cli import compare as comparing
from mindspore_boost_ext.cli import results as comparison
from mindspore_boost_ext.cli import trial_settings
from mindspore_boost_ext.cli.compare import _last_line, _why, compare
from mindspore_boost_ext.cli.results import NOT_RUN, RAN, Outcome
from mindspore_boost_ext.cli.run import Bound
from mindspore_boost_ext.cli.trial_settings import TRIAL_SETTINGS, Setup
from mindspore_boost_ext.config.parse import ALGORITHMS


def step(number, seconds, loss=1.0):
    return {"event": "step", "step": number, "seconds": seconds, "loss": loss}


HISTORY = [
    {
        "event": "start",
        "report": {
            "rows": [
                {"algorithm": "a", "status": "applied", "reason": "", "counts": {"groups": 2}},
                {"algorithm": "b", "status": "skipped", "reason": "no | use", "counts": {}},
                {"algorithm": "c", "status": "inactive", "reason": "", "counts": {}},
            ]
        },
    },
    step(1, 2.0),
    step(2, 0.25),
    {"event": "epoch", "loss": 0.75, "metrics": {"accuracy": 0.5}},
    step(3, 1.25),  # compiles another graph
    step(4, 0.25),
    {"event": "epoch", "loss": 0.5, "metrics": {"accuracy": 0.75, "confusion": [[1]]}},
]


def test_the_note_of_a_failed_run_is_its_error_and_not_the_advice_behind_it(tmp_path):
    output = tmp_path / "output"
    output.write_text(
        "Traceback (most recent call last):\n"
        "ValueError: For 'Reshape', the shape does not fit\n\n"
        "----------------\n- The Traceback of Net Construct Code:\n"
        "(See file 'analyze_fail.ir' for more details.)\n"
    )
    assert _last_line(output) == "ValueError: For 'Reshape', the shape does not fit"
    output.write_text(
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3\n'
        "RuntimeError: \n---------\n- Kernel select failed:\n---------\n"
        "Unsupported op [X] on CPU\n\n---------\n- C++ Call Stack: (For framework developers)\n"
    )
    assert _last_line(output) == "RuntimeError: Kernel select failed: Unsupported op [X] on CPU"
    output.write_text("KeyError: 3\nDuring ...\nmine.Refused: bad data\n----\n")
    assert _last_line(output) == "mine.Refused: bad data"


@pytest.mark.parametrize(
    ("code", "printed", "note"),
    [
        (3, "accuracy 0.9\n", "exit code 3, last output: accuracy 0.9"),
        (1, "no images\n", "no images"),
        (-9, "", "exit code -9"),
    ],
)
def test_what_a_failed_run_last_said_is_not_taken_for_the_reason(tmp_path, code, printed, note):
    output = tmp_path / "output"
    output.write_text(printed)
    assert _why(code, output) == note


def test_figures_of_a_history():
    one = comparison.outcome("x", HISTORY, {"peak_mib": 100.0, "seconds": 4.0})
    assert (one.loss, one.losses) == (0.5, [0.75, 0.5])
    assert (one.metrics, one.curves) == ({"accuracy": 0.75}, {"accuracy": [0.5, 0.75]})
    # The median of the steps after the first is 0.25: 1.25 is five times that, so it is a step.
    assert one.step_ms == pytest.approx(1e3 * (0.25 + 1.25 + 0.25) / 3)
    assert one.compile_s == 1.75
    assert (one.steps, one.peak_mib, one.seconds) == (4, 100.0, 4.0)
    assert one.note == "a (groups=2); b skipped: no | use"


def test_a_metric_of_the_name_loss_has_no_part_in_the_clock_of_the_loss():
    history = []
    for step, loss in enumerate((0.9, 0.5, 0.2), start=1):
        history.append({"event": "step", "step": step, "seconds": 1.0, "loss": loss})
        history.append({"event": "epoch", "loss": loss, "metrics": {"loss": loss + 1}})
    one = comparison.outcome("x", history, {})
    assert one.curve("loss") == ([1.0, 2.0, 3.0], [0.9, 0.5, 0.2])
    assert one.curve("validation loss") == ([1.0, 2.0, 3.0], [1.9, 1.5, 1.2])
    assert comparison.table([one]).splitlines()[0].startswith("| run | loss | validation loss |")
    assert comparison.times_to_accuracy([one]) == ("loss", [3.0])


def test_curves_have_the_seconds_at_which_they_were_measured():
    one = comparison.outcome("x", HISTORY, {})
    assert one.curve("accuracy") == ([2.25, 3.75], [0.5, 0.75])
    assert one.curve("loss") == ([2.25, 3.75], [0.75, 0.5])
    assert one.curve("recall") == ([], [])


def raced(name, accuracies, key="accuracy"):
    curve = {"curves": {key: accuracies}, "clocks": {key: [1.0, 2.0, 4.0][: len(accuracies)]}}
    return Outcome(name, "ran", metrics={key: accuracies[-1]}, **curve)


def test_the_time_to_accuracy_is_that_from_which_on_it_is_never_lost():
    runs = [
        raced("plain", [0.9, 0.8, 0.9]),
        raced("sooner", [0.5, 0.95, 0.9]),
        raced("lost again", [0.95, 0.95, 0.85]),
        Outcome("failed", "failed"),
    ]
    assert comparison.times_to_accuracy(runs) == ("accuracy", [4.0, 2.0, None, None])
    lines = comparison.table(runs).splitlines()
    assert "| time to accuracy, s | time ratio |" in lines[0]
    assert lines[2].endswith("| 4.0 | 1.00 |")
    assert lines[3].endswith("| 2.0 | 0.50 |")
    assert lines[4].endswith("| - | - |")


def test_without_an_accuracy_the_race_is_to_the_loss():
    runs = [
        Outcome(name, "ran", losses=losses, clocks={"loss": [1.0, 2.0]}, metrics={"recall": 1.0})
        for name, losses in (("plain", [0.5, 0.25]), ("sooner", [0.25, 0.125]))
    ]
    assert comparison.times_to_accuracy(runs) == ("loss", [2.0, 1.0])
    assert comparison.times_to_accuracy([Outcome("no loss", "ran"), *runs])[1] == [None] * 3
    assert comparison.times_to_accuracy([]) == ("loss", [])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], (None, None)),
        ([3.0], (None, None)),
        ([3.0, 0.5], (0.5, 2.5)),
        ([3.0, 0.5, 0.5, 0.5, 2.75], (0.5, 4.75)),
        ([3.0, 0.001, 0.001, 0.001, 0.04], (0.01075, 2.999)),  # a hiccup, not a compilation
        ([0.5, 1.0, 1.0], (1.0, 0.0)),
    ],
)
def test_steps_that_compile_are_told_from_steps(steps, expected):
    found = comparison.step_and_compile_seconds(steps)
    assert found == (None, None) if None in expected else found == pytest.approx(expected)


def outcomes():
    return [
        comparison.outcome("plain", HISTORY, {"peak_mib": 100.0, "seconds": 4.0}),
        Outcome("adasum", NOT_RUN, "needs a | b"),
    ]


def test_the_table_is_markdown_with_a_cell_for_everything():
    lines = comparison.table(outcomes()).splitlines()
    assert lines[0].startswith("| run | loss | accuracy | step, ms | step ratio |")
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert "| plain | 0.5000 | 0.75 | 583.33 | 1.00 | 100 | 1.8 | 4.0 | 3.8 | 1.00 |" in lines[2]
    assert lines[3].startswith("| adasum | - |")
    assert lines[4] == ""  # notes, which may be long, stand below the table
    assert lines[-1] == "- adasum: not run: needs a | b"
    assert "None" not in "".join(lines)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    comparison.draw(outcomes(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "mindspore_boost_ext\[plot\]"'):
        comparison.draw(outcomes(), tmp_path / "x.png")


def test_every_algorithm_of_the_configuration_can_be_chosen():
    assert trial_settings.runs()[: len(ALGORITHMS)] == ALGORITHMS
    assert set(TRIAL_SETTINGS) <= set(trial_settings.runs())


@pytest.mark.parametrize(
    "name", [*ALGORITHMS, *(one for one in TRIAL_SETTINGS if one not in ALGORITHMS)]
)
def test_each_trial_is_a_valid_configuration_of_that_algorithm_alone(name):
    fewer = {"short_schedule", "seq_length_warmup", "label_smoothing", "cheaper_operators"}
    recipes = {"fast": fewer, "fastest": fewer}
    expected = {name} if name in ALGORITHMS else recipes.get(name, set())
    for network in trial_settings.NETWORKS:
        setup = Setup(network, 100, "folder")
        config = BoostConfig.parse(*trial_settings.configuration(name, setup))
        assert {one.algorithm for one in config.plan() if one.wanted} == expected, network
        assert not config.notices()


def test_an_algorithm_without_an_entry_runs_with_its_defaults(monkeypatch):
    monkeypatch.delitem(TRIAL_SETTINGS, "less_bn")
    assert trial_settings.configuration("less_bn", Setup("lenet", 100))[1]["boost"]["less_bn"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["less_bm"], "unknown: less_bm; known are "),
        (["--epochs", "0"], "must be an integer of at least 1, got '0'"),
        (["--json", "no/such/x.json"], "give a file in a writable folder, not"),
        (["--seed", "-1"], "must be an integer in 0..2**32-1, got '-1'"),
        (["--batch-size", "5000"], "--batch-size: "),
        (["--plot", "x.foo"], "must end in .png, .pdf, .svg, got 'x.foo'"),
        (["--epochs", "9", "--script", __file__], "--epochs: for the bundled networks only"),
        (["--report", "--script", __file__], "--report: for the bundled networks only"),
        (["--levels", "O1"], "--levels and --configs need --script SCRIPT"),
        (["--script"], "name a script to run"),
        (["--script", "-m", "pkg.train"], "-m is not supported, only the file of a script"),
        (["--script", "no.py"], "cannot open the script 'no.py'"),
        (["grad_freeze", "--script", __file__], "name algorithms, or give --script SCRIPT"),
        (
            ["--configs", "no.json", "none.json", "--script", __file__],
            "check the path; none.json: cannot use the file 'none.json'",
        ),
    ],
)
def test_wrong_words_are_explained(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        compare(words, print)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("role", ["MS_WORKER", "MS_SCHED"])
@pytest.mark.parametrize(
    "words", [["compare", "thor"], ["recommend", __file__], ["demo"], ["selftest"]]
)
def test_what_starts_processes_of_its_own_does_not_run_in_several(monkeypatch, capsys, words, role):
    """Nor in the scheduler, for which msrun would wait."""
    monkeypatch.setenv("MS_ROLE", role)
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.raises(SystemExit, match="2"):
        main(words)
    command = words[0].replace("demo", "compare")
    assert f"run {command} in one process, without msrun" in capsys.readouterr().err


def test_the_bundled_comparison(tmp_path, capsys):
    """Real processes: plain and one algorithm; one that cannot run here says so."""
    words = ["compare", "dynamic_loss_scale", "adasum", "--epochs", "2", "--batch-size", "100"]
    words += ["--progress", "2"]
    assert main([*words, "--json", str(tmp_path / "x.json")]) == 0
    printed = capsys.readouterr()
    assert [line.split(" | ")[0] for line in printed.out.splitlines()[2:5]] == [
        "| plain",
        "| dynamic_loss_scale",
        "| adasum",
    ]
    assert "plain (1/3)  step 2/28  loss 2." in printed.err
    document = json.loads((tmp_path / "x.json").read_text())
    plain, scaled, missing = document["runs"]
    assert plain["steps"] == scaled["steps"] == 28
    # A scale that is a power of two changes no bit, so the two runs are one.
    assert plain["losses"] == scaled["losses"]
    assert plain["metrics"] == scaled["metrics"]
    for one in (plain, scaled):
        assert math.isfinite(one["loss"])
        assert 0 <= one["metrics"]["accuracy"] <= 1
        assert 100 < one["peak_mib"] < 5_000
        assert one["step_ms"] > 0
        assert one["compile_s"] > 0
    assert missing["status"] == NOT_RUN
    assert missing["note"]
    settings = {"network": "lenet", "epochs": 2, "batch_size": 100, "seed": 0, "mode": "graph"}
    assert document["settings"] == settings


def test_the_demo_shows_the_boost_and_its_report(capsys):
    """The README's first command, with an epoch of LeNet in place of ten of a ResNet."""
    words = ["--network", "lenet", "--epochs", "1", "--batch-size", "200"]
    assert main(["demo", *words]) == 0
    report, _, table = capsys.readouterr().out.partition("| run | loss |")
    row = next(line for line in report.splitlines() if line.startswith("short_schedule "))
    assert "applied" in row
    # The table comes last: a terminal has 24 lines.
    lines = table.splitlines()
    assert "| time to accuracy, s | time ratio |" in lines[0]
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| plain", "| fast"]


SCRIPT = """
    import sys
    import mindspore as ms
    import numpy as np
    from mindspore import nn
    from mindspore.boost import AutoBoost

    assert AutoBoost.__module__.startswith("mindspore_boost_ext")
    data = np.ones((8, 4), np.float32), np.zeros((8, 2), np.float32)
    dataset = ms.dataset.NumpySlicesDataset(data, shuffle=False).batch(2)
    layers = [nn.Dense(4, 4) for _ in range(3)]
    net = nn.SequentialCell(*layers, nn.Dense(4, 2))
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.01)
    # By position, up to the level.
    model = ms.Model(net, nn.MSELoss(), optimizer, {"mae"}, None, None, "O0", "O2")
    model.train(int(sys.argv[1]), dataset, ms.LossMonitor(), dataset_sink_mode=False)
    model.eval(dataset)
    print(model.train_network.report())  # a plain run has one too
    if getattr(model.train_network, "freeze", False):
        sys.exit("a script may fail")
"""


def test_the_comparison_of_a_script(tmp_path, capsys):
    """Levels and settings come from outside; a run that fails is told with its last line."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    off = dict.fromkeys(AutoBoost().boost_config, False)
    freezing = {"param_groups": 2, "schedule": [0, 1]}
    for name, config in {
        "windows": {
            "boost": {"mode": "manual", **off, "grad_accumulation": True},
            "grad_accumulation": {"grad_accumulation_step": 2},
        },
        "freezing": {
            "boost": {"mode": "manual", **off, "grad_freeze": True},
            "grad_freeze": freezing,
        },
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    configs = [str(tmp_path / f"{name}.json") for name in ("windows", "freezing")]
    words = ["compare", "--json", str(tmp_path / "x.json"), "--configs", *configs]
    assert main([*words, "--script", str(script), "2"]) == 1
    plain, windows, freezing = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert (plain["name"], plain["steps"], windows["steps"]) == ("O0", 8, 8)
    assert plain["metrics"].keys() == windows["metrics"].keys() == {"mae"}
    assert (plain["models"], windows["models"]) == (1, 1)
    assert (plain["replaced"], windows["replaced"]) == (True, True)
    assert windows["note"] == "grad_accumulation"
    assert (freezing["status"], freezing["note"]) == ("failed", "a script may fail")
    told = capsys.readouterr().out
    assert "a script may fail" in told
    assert "- O0: its own level and settings are replaced by those of the run" in told


OWN_STEP = {"algorithm": "step", "asked by": "-", "status": "inactive", "reason": "its own"}
COMPILED = {"algorithm": "first steps", "asked by": "-", "status": "applied"}


@pytest.mark.parametrize(
    ("rows", "why"),
    [([OWN_STEP, COMPILED], "its own"), ([COMPILED], "the script's Models ignore the level")],
)
def test_a_script_that_takes_no_settings_is_no_better_than_plain(rows, why):
    """As one whose Models have steps of their own: each run is a plain one."""
    report = {"title": "boost level O0, mode auto", "rows": rows}
    history = [{"event": "start", "report": report}, step(1, 1.0)]
    assert comparison.changed_nothing(history)
    assert comparison.why_nothing(history).startswith(f"nothing was applied: {why}")


def test_settings_that_switch_nothing_on_are_named():
    report = {"title": "boost level O1, mode disable_all", "rows": [COMPILED]}
    history = [{"event": "start", "report": report}, step(1, 1.0)]
    assert comparison.why_nothing(history) == "nothing was applied: the settings switch nothing on"


def test_a_script_with_several_models_is_told():
    bound, steps = Bound(0, 0.0), [nn.Cell(), nn.Cell()]
    for step in (steps[0], *steps):
        bound.on_train_begin(RunContext(State(train_network=step)))
    assert bound.models == 2
    outcomes = [Outcome("O0", "ran", models=bound.models), Outcome("O1", "ran", "less_bn")]
    told = comparison.table(outcomes)
    assert told.endswith("a script that trains one\n- O1: less_bn")
    assert "- O0: it trains 2 Models, whose steps are counted as one training here" in told


UNUSUAL = """
    import os
    import sys
    import mindspore as ms
    import numpy as np
    from mindspore import nn

    assert sys.argv[1:] == ["--", "-x"]
    random = np.random.default_rng(0)
    data = random.normal(size=(8, 4)).astype("f"), random.normal(size=(8, 2)).astype("f")
    dataset = ms.dataset.NumpySlicesDataset(data, shuffle=False).batch(2)
    net = nn.Dense(4, 2)  # drawn without a seed of the script's own
    model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.01), {"mae"})

    class Evaluating(ms.Callback):
        def on_train_epoch_end(self, run_context):
            model.eval(dataset)

    model.train(2, dataset, {Evaluating()})  # MindSpore takes any collection
    os._exit(0)  # nothing is written behind it
"""


def test_a_script_that_evaluates_in_a_callback_draws_weights_and_leaves_at_once(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(UNUSUAL), encoding="utf-8")
    words = ["--json", str(tmp_path / "x.json"), "--levels", "O0", "O0"]
    assert compare([*words, "--script", str(script), "--", "-x"], print) == 0
    first, second = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert first["metrics"].keys() == {"mae"}
    assert (first["loss"], first["metrics"]) == (second["loss"], second["metrics"])
    assert not first["replaced"]  # it gives its Model no level
    assert first["peak_mib"] is None


def test_what_is_done_is_shown_when_the_rest_is_broken_off(monkeypatch, capsys):
    done = []

    def trial(one, title, display):
        if done:
            raise KeyboardInterrupt
        done.append(one.name)
        return Outcome(one.name, RAN, loss=0.25), []

    monkeypatch.setattr(comparing, "run_trial", trial)
    assert main(["compare", "thor"]) == 130
    shown = capsys.readouterr()
    assert "| plain | 0.2500 |" in shown.out
    assert "interrupted after 1 of 2 runs" in shown.err
    assert main(["compare", "thor"]) == 130  # before anything is done


def test_a_script_with_a_loop_of_its_own_is_told_what_can_be_measured(
    monkeypatch, capsys, tmp_path
):
    """Its process ends well, and nothing has been written into the history."""
    monkeypatch.setattr(comparing, "_watch", lambda process, *rest: process.wait())
    (tmp_path / "loop.py").write_text("")
    monkeypatch.setattr(
        comparing, "_start", lambda *given: subprocess.Popen([sys.executable, "-c", ""])
    )
    assert main(["compare", "--script", str(tmp_path / "loop.py"), "--levels", "O0"]) == 1
    shown = capsys.readouterr().out
    assert "no step was seen: these commands see the steps of ms.Model alone" in shown
    assert "make_train_step" in shown


@pytest.fixture
def at_once(monkeypatch):
    """Put runs that are there at once in the place of processes; one metric has a Chinese name."""

    def trial(one, title, display):
        return Outcome(one.name, RAN, loss=0.25, metrics={"准确率": 0.5}), []

    monkeypatch.setattr(comparing, "run_trial", trial)


class Full(io.TextIOWrapper):
    """Standard output on a full disk; to be written as ASCII."""

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("has_room", [True, False])
def test_figures_outlive_a_table_that_cannot_be_printed(
    at_once, monkeypatch, tmp_path, capsys, has_room
):
    output = tmp_path / "out"
    with open(output, "wb") as raw:
        stream = (io.TextIOWrapper if has_room else Full)(raw, encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        code = main(["compare", "thor", "--json", str(tmp_path / "x.json")])
        monkeypatch.undo()
    runs = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert [one["metrics"] for one in runs] == [{"准确率": 0.5}] * 2
    said = capsys.readouterr().err
    assert code == int(not has_room)
    if has_room:
        assert "| run | loss | ??? |" in output.read_text()
    else:
        assert said.count("cannot write to standard output: No space left on device\n") == 1


def test_a_picture_that_cannot_be_drawn_costs_nothing_else(at_once, monkeypatch, tmp_path, capsys):
    def draw(outcomes, path):
        raise ValueError("no such backend")

    monkeypatch.setattr(comparison, "draw", draw)
    assert main(["compare", "thor", "--plot", str(tmp_path / "x.png")]) == 1
    shown = capsys.readouterr().out
    assert "| plain | 0.2500 |" in shown
    assert "x.png: " in shown
    assert "no such backend" in shown


def test_evaluations_of_two_datasets_have_names_of_their_own():
    """Else the last one would be "the" accuracy, and a curve would alternate between both."""
    records, evaluated = [], lambda value: {"event": "eval", "metrics": {"accuracy": value}}
    for epoch in (1, 2):
        records += [step(epoch, 1.0), evaluated(0.5 + epoch / 10), evaluated(0.8 + epoch / 10)]
    found = comparison.outcome("plain", records, {})
    assert found.curve("accuracy") == ([1.0, 2.0], [0.6, 0.7])
    assert found.curve("accuracy (evaluation 2)") == ([1.0, 2.0], [0.9, 1.0])
    assert comparison.times_to_accuracy([found]) == ("accuracy", [2.0])


def test_what_is_measured_once_more_with_the_same_result_is_no_second_dataset():
    """As by ``eval`` on the data with which ``fit`` has validated."""
    epoch = {"event": "epoch", "loss": 0.5, "metrics": {"accuracy": 0.9}}
    again = {"event": "eval", "metrics": {"accuracy": 0.9}}
    found = comparison.outcome("plain", [step(1, 1.0), epoch, again], {})
    assert (found.metrics, found.curves) == ({"accuracy": 0.9}, {"accuracy": [0.9]})


def test_a_file_that_cannot_be_written_costs_nothing_else(at_once, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(comparison, "draw", lambda outcomes, path: path.write_text("a picture"))
    words = ["compare", "thor", "--plot", str(tmp_path / "x.png"), "--json", "/dev/full"]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "| plain | 0.2500 |" in shown.out
    assert f"drawn: {tmp_path / 'x.png'}" in shown.out
    assert "cannot write /dev/full: No space left on device\n" in shown.out
    assert (tmp_path / "x.png").read_text() == "a picture"


@pytest.mark.parametrize("command", ["recommend", "selftest"])
def test_a_command_that_is_broken_off_says_so(monkeypatch, capsys, command):
    def interrupted(words, write):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_command", lambda name: interrupted)
    assert main([command]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_from_outside_is_as_broken_off(monkeypatch, capsys, number):
    """By ``timeout``, say: the run that it has started would go on."""

    def ended(words, write):
        os.kill(os.getpid(), number)
        time.sleep(10)  # Python calls the handler before that ends

    monkeypatch.setattr(command_line, "_command", lambda name: ended)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main(["compare"]) == 130
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == "interrupted\n"


def test_under_nohup_a_command_goes_on_without_its_terminal(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(
            command_line, "_command", lambda name: lambda *_: os.kill(os.getpid(), signal.SIGHUP)
        )
        assert main(["compare"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_data_is_part_of_the_package():
    package = pathlib.Path(mindspore_boost_ext.__file__).parent
    settings = (package.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '"data/*"' in settings
    assert {path.name for path in (package / "data").iterdir()} == {"digits.npz", "README.md"}


def test_the_commands_import_no_module_that_a_script_may_have_beside_it(tmp_path):
    """The current folder comes first in the path of ``python -m``: data there may be so called."""
    modules = "cli.compare", "cli.recommend", "cli.run", "selftest.command"
    names = [f"mindspore_boost_ext.{one}" for one in modules]
    # python -m itself has loaded runpy.
    code = f"import sys, runpy, mindspore; before = {{*sys.modules}}; import {', '.join(names)}"
    code += "; print(*{one.partition('.')[0] for one in {*sys.modules} - before} - before)"
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "mindspore_boost_ext"
