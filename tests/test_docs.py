"""What the documentation shows is run: docstring examples, README code, README commands."""

from __future__ import annotations

import doctest
import importlib
import itertools
import json
import os
import pathlib
import re
import shlex
import warnings

import mindspore as ms
import pytest
import scripts

from mindspore_boost_ext.__main__ import main
from mindspore_boost_ext._version import __version__
from mindspore_boost_ext.config import page as settings_page
from mindspore_boost_ext.config.parse import SECTIONS, BoostConfig

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "mindspore_boost_ext" / "docs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "mindspore_boost_ext").rglob("*.md"))]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "mindspore_boost_ext").rglob("*.py")
)


def blocks(language, page=README):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def page_id(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    finally:
        ms.set_context(mode=before)
    assert result.failed == 0


def python_blocks():
    """Yield the scripts of all pages; ``data`` shows how its file was made."""
    for page in [one for one in PAGES if one.parent.name != "data" and "zh" not in one.name]:
        for number, code in enumerate(blocks("python", page.read_text(encoding="utf-8"))):
            yield pytest.param(code, id=f"{page_id(page)}-{number}")


@pytest.mark.parametrize("code", list(python_blocks()))
def test_the_python_of_all_pages_runs(code, tmp_path):
    """Each block is a script of its own, run where a user would run it: in a new process.

    One epoch of four batches shows that it runs; the README's ten are for the reader, to see the
    boost.
    """
    script = tmp_path / "readme.py"
    code = re.sub(r"\b10(?= \* train|, train)", "1", code)
    code = code.replace("(batch_size=32)", "(batch_size=32, most=128)")
    script.write_text(code, encoding="utf-8")
    result = scripts.run(script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("language", ["python", "json", "text", "bash"])
def test_the_chinese_page_shows_the_same_code_and_commands(language):
    chinese = (DOCS / "README.zh-CN.md").read_text("utf-8")
    assert blocks(language, chinese) == blocks(language)
    assert blocks(language)


def test_the_readme_fits_on_two_screens():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if line.startswith("|") and len(line) > 160] == []


def test_the_page_of_settings_is_that_of_the_sections():
    shown = (DOCS / "configuration.md").read_text("utf-8")
    assert shown == f"{settings_page.page()}\n", "python -m mindspore_boost_ext --explain settings"
    for name, section in SECTIONS.items():
        assert f"## `{name}`" in shown
        assert all(f"| `{one}` |" in shown for one in section.rules())


@pytest.mark.parametrize("page", PAGES[1:], ids=page_id)
def test_a_cards_settings_are_a_valid_configuration(page):
    for text in blocks("json", page.read_text(encoding="utf-8")):
        assert BoostConfig.parse("O1", json.loads(text)).notices() == ()


@pytest.mark.parametrize("text", blocks("json"))
def test_readme_json_is_a_valid_configuration(text):
    BoostConfig.parse("O1", json.loads(text))


def commands():
    """Return the shell lines of all pages, without those that install or that run this suite."""
    pages = [one.read_text(encoding="utf-8") for one in PAGES if "zh" not in one.name]
    lines = "\n".join(line for page in pages for line in blocks("bash", page)).splitlines()
    return [
        line for line in lines if line and not re.search(r"pip install|msrun|benchmarks/", line)
    ]


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_all_pages_run(line):
    words = shlex.split(line, comments=True)
    assert words[0] == "python"
    result = scripts.run(*words[1:], cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "default"})
    assert result.returncode == 0, result.stderr


def long_commands():
    """Yield the commands of the pages that take long, or need a script or ranks of the reader's."""
    for page in [one for one in PAGES if "zh" not in one.name]:
        for block in blocks("text", page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                if "python -m mindspore_boost_ext" in line:
                    words = shlex.split(line.partition("python -m mindspore_boost_ext")[2], True)
                    yield pytest.param(words, id=f"{page_id(page)}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(long_commands()))
def test_options_of_long_commands_exist(words, capsys):
    before_the_script = list(itertools.takewhile(lambda word: word != "train.py", words))
    subcommand = [word for word in words[:1] if word in ("compare", "recommend", "selftest")]
    with pytest.raises(SystemExit) as stop:
        main([*subcommand, "--help"])
    assert stop.value.code == 0
    known = capsys.readouterr().out
    options = [word for word in before_the_script if word.startswith("--")]
    assert [word for word in options if word not in known] == []


def slugs(page):
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_scripts_and_links_of_a_page_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    paths = {ROOT / path for path in re.findall(r"\b(?:examples|tests)/[\w/.]+\.\w+", text)}
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        paths.add(page.parent / path if path else page)
        if anchor:
            assert anchor in slugs(page.parent / path if path else page), f"{path}#{anchor}"
    assert [path for path in paths if not path.exists()] == []


def test_ci_runs_exactly_the_test_command_of_the_readme():
    (command,) = [
        line for block in blocks("bash") for line in block.splitlines() if "pytest" in line
    ]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -m1 -E '(.*)' README\.md", script)
    assert re.findall(f"{pattern}.*", README, re.MULTILINE) == [command]
    assert script.rstrip().endswith('eval "$command"')


def test_changelog_knows_this_version():
    changelog = (ROOT / "mindspore_boost_ext" / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {__version__}" in changelog
