"""``python -m mindspore_boost_ext``: scripts run as under plain Python, questions are answered."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import scripts

from mindspore_boost_ext.__main__ import main
from mindspore_boost_ext.cli import cards
from mindspore_boost_ext.cli.cards import OTHER_NAMES
from mindspore_boost_ext.config.parse import ALGORITHMS

LAUNCHER = [sys.executable, "-m", "mindspore_boost_ext"]


def run(command, cwd=None, **kwargs):
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_a_script_sees_what_it_sees_under_plain_python(tmp_path):
    write(tmp_path, "sub/sibling.py", "VALUE = 42\n")
    write(tmp_path, "sub/statistics.py", "MEAN = 7\n")  # of a name that Python has, too
    write(tmp_path, "statistics.py", "raise SystemExit('no business of the script')\n")
    write(
        tmp_path,
        "sub/train.py",
        """
        import json, os, pickle, sys
        import sibling, statistics

        class Local:
            def method(self, epochs: int) -> None: ...

        print(json.dumps({
            "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
            "annotations": __annotations__,
            "sibling": sibling.VALUE, "main": sys.modules["__main__"].__dict__ is globals(),
            "mean": statistics.MEAN, "hints": str(Local.method.__annotations__),
            "loader": type(__loader__).__name__,
            "pickled": type(pickle.loads(pickle.dumps(Local()))) is Local,
            "builtins": type(__builtins__).__name__,
        }, sort_keys=True))
        """,
    )
    words = ["sub/train.py", "--", "--epochs", "3", "--explain", "-x"]
    boosted, plain = run([*LAUNCHER, *words], tmp_path), run([sys.executable, *words], tmp_path)
    assert boosted.returncode == plain.returncode == 0, boosted.stderr
    assert boosted.stdout == plain.stdout
    assert json.loads(boosted.stdout)["sibling"] == 42


@pytest.mark.parametrize("option", [["-m", "pkg.train"], ["-mpkg"]])
def test_a_module_sees_what_it_sees_under_plain_python(tmp_path, option):
    write(tmp_path, "pkg/__init__.py", "import sys\n\nprint(sys.argv)\n")
    write(tmp_path, "pkg/sibling.py", "VALUE = 42\n")
    for file in ("train", "__main__"):
        write(
            tmp_path,
            f"pkg/{file}.py",
            """
            import json, pickle, sys
            from . import sibling

            class Local: ...

            print(json.dumps({
                "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
                "package": __package__, "spec": __spec__.name, "sibling": sibling.VALUE,
                "main": sys.modules["__main__"].__dict__ is globals(),
                "pickled": type(pickle.loads(pickle.dumps(Local()))) is Local,
            }, sort_keys=True))
            raise KeyError("lost")
            """,
        )
    words = [*option, "--", "--epochs", "3", "--explain", "-m", "x"]
    boosted = run([*LAUNCHER, "--lev", "O1", *words], tmp_path)  # argparse takes beginnings
    plain = run([sys.executable, *words], tmp_path)
    assert boosted.returncode == plain.returncode == 1
    assert boosted.stdout == plain.stdout
    assert json.loads(boosted.stdout.splitlines()[-1])["sibling"] == 42
    frames = plain.stderr.partition(f'  File "{tmp_path}')  # plain Python shows those of runpy
    assert boosted.stderr == "Traceback (most recent call last):\n" + "".join(frames[1:])


def test_an_error_of_the_package_around_a_module_is_its_own(tmp_path):
    write(tmp_path, "pkg/__init__.py", "raise ValueError('rate must be positive')\n")
    write(tmp_path, "pkg/train.py", "")
    result = scripts.run(*LAUNCHER[1:], "-m", "pkg.train", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: rate must be positive\n")


@pytest.mark.parametrize("folder", ["outer/inner", "pkg", "app/inner"])
def test_a_module_is_run_that_shows_only_when_packages_are_imported(tmp_path, folder):
    """In folders without __init__, and where a package looks elsewhere."""
    write(tmp_path, "outer/inner/train.py", "print(__spec__.name)\n")
    write(tmp_path, "pkg/__init__.py", "__path__.append('outer/inner')\n")
    write(tmp_path, "app/__init__.py", "")
    write(tmp_path, "app/inner/train.py", "print(__spec__.name)\n")
    name = f"{folder.replace('/', '.')}.train"
    result = scripts.run(*LAUNCHER[1:], "-m", name, cwd=tmp_path)
    assert result.stdout == f"{name}\n", result.stderr


@pytest.mark.parametrize("name", ["plain.train", "bare.inner.train", "plain.nobody"])
def test_a_module_in_a_zip_archive(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        for folder in ("plain", "bare", "bare/inner"):
            archive.writestr(f"{folder}/", "")
        archive.writestr("plain/__init__.py", "")
        for place in ("plain", "bare/inner"):
            archive.writestr(f"{place}/train.py", "print(__spec__.name)\n")
    root = str(Path(cards.__file__).parents[2])
    path = os.pathsep.join([str(tmp_path / "lib.zip"), root])
    environment = {**os.environ, "PYTHONPATH": path}
    result = scripts.run(*LAUNCHER[1:], "-m", name, cwd=tmp_path, env=environment)
    if name == "plain.nobody":
        assert (result.returncode, result.stdout) == (2, "")
        assert "No module named 'plain.nobody'" in result.stderr
    else:
        assert result.stdout == f"{name}\n", result.stderr


def test_the_path_is_left_alone_where_python_is_asked_to_be_safe(tmp_path):
    write(tmp_path, "library/helper.py", "VALUE = 42\n")
    write(tmp_path, "train.py", "import helper\n\nprint(helper.VALUE)\n")
    root = str(Path(cards.__file__).parents[2])
    path = os.pathsep.join([str(tmp_path / "library"), root])
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    result = run([*LAUNCHER, "train.py"], tmp_path, env=environment)
    assert result.stdout == "42\n", result.stderr


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a message')",
        "raise SystemExit",
        "def inner():\n    raise KeyError('lost')\n\n"
        "try:\n    inner()\nexcept KeyError as error:\n    raise ValueError('x') from error",
        "x = = 1",
        "import missing_module_of_nobody",
    ],
)
def test_exit_codes_and_tracebacks_are_those_of_plain_python(tmp_path, body):
    write(tmp_path, "train.py", body + "\n")
    boosted = run([*LAUNCHER, "train.py"], tmp_path)
    plain = run([sys.executable, "train.py"], tmp_path)
    assert (boosted.returncode, boosted.stdout) == (plain.returncode, plain.stdout)
    own = boosted.stderr.replace(str(tmp_path) + os.sep, "")
    assert own == plain.stderr.replace(str(tmp_path) + os.sep, "")


def test_a_package_that_fails_before_its_module_begins_shows_where(tmp_path):
    write(tmp_path, "pkg/__init__.py", "1 / 0\n")
    write(tmp_path, "pkg/mod.py", "")
    boosted = run([*LAUNCHER, "-m", "pkg.mod"], tmp_path)
    plain = run([sys.executable, "-m", "pkg.mod"], tmp_path)
    frames = plain.stderr.partition(f'  File "{tmp_path}')
    assert boosted.stderr.endswith("".join(frames[1:]))


def test_a_package_that_imports_what_it_has_not_shows_that(tmp_path):
    """Its own name stands in the error; the package itself is there."""
    write(tmp_path, "pkg/__init__.py", "from pkg import missing\n")
    write(tmp_path, "pkg/mod.py", "")
    boosted = run([*LAUNCHER, "-m", "pkg.mod"], tmp_path)
    assert "cannot import name 'missing'" in boosted.stderr
    assert "cannot find the module" not in boosted.stderr


def test_an_interrupt_ends_the_script_as_under_plain_python(tmp_path):
    write(
        tmp_path,
        "train.py",
        "import time\nprint('ready', flush=True)\ntime.sleep(60)\n",
    )
    codes = []
    for command in (LAUNCHER, [sys.executable]):
        process = subprocess.Popen(
            [*command, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout.readline().strip() == b"ready"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        codes.append(process.wait(timeout=30))
        process.stdout.close()
    assert codes[0] == codes[1]


SCRIPT_FOR_UPSTREAM = """
    import mindspore as ms
    import numpy as np
    from mindspore import nn
    from mindspore.boost import AutoBoost
    from mindspore.train import Model

    data = np.ones((8, 4), np.float32), np.zeros((8, 2), np.float32)
    dataset = ms.dataset.NumpySlicesDataset(data, shuffle=False).batch(4)
    net = nn.Dense(4, 2)
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.01)
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}}
    model = Model(net, nn.MSELoss(), optimizer, boost_level="O1", boost_config_dict=config)
    model.train(1, dataset, callbacks=[ms.LossMonitor(1)], dataset_sink_mode=False)
    print(AutoBoost.__module__)
"""


def test_an_unmodified_script_trains_with_this_package(tmp_path):
    path = write(tmp_path, "train.py", SCRIPT_FOR_UPSTREAM)
    result = scripts.run("-m", "mindspore_boost_ext", path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("loss is ") == 2
    assert "None" not in result.stdout
    assert result.stdout.splitlines()[-1] == "mindspore_boost_ext.boost"


def test_explain_says_what_a_configuration_would_do(capsys, tmp_path):
    config = write(tmp_path, "c.json", '{"boost": {"mode": "manual", "grad_freeze": false}}')
    assert main(["--level", "O1", "--explain", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "level O1, mode manual" in printed
    assert "boost.grad_freeze=False" in printed
    assert "LessBNConfig(fn_flag=True" in printed
    assert main(["--explain"]) == 0
    assert "mode auto" in capsys.readouterr().out


def test_an_answer_outlives_its_reader():
    command = (
        f"{sys.executable} -m mindspore_boost_ext --explain | head -0; exit ${{PIPESTATUS[0]}}"
    )
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["recipes", "fast", "large-batch"])
def test_a_recipe_is_explained_by_the_page_of_the_recipes(capsys, name):
    assert main(["--explain", name]) == 0
    assert capsys.readouterr().out.startswith("# Recipes")


def test_an_answer_outlives_letters_that_are_missing(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), "ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["--explain", "thor"]) == 0
    assert b"?" in output.buffer.getvalue()


def test_an_answer_that_cannot_be_written_is_one_line_and_exit_code_1():
    command = f"{sys.executable} -m mindspore_boost_ext --explain thor > /dev/full"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr == "cannot write to standard output: No space left on device\n"


def test_explain_shows_what_every_step_has(capsys):
    assert main(["--recipe", "fp16", "--total-steps", "10", "--explain"]) == 0
    assert "every step, loss_scale: LossScaleConfig(init=65536.0" in capsys.readouterr().out


def test_explain_says_what_a_recipe_or_a_given_file_would_do(capsys, tmp_path):
    assert main(["--recipe", "fast", "--total-steps", "1000", "--explain"]) == 0
    assert "total_steps=1000" in capsys.readouterr().out
    config = str(write(tmp_path, "c.json", '{"boost": {"mode": "disable_all"}}'))
    assert main(["--config", config, "--explain"]) == 0
    assert "mode disable_all" in capsys.readouterr().out
    for question in ("--explain", "--check"):
        assert main(["--config", config, question, config]) == 2
        assert "remove --config and --recipe, or give" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*ALGORITHMS, "loss_scale"])
def test_explain_shows_the_card_of_an_algorithm(capsys, name):
    assert main(["--explain", name]) == 0
    printed = capsys.readouterr().out
    for part in ("When it helps", "hurts", "Measured effect", "Cost", "Reference"):
        assert part in printed, f"the card of {name} lacks: {part}"
    effect = re.search(r"Measured effect(.*?)(\n\n|$)", printed, re.DOTALL)[1]
    assert re.search(r"\d|not measured|recipes", effect), f"the card of {name} has no figure"


@pytest.mark.parametrize(("name", "same"), OTHER_NAMES.items())
def test_a_card_is_found_by_the_names_of_its_classes_and_settings(capsys, name, same):
    assert main(["--explain", name]) == main(["--explain", same]) == 0
    printed = capsys.readouterr().out
    assert printed
    assert printed == printed[: len(printed) // 2] * 2


def test_check_says_whether_a_configuration_is_valid(capsys, tmp_path):
    good = write(tmp_path, "good.json", '{"boost": {"less_bn": false}}')
    assert main(["--check", str(good)]) == 0
    printed = capsys.readouterr().out
    assert "boost.less_bn=False has no effect" in printed
    assert "good.json: valid" in printed
    bad = write(tmp_path, "bad.json", '{"boost": {"lessbn": 1}, "grad_freeze": {"freeze_p": 7}}')
    assert main(["--check", str(bad)]) == 2
    printed = capsys.readouterr().err
    assert "2 problems" in printed
    assert "did you mean 'less_bn'?" in printed


def test_env_tells_versions_devices_and_convolution_speed(capsys):
    assert main(["--env"]) == 0
    printed = capsys.readouterr().out
    for word in ("python 3", "mindspore 2.", "numpy 1.", "device target CPU", "3x3 convolution"):
        assert word in printed


def test_a_file_that_is_no_source_is_refused_in_one_line(tmp_path, capsys):
    write(tmp_path, "app.pyz", "#!/usr/bin/env python\nPK\0")
    assert main([str(tmp_path / "app.pyz")]) == 2
    assert (
        "app.pyz' is not Python source: give the file of a Python script" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "cannot open the script 'missing.py'\n"),
        ([os.path.dirname(__file__)], "is a folder: give the file of a Python script"),
        (["comapre", "fast"], "cannot open the script 'comapre': did you mean 'compare'?"),
        (["--level", "O1", "demo"], "the command 'demo' must come first, before its options"),
        (["--level", "O1"], "--level, --config and --recipe need a script after them"),
        (
            ["--explain", "thor", "train.py"],
            "--explain and --check run no script, got 'train.py': leave",
        ),
        (["--explain", "--level", "O1", "train.py"], "run no script, got 'train.py': leave"),
        (["--check", "missing.json"], "there is no such file"),
        (["--explain", "missing.json"], "there is no such file"),
        (["--explain", "nobody"], "neither a file nor the name of a card; cards: less_bn, "),
        (["--explain", "LESS_BN"], "the name of a card: did you mean 'less_bn'?"),
        (["--explain", "setings"], "the name of a card: did you mean 'settings'?"),
        (["--check", '{"thor": {"damping": -1}}'], "thor.damping must be"),
        (["--explain", '{"thor"'], "not valid JSON: Expecting ':' delimiter"),
    ],
)
def test_a_file_that_is_not_there_is_one_line_and_exit_code_2(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-m", "nobody.at.all"],
            "cannot find the module 'nobody.at.all', from ",
        ),
        (["-m", "email.nobody"], "No module named 'email.nobody'"),
        (["-m", "email"], "No module named 'email.__main__'"),
        (["-m", ".x"], "cannot find the module '.x'"),
        (["--explain", "thor", "-m", "json.tool"], "run no script, got 'json.tool'"),
    ],
)
def test_a_module_that_is_not_there_is_one_line_and_exit_code_2(
    capsys, monkeypatch, words, message
):
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("word", "answer"), [("--check", ": valid"), ("--explain", "thor  ")])
def test_a_configuration_may_be_text(capsys, word, answer):
    assert main([word, '{"boost": {"mode": "manual", "thor": true}}']) == 0
    assert answer in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--check", ""], ["--config", "", "train.py"]])
def test_an_empty_word_is_no_file(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"argument {words[0]}: needs a file, got ''" in capsys.readouterr().err


def test_without_words_it_prints_its_help(capsys):
    assert main([]) == 2
    assert "msrun" in capsys.readouterr().out


# ---- Level and settings from outside of the script ----

TRAINS = """
import sys
import numpy as np
import mindspore as ms
from mindspore import nn

def parts():
    net = nn.SequentialCell(nn.Dense(4, 3), nn.Dense(3, 3), nn.Dense(3, 2))
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    values = np.ones((8, 4), np.float32), np.ones((8, 2), np.float32)
    return net, nn.MSELoss(), optimizer, ms.dataset.NumpySlicesDataset(values).batch(4)

net, loss, optimizer, data = parts()
"""
SCRIPTS = {
    "Model": "ms.Model(net, loss, optimizer).train(1, data, dataset_sink_mode=False)",
    "scaled Model": "manager = ms.DynamicLossScaleManager()\n"
    "ms.Model(net, loss, optimizer, loss_scale_manager=manager).train(1, data)",
    "build_train_network": "ms.amp.build_train_network(net, optimizer, loss)(*next(iter(data)))",
    "own level": "ms.Model(net, loss, optimizer, boost_level='O0').train(1, data)",
    "own step": "step = nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)\n"
    "ms.Model(step).train(1, data)",
    "both": "step = nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)\n"
    "model = ms.Model(step)\nmodel.train(1, data)\nprint(model.train_network.report()['step'])\n"
    "net, loss, optimizer, data = parts()\nms.Model(net, loss, optimizer).train(1, data)",
    "by hand": "from mindspore.boost import AutoBoost, BoostTrainOneStepCell\n"
    "config = {'boost': {'mode': 'manual', 'less_bn': False, 'grad_freeze': False,\n"
    "                    'grad_accumulation': True},\n"
    "          'grad_accumulation': {'grad_accumulation_step': 2}}\n"
    "boost = AutoBoost('O1', config)\n"
    "net, optimizer = boost.network_auto_process_train(nn.WithLossCell(net, loss), optimizer)\n"
    "BoostTrainOneStepCell(net, optimizer)(*next(iter(data)))",
    "by hand, O0": "from mindspore.boost import BoostTrainOneStepCell\n"
    "BoostTrainOneStepCell(nn.WithLossCell(net, loss), optimizer)(*next(iter(data)))",
    "by hand, FreezeOpt": "from mindspore.boost import BoostTrainOneStepCell\n"
    "from mindspore.boost.grad_freeze import FreezeOpt\n"
    "every = net.trainable_params()\n"
    "optimizer = FreezeOpt(optimizer, [every, every[1:]], [0, 1])\n"
    "BoostTrainOneStepCell(nn.WithLossCell(net, loss), optimizer)(*next(iter(data)))",
    "loop": "gradient = ms.value_and_grad(net, None, optimizer.parameters)",
    "own settings": "ms.Model(net, loss, optimizer, boost_level='O1',\n"
    "         boost_config_dict={'boost': {'mode': 'disable_all'}}).train(1, data)",
    "own settings alone": "ms.Model(net, loss, optimizer,\n"
    "         boost_config_dict={'boost': {'mode': 'disable_all'}}).train(1, data)",
    "own class": "class Own(ms.Model):\n"
    "    def _build_train_network(self):\n"
    "        return nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer).set_train()\n"
    "Own(net, loss, optimizer).train(1, data)",
    "own class of the usual step": "class Own(ms.Model):\n"
    "    def _build_train_network(self):\n"
    "        return super()._build_train_network()\n"
    "Own(net, loss, optimizer).train(1, data)",
    "own class by hand": "from mindspore.boost import BoostTrainOneStepCell\n"
    "class Own(ms.Model):\n"
    "    def _build_train_network(self):\n"
    "        inner = nn.WithLossCell(self._network, self._loss_fn)\n"
    "        return BoostTrainOneStepCell(inner, self._optimizer)\n"
    "Own(net, loss, optimizer, boost_level='O1', boost_config_dict={\n"
    "    'boost': {'mode': 'manual', 'less_bn': False},\n"
    "    'grad_freeze': {'param_groups': 2, 'total_steps': 10}}).train(1, data)",
    "own class with a level": "class Own(ms.Model):\n"
    "    def _build_train_network(self):\n"
    "        return nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer).set_train()\n"
    "model = Own(net, loss, optimizer, boost_level='O1')\n"
    "print(model._optimizer is optimizer, len(net.trainable_params()))\n"
    "model.train(1, data)",
    "thread": "import threading\n"
    "def train():\n"
    "    ms.Model(net, loss, optimizer).train(1, data)\n"
    "threading.Thread(target=train).start()",
    "closed": "import os\n"
    "ms.Model(net, loss, optimizer).train(1, data)\n"
    "sys.stderr = open(os.devnull, 'w')\n"
    "sys.stderr.close()",
    "graph": "ms.set_context(mode=ms.GRAPH_MODE)\n"
    "ms.Model(net, loss, optimizer).train(1, data, dataset_sink_mode=False)",
    "exit": "ms.Model(net, loss, optimizer).train(1, data)\nsys.exit(0)",
    "failure": "ms.Model(net, loss, optimizer)\nraise KeyError('lost')",
}
FREEZES = {
    "boost": {"mode": "manual", "less_bn": False},
    "grad_freeze": {"param_groups": 2, "total_steps": 10},
}


@pytest.fixture
def launched(tmp_path):
    """Return a function that runs a script under the launcher; it returns the process."""
    config = write(tmp_path, "config.json", json.dumps(FREEZES))

    def start(name, *words, **environment):
        write(tmp_path, "train.py", TRAINS + SCRIPTS[name])
        words = [str(config) if word == "CONFIG" else word for word in words]
        words += ["train.py", "--level", "own"]
        variables = {**os.environ, **environment}
        return scripts.run("-m", "mindspore_boost_ext", *words, cwd=tmp_path, env=variables)

    return start


@pytest.mark.parametrize("name", ["Model", "scaled Model", "build_train_network", "exit"])
def test_a_script_without_a_level_is_boosted_from_the_command_line(launched, name):
    result = launched(name, "--config", "CONFIG")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert "mindspore_boost_ext: SequentialCell: boost level O1, mode manual" in result.stderr
    assert re.search(r"grad_freeze +level O1 +applied", result.stderr)
    assert "oneDNN instruction set" in result.stderr


def test_a_cache_of_graphs_finds_the_script_and_is_warned_of(launched, tmp_path):
    """MindSpore keeps graphs by the script's text, which settings from outside do not change."""
    folder = str(tmp_path / "graphs")
    cache = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": folder}
    result = launched("graph", "--config", "CONFIG", **cache)
    assert result.returncode == 0, result.stderr
    assert "MindSpore's compile cache is on" in result.stderr
    assert "train.py:" in result.stderr.partition("MindSpore's compile cache is on")[0]


def test_a_script_is_boosted_from_the_environment(launched, tmp_path):
    result = launched("Model", MINDSPORE_BOOST_EXT_CONFIG=str(tmp_path / "config.json"))
    assert re.search(r"grad_freeze +level O1 +applied", result.stderr)


@pytest.mark.parametrize("words", [["-m", "mindspore_boost_ext", "train.py"], ["train.py"]])
def test_a_path_of_the_environment_stays_that_of_the_beginning(tmp_path, words):
    """A script may change its folder, where other settings may lie under the same name."""
    write(tmp_path, "config.json", json.dumps(FREEZES))
    write(tmp_path, "out/config.json", '{"boost": {"mode": "disable_all"}}')
    before = "import os\nimport mindspore_boost_ext\nos.chdir('out')\n"
    train = "model = ms.Model(net, loss, optimizer)\nmodel.train(1, data)\n"
    write(tmp_path, "train.py", f"{before}{TRAINS}{train}print(model.train_network.report())")
    environment = {**os.environ, "MINDSPORE_BOOST_EXT_CONFIG": "config.json"}
    result = scripts.run(*words, cwd=tmp_path, env=environment)
    assert re.search(r"grad_freeze +level O1 +applied", result.stdout), result.stderr


def test_a_recipe_outlives_the_processes_that_a_script_forks(tmp_path):
    """One that ends as Python does: whatever is registered for an end is done there, too."""
    before = "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"
    write(tmp_path, "train.py", before + TRAINS + SCRIPTS["Model"])
    words = ["--recipe", "fp16", "--total-steps", "2", "train.py"]
    result = run([*LAUNCHER, *words], tmp_path)
    assert "SequentialCell: boost level O1, mode manual" in result.stderr


def test_settings_of_the_environment_may_be_json_text(launched):
    result = launched("Model", MINDSPORE_BOOST_EXT_CONFIG=json.dumps(FREEZES))
    assert re.search(r"grad_freeze +level O1 +applied", result.stderr)
    result = launched("Model", MINDSPORE_BOOST_EXT_CONFIG='{"less_bn": ')
    assert result.returncode == 2
    assert 'EXT_CONFIG={"less_bn": : not valid JSON: Expecting value: line 1' in result.stderr


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("Model", [], "the Model of SequentialCell has no boost_level: put --level O1 before"),
        ("own level", ["--level", "O1"], "sets boost_level='O0' for the Model of SequentialCell"),
        ("own settings alone", [], "the Model of SequentialCell has no boost_level"),
        ("own class", ["--level", "O1"], "the Model of SequentialCell trains with a step that"),
        (
            "Model",
            ["--level", "O0"],
            "given level O0 switches nothing on for the Model of SequentialCell",
        ),
        ("own step", ["--level", "O1"], "makes its own step cell, TrainOneStepCell: give ms.Model"),
        ("by hand, O0", [], "makes its own step cell, BoostTrainOneStepCell: give ms.Model"),
        ("loop", ["--level", "O1"], "the script built no ms.Model with an optimizer; if it"),
    ],
)
def test_a_script_that_is_not_boosted_is_told_why(launched, name, words, reason):
    result = launched(name, *words)
    assert result.returncode == 0, result.stderr
    assert "mindspore_boost_ext: nothing was boosted: the " in result.stderr
    assert reason in result.stderr


def test_a_class_that_takes_the_usual_step_is_boosted(launched):
    result = launched("own class of the usual step", "--config", "CONFIG")
    assert "boost level O1, mode manual" in result.stderr


@pytest.mark.parametrize("name", ["own class by hand", "by hand, FreezeOpt"])
def test_a_class_that_makes_our_step_by_hand_keeps_it(launched, name):
    result = launched(name)
    assert re.search(r"grad_freeze +FreezeOpt +applied", result.stderr)
    assert "no effect" not in result.stderr


def test_nothing_is_done_for_a_class_with_a_step_of_its_own(launched):
    result = launched("own class with a level")
    assert result.stdout == "True 6\n"
    assert "the Model of SequentialCell trains with a step that" in result.stderr
    assert "boost_level O1 has no effect on this Own" in result.stderr


def test_the_summary_waits_for_threads_that_train(tmp_path):
    """The script's code has run when the training has only begun."""
    write(tmp_path, "config.json", json.dumps(FREEZES))
    write(tmp_path, "train.py", TRAINS + SCRIPTS["thread"])
    result = run([*LAUNCHER, "--config", "config.json", "train.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("boost level O1, mode manual") == 1
    assert "nothing was boosted" not in result.stderr


def test_settings_may_be_given_as_text(launched):
    """As in the environment."""
    result = launched("Model", "--config", json.dumps(FREEZES))
    assert result.returncode == 0, result.stderr
    assert "boost level O1, mode manual" in result.stderr


def test_settings_of_a_script_without_a_level_get_one_from_outside(launched):
    told = launched("own settings alone", "--level", "O1").stderr
    assert "boost level O1, mode disable_all" in told
    told = launched("own settings alone", "--config", "CONFIG").stderr
    assert "boost level O1, mode manual" in told
    assert "from outside" not in told


def test_a_class_that_builds_its_own_step_is_left_alone_with_a_warning(launched):
    """Its network would be rewritten, and its optimizer another one, without the step for them."""
    told = launched("own class", "--level", "O1").stderr
    assert "boost_level O1 has no effect on this Own, whose class builds the training step" in told


def test_a_script_may_close_where_its_errors_go(launched):
    assert launched("closed", "--config", "CONFIG").returncode == 0


def test_what_is_not_boosted_is_named_beside_what_is(launched):
    result = launched("both", "--config", "CONFIG")
    assert result.returncode == 0, result.stderr
    assert "mindspore_boost_ext: SequentialCell: boost level O1, mode manual" in result.stderr
    assert "not boosted: the script makes its own step cell, TrainOneStepCell" in result.stderr
    assert "the script makes its own step cell, TrainOneStepCell" in result.stdout  # the report


def test_settings_from_outside_that_no_model_takes_are_named(launched):
    told = "the Model of SequentialCell ignores the level and settings from outside"
    assert told in launched("own settings", "--config", "CONFIG").stderr
    assert "from outside" not in launched("own settings").stderr
    assert "from outside" not in launched("Model", "--config", "CONFIG").stderr


def test_a_step_that_the_script_made_by_itself_is_in_the_summary(launched):
    result = launched("by hand")
    assert result.returncode == 0, result.stderr
    assert "mindspore_boost_ext: WithLossCell: boost level O1, mode manual" in result.stderr
    assert re.search(r"grad_accumulation +boost.grad_accumulation=True +applied", result.stderr)


def test_a_script_that_fails_ends_with_its_traceback(launched):
    result = launched("failure", "--config", "CONFIG")
    assert result.returncode == 1
    assert result.stderr.strip().endswith("KeyError: 'lost'")
    assert "mindspore_boost_ext: " not in result.stderr


def test_settings_that_are_wrong_end_before_the_script_begins(launched, tmp_path):
    result = launched("Model", "--config", str(tmp_path / "none.json"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "MINDSPORE_BOOST_EXT_CONFIG=" in result.stderr
    result = launched("Model", MINDSPORE_BOOST_EXT_LEVEL="O7")
    assert result.returncode == 2
    assert "MINDSPORE_BOOST_EXT_LEVEL must be one of O0, O1, O2, got 'O7'" in result.stderr
