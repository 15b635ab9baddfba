"""`bsat lab run`, `tables` and `figures`, as a user types them."""

import json
import sys

import pandas as pd
import pytest
from tiny_lab import make_tiny

from bsat.lab import read

RUN = (
    "lab run solar --models bsat,uds --tokens 6 --trials 2 --seeds 1 --epochs 2 --lookback 24 --horizon 6 --device cpu"
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    make_tiny(monkeypatch.setitem, monkeypatch.setattr)


def test_run_tables_figures(bsat, tmp_path):
    code, out, err = bsat(*RUN.split())
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("solar 6 BSAT L-RoPE LPE")
    assert "of 2 runs (2 trials)" in lines[0]
    assert all(len(line) <= 100 for line in lines)
    code, out, err = bsat("lab", "tables", "bsat-runs")
    assert code == 0, err
    runs = read(tmp_path / "bsat-runs")
    for model in ("bsat", "uds"):
        assert f"{runs[runs['model'] == model]['test_rmse'].mean():.4g}" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    helped = pd.read_csv(tmp_path / "bsat-runs" / "tables" / "help.csv")
    assert helped["model"].tolist() == ["bsat"]
    assert helped["fallback"].item() == pytest.approx(runs[runs["model"] == "bsat"]["test_fallback"].mean())
    first = {p.name: p.read_bytes() for p in (tmp_path / "bsat-runs" / "tables").iterdir()}
    assert {"benchmark-solar.md", "benchmark-solar.tex", "benchmark-solar.csv", "ranks.md"} <= set(first)
    bsat("lab", "tables", "bsat-runs", "--out", "again")
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == first
    code, out, err = bsat("lab", "figures", "bsat-runs", "--formats", "png")
    assert code == 0, err
    drawn = {line.split("/")[-1] for line in out.splitlines()}
    assert {"pipeline.png", "boxes.png", "errors-solar.png", "bases-solar.png"} <= drawn
    assert "memory is not drawn" in err
    assert "spread is not drawn" in err
    code, out, err = bsat("lab", "pack", "bsat-runs", "packed")
    assert code == 0, err
    bsat("lab", "tables", "packed")
    assert {p.name: p.read_bytes() for p in (tmp_path / "packed" / "tables").iterdir()} == first
    bsat("lab", "figures", "packed", "--formats", "png")
    for name in drawn:
        both = [(tmp_path / store / "figures" / name).read_bytes() for store in ("bsat-runs", "packed")]
        assert both[0] == both[1], name
    code, _, err = bsat("lab", "pack", "bsat-runs", "packed")
    assert code == 2
    assert "must be a new or empty folder" in err


def test_trials_of_each_budget(bsat, tmp_path):
    words = RUN.replace("--tokens 6 --trials 2", "--tokens 5,6,8, --trials 2,1,1,").replace("bsat,uds", "uds")
    code, _, err = bsat(*words.split(), "--engine", "population")
    assert code == 0, err
    assert "3 cells, 1 seeds, 2 (5 tokens) and 1 (6, 8 tokens) trials each; engine population" in err
    assert read(tmp_path / "bsat-runs").groupby("tokens").size().to_dict() == {5: 2, 6: 1, 8: 1}
    bsat("lab", "tables", "bsat-runs", "--formats", "md")
    table = (tmp_path / "bsat-runs" / "tables" / "benchmark-solar.md").read_text()
    assert "2 (5 tokens) and 1 (6, 8 tokens) trials a seed" in table


def test_json(bsat):
    code, out, _ = bsat(*RUN.split(), "--engine", "population", "--store", "s", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["runs"], found["scored"], found["failed"]) == (4, 4, 0)
    code, out, _ = bsat("lab", "tables", "s", "--json")
    assert code == 0
    assert "s/tables/benchmark-solar.md" in json.loads(out)["tables"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lab run etth2", "one of etth1"),
        ("lab run solar --models informer", "--models must be one of"),
        ("lab run solar --encodings alibi", "--encoding must be one of"),
        ("lab run solar --tokens 720", "fewer than the lookback = 720; got 720"),
        ("lab run solar --tokens many", "--tokens must be whole numbers"),
        ("lab run solar --seeds ,", "--seeds must name at least one"),
        ("lab run solar --trials 0", "--trials must be at least 1"),
        ("lab run solar --trials few", "--trials must be whole numbers"),
        ("lab run solar --trials ,", "--trials must name at least one"),
        ("lab run solar --trials 40,24, --tokens 45,90,180", "got '40,24,', which are 2"),
        ("lab run solar --trials 40,24 --tokens 45,90,180", "one for each budget of --tokens 45,90,180; got '40,24'"),
        ("lab run solar --engine slurm", "--engine must be one of"),
        ("lab run solar --device tpu", "--device must be"),
        ("lab run solar --engine population --at-once 3", "--at-once must be left out"),
        ("lab run solar --precision bfloat16", "--precision must be 'float32' with engine 'optuna'"),
        ("lab run solar --engine population --precision half", "--precision must be one of"),
        ("lab run solar --address 10.0.0.1:6379", "Use engine 'ray'"),
        ("lab tables nowhere", "nowhere"),
        ("lab figures nowhere", "nowhere"),
    ],
)
def test_mistakes(bsat, tmp_path, words, message):
    code, _, err = bsat(*words.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_store_of_another_protocol(bsat):
    assert bsat(*RUN.split(), "--engine", "population")[0] == 0
    code, _, err = bsat(*RUN.replace("--epochs 2", "--epochs 3").split(), "--engine", "population")
    assert code == 2
    assert "max_epochs 2 instead of 3" in err
    assert "writable" not in err
    assert "Name another folder" in err


def test_a_read_only_folder(bsat, tmp_path, monkeypatch):
    import errno
    import os

    real = os.open

    def read_only(path, flags, *rest, **more):
        if flags & os.O_CREAT and "locked" in str(path):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    code, _, err = bsat(*RUN.split(), "--store", "locked")
    assert code == 2
    assert "Read-only" in err
    assert "Nothing was run" in err


@pytest.mark.parametrize(
    ("module", "engine", "extra"),
    [("optuna", "optuna", "search"), ("optuna", "ray", "search"), ("ray.tune", "ray", "cluster")],
)
def test_what_is_not_installed_is_told_before_anything_is_begun(bsat, tmp_path, monkeypatch, module, engine, extra):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = bsat(*RUN.split(), "--engine", engine)
    assert code == 2
    assert f"pip install 'bsat[{extra}]'" in err
    assert not list(tmp_path.iterdir())
