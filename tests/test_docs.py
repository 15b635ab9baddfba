"""The documents say what is there."""

import re
from pathlib import Path

import pytest

import bsat

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*.md")])


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads], target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_is_python(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


def test_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "README.md", "python")
    assert 8 <= len(code.strip().splitlines()) <= 12
    budget = "max_epochs=5, epoch_windows=2000"
    assert budget in code
    exec(code.replace(budget, "max_epochs=1, epoch_windows=128, d_model=8"), {})
    assert "BSAT-hi-95" in capsys.readouterr().out
    assert len(bsat.Forecaster.load("model", verbose=False).predict()) == 96


def test_every_model_of_the_laboratory_is_named():
    from typer.main import get_command

    from bsat.cli import app
    from bsat.lab.models import MODELS

    (option,) = [p for p in get_command(app).commands["lab"].commands["run"].params if p.name == "models"]
    assert option.help == f"Some of {', '.join(MODELS)}."
    page = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", page.split("## Models")[1].split("\n## ")[0], re.M) == list(MODELS)


def test_commands_of_the_docs_exist():
    from typer.main import get_command

    from bsat.cli import app

    commands = get_command(app).commands
    for page in PAGES:
        for block in blocks(page, "console"):
            for name, rest in re.findall(r"^\$ bsat (\w+)(.*)$", block, re.M):
                assert name in commands, (page.name, name)
                command = commands[name]
                if hasattr(command, "commands"):  # bsat lab run, bsat data get
                    assert rest.split()[0] in command.commands, (page.name, name, rest)
                    command = command.commands[rest.split()[0]]
                options = {o for p in command.params for o in p.opts}
                assert set(re.findall(r"(?<= )--[a-z-]+", rest.split("#")[0])) <= options, (page.name, name, rest)


def test_published_tables_are_those_of_the_published_runs(tmp_path):
    from bsat.lab import write_tables

    results = ROOT / "docs" / "results" / "runs"
    made = {path.name: path.read_bytes() for path in write_tables(results, tmp_path, ["md"])}
    assert made == {path.name: path.read_bytes() for path in (results / "tables").iterdir()}
