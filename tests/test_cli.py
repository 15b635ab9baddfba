"""The command line, as a user calls it."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from bsat import BSplineTokenizer, Forecaster, __version__
from bsat.cli import main
from bsat.train import loop
from conftest import make_signals
from small import make_long, wait_until


@pytest.fixture
def series(tmp_path):
    y = make_signals(1500, 1)["transformer"][0]
    table = pd.DataFrame({"date": pd.date_range("2026-01-01", periods=1500, freq="h"), "OT": y})
    table.to_csv(tmp_path / "s.csv", index=False)
    table.to_parquet(tmp_path / "s.parquet")
    return y


@pytest.mark.parametrize("file", ["s.csv", "s.parquet"])
@pytest.mark.parametrize("out", ["t.parquet", "t.csv"])
def test_tokenize(bsat, series, tmp_path, file, out):
    code, said, err = bsat("tokenize", file, "--tokens", 45, "--degree", 3, "--plot", "out.png", "--out", out)
    assert (code, err) == (0, "")
    assert "2 windows of 720 samples of 'OT' (1,500 samples) as 45 tokens each; 0 ridge fallbacks" in said
    table = pd.read_parquet(tmp_path / out) if out.endswith("parquet") else pd.read_csv(tmp_path / out)
    want = BSplineTokenizer(45, 3).transform_series(series, 720, 720)
    assert len(table) == 45 * len(want)
    np.testing.assert_allclose(table["coefficient"], want.coefficients.reshape(-1))
    np.testing.assert_allclose(table["center"], want.centers.reshape(-1))
    assert (table["left"] < table["center"]).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["s.csv", "s.parquet", "out.png", out])


def test_tokenize_with_everything(bsat, series):
    code, said, _ = bsat("tokenize", "s.csv", "--clip-factor", "auto", "--lookback", 240, "--stride", 10, "--diagnose")
    assert code == 0
    assert "clip factor" in said
    assert "condition number" in said


def test_tokenize_one_series_of_several(bsat, series, tmp_path):
    """No window reaches from one series into the next."""
    parts = [pd.DataFrame({"unique_id": name, "y": series * k}) for name, k in (("01", 1), ("1", 2))]
    pd.concat(parts).to_csv(tmp_path / "two.csv", index=False)
    code, _, err = bsat("tokenize", "two.csv")
    assert code == 2
    assert "--id must name one series of two.csv; got none. It has 01, 1." in err
    assert "got '2'. It has 01, 1." in bsat("tokenize", "two.csv", "--id", "2")[2]
    assert "got '2'. It has no column unique_id." in bsat("tokenize", "s.csv", "--id", "2")[2]
    code, said, _ = bsat("tokenize", "two.csv", "--id", "1", "--out", "t.csv")
    assert (code, "1,500 samples" in said) == (0, True)
    want = BSplineTokenizer(45).transform_series(2 * series, 720, 720)
    np.testing.assert_allclose(pd.read_csv(tmp_path / "t.csv")["coefficient"], want.coefficients.reshape(-1))


def test_gaps(bsat, series, tmp_path):
    gappy = series.copy()
    gappy[[10, 11, 900]] = np.nan
    pd.DataFrame({"y": gappy}).to_csv(tmp_path / "g.csv", index=False)
    code, _, err = bsat("tokenize", "g.csv")
    assert code == 2
    assert "row 11 is empty (3 in all). Pass --fit-gaps" in err
    code, _, _ = bsat("tokenize", "g.csv", "--fit-gaps", "--out", "t.csv", "--plot", "g.png", "--window", 0)
    assert code == 0
    assert pd.read_csv(tmp_path / "t.csv")["coefficient"].notna().all()
    assert (tmp_path / "g.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["tokenize", "nowhere.csv"], "nowhere.csv does not exist"),
        (["tokenize", "."], "is a folder"),
        (["tokenize", "s.csv", "--column", "XY"], "--column must name a column of s.csv; got 'XY'. It has date, OT."),
        (["tokenize", "s.csv", "--column", "date"], "column 'date' of s.csv must hold numbers; row 1 holds"),
        (["tokenize", "two.csv"], "--column must name it; it has 2 (a, b)"),
        (["tokenize", "empty.csv"], "cannot be read as a table"),
        (["tokenize", "bad.parquet"], "cannot be read as a parquet file"),
        (["tokenize", "s.txt2"], "must end in .csv or .parquet"),
        (["tokenize", "s.csv", "--tokens", "3"], "--tokens must be greater than degree + 1 = 4; got 3"),
        (["tokenize", "s.csv", "--lookback", "5000"], "--lookback must not exceed the length of `series` = 1500"),
        (["tokenize", "s.csv", "--clip-factor", "most"], "--clip-factor must be a positive number"),
        (["tokenize", "s.csv", "--plot", "x.gif"], "must end in .png, .svg, .pdf"),
        (["tokenize", "s.csv", "--plot", "no/x.png"], "needs an existing folder"),
        (["tokenize", "s.csv", "--out", "x.xlsx"], "--out must end in .parquet or .csv"),
        (["tokenize", "s.csv", "--plot", "x.png", "--window", "9"], "--window must lie between"),
    ],
)
def test_errors_are_one_line(bsat, series, tmp_path, words, match):
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "s.txt2").write_text("1")
    before = sorted(p.name for p in tmp_path.iterdir())
    code, _, err = bsat(*words)
    assert code == 2
    assert err.startswith("bsat: ")
    assert match in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_debug_shows_the_traceback(bsat, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bsat", "--debug", "tokenize", "nowhere.csv"])
    with pytest.raises(ValueError, match="does not exist"):
        main()


def test_demo(bsat, tmp_path, monkeypatch):
    monkeypatch.setattr("bsat.demo.SETTINGS", {"head": "spline", "max_epochs": 1, "epoch_windows": 128, "d_model": 8})
    code, said, err = bsat("demo", "--out", "there")
    assert code == 0
    assert "35,040 samples" in said
    for name in ("BSAT", "PatchTST", "UDS", "last value", "seasonal naive"):
        assert re.search(rf"^{name} +\d", said, re.M), name
    assert "memory about" in err  # told before the training
    there = tmp_path / "there"
    assert sorted(p.name for p in there.iterdir()) == ["bases.png", "forecast.png", "model", "tokens.png"]
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    assert len(Forecaster.load(there / "model").predict(level=[80])) == 192


SMALL = ("--horizon", 12, "--lookback", 48, "--tokens", 10, "--epochs", 2, "--quiet")


@pytest.fixture
def load(tmp_path):
    """Three days of an hourly load, twenty times over, as people have it: wide names, no id."""
    y = make_signals(600, 1)["transformer"][0]
    table = pd.DataFrame({"date": pd.date_range("2026-01-01", periods=600, freq="h"), "OT": y, "note": "x"})
    table.to_csv(tmp_path / "load.csv", index=False)
    return table


def test_fit_predict_backtest(bsat, load, tmp_path):
    code, said, err = bsat("fit", "load.csv", "--out", "model", *SMALL)
    assert (code, err) == (0, "")
    assert re.search(r"^BSAT +[\d.]+", said, re.M)
    assert "seasonal naive" in said
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "config.json",
        "forecast.png",
        "model.safetensors",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["load.csv", "model"]

    code, said, _ = bsat("predict", "model", "--level", 80, "--level", 50)
    assert code == 0
    printed = pd.read_csv(io.StringIO(said))
    assert list(printed) == ["date", "BSAT", "BSAT-lo-50", "BSAT-hi-50", "BSAT-lo-80", "BSAT-hi-80"]
    assert len(printed) == 12
    assert printed["date"].iloc[0] == str(load["date"].iloc[-1] + pd.Timedelta("1h"))

    _, said, _ = bsat("predict", "model", "load.csv", "--json")
    records = json.loads(said)["forecasts"]
    np.testing.assert_array_equal([r["BSAT"] for r in records], printed["BSAT"])
    assert records[0]["date"] == "2026-01-26T00:00:00"

    code, said, _ = bsat("predict", "model", "load.csv", "--out", "f.parquet", "--plot", "f.png", "--level", 80)
    assert (code, said.split()) == (0, ["wrote", "f.parquet", "drew", "f.png"])
    assert len(pd.read_parquet(tmp_path / "f.parquet")) == 12
    assert (tmp_path / "f.png").stat().st_size > 5000

    code, said, _ = bsat(
        "backtest", "load.csv", "--model", "model", "--windows", 3, "--level", 80, "--out", "b.csv", "--plot", "b.png"
    )
    assert code == 0
    table = pd.read_csv(tmp_path / "b.csv")
    assert list(table) == ["date", "cutoff", "y", "BSAT", "BSAT-lo-80", "BSAT-hi-80"]
    assert len(table) == 36
    rmse = float(np.sqrt(((table["y"] - table["BSAT"]) ** 2).mean()))
    assert f"{rmse:.4g}" in said.splitlines()[4]
    _, said, _ = bsat("backtest", "load.csv", "--model", "model", "--windows", 3, "--json", "--level", 80)
    found = json.loads(said)
    assert found["all"]["rmse"] == pytest.approx(rmse, rel=1e-6)
    assert 0 <= found["all"]["coverage-80"] <= 1
    assert len(found["cutoffs"]) == 3


def test_backtest_trains_without_a_model(bsat, load, tmp_path):
    _, said, err = bsat("backtest", "load.csv", *SMALL, "--windows", 2, "--refit", "--json", "--tokenizer", "uds")
    assert json.loads(said)["name"] == "UDS"
    assert err == ""
    assert [p.name for p in tmp_path.iterdir()] == ["load.csv"]


def test_fit_says_json(bsat, load):
    _, said, err = bsat("fit", "load.csv", "--out", "model", *SMALL, "--json")
    found = json.loads(said)
    assert err == ""
    assert found["epochs"] == 2
    assert set(found["scores"]) == {"val", "test", "last value", "seasonal naive"}
    assert found["scores"]["test"]["windows"] == 120 - 60 + 1


def test_a_killed_training_is_resumed(bsat, load, tmp_path):
    """kill -9 in the middle, then --resume: the model of a training never stopped."""
    words = ["fit", "load.csv", "--out", "model", *map(str, SMALL[:-1]), "--epochs", "40"]
    whole = [*words]
    whole[3] = "whole"
    assert bsat(*whole, "--quiet")[0] == 0
    child = subprocess.Popen(
        [sys.executable, "-m", "bsat", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    state = tmp_path / "model" / "training.safetensors"
    try:
        wait_until(lambda: child.poll() is not None or state.exists())
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert state.exists()
    assert not (tmp_path / "model" / "config.json").exists()
    code, _, err = bsat(*words, "--quiet", "--resume", "--seed", 1)
    assert code == 2
    assert "other settings" in err
    assert bsat(*words, "--quiet", "--resume")[0] == 0
    assert not state.exists()
    resumed, never = (Forecaster.load(tmp_path / name) for name in ("model", "whole"))
    pd.testing.assert_frame_equal(resumed.predict(level=[80]), never.predict(level=[80]), check_exact=True)


def test_a_training_whose_model_was_not_saved_is_not_done_again(bsat, load, tmp_path, monkeypatch):
    """Stopped after its last epoch, while it is scored."""
    words = ["fit", "load.csv", "--out", "model", *SMALL]

    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Forecaster, "_calibrate", press)
    assert bsat(*words)[0] == 130
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, _, err = bsat(*words)
    assert code == 2
    assert "or whose model was not saved. Go on with --resume, or delete that file to start anew." in err
    monkeypatch.setattr(loop._Plain, "run_epoch", press)  # nothing is trained any more
    assert bsat(*words, "--resume")[0] == 0
    assert not (tmp_path / "model" / "training.safetensors").exists()


def test_the_way_out_is_told_as_an_option(bsat, tmp_path):
    make_long(a=400, s=20).to_csv(tmp_path / "two.csv", index=False)
    code, _, err = bsat("fit", "two.csv", "--out", "m", "--lookback", "48", "--horizon", "12")
    assert code == 2
    assert "'s' (20). Shorten --lookback or --horizon, or pass --drop-short" in err


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["fit", "nowhere.csv", "--out", "m"], "does not exist"),
        (["fit", "load.csv", "--out", "load.csv"], "is a file"),
        (["fit", "load.csv", "--out", "m", "--horizon", "0"], "--horizon must be at least 1"),
        (["fit", "load.csv", "--out", "m", "--encoding", "sinus"], "--encoding must be one of"),
        (["fit", "load.csv", "--out", "m", "--tokenizer", "bpe"], "--tokenizer` must be one of"),
        (["fit", "load.csv", "--out", "m", "--target-col", "note"], "must hold numbers"),
        (["fit", "load.csv", "--out", "m", "--target-col", "T"], "--target-col must name a column"),
        (["fit", "load.csv", "--out", "m"], "lookback + horizon = 912"),
        (["fit", "load.csv", "--out", "m", "--device", "cuda:99"], "CUDA"),
        (["predict", "nowhere"], "does not exist"),
        (["predict", "."], "config.json"),
        (["backtest", "load.csv", "--windows", "0"], "--windows must be at least 1"),
        (["backtest", "load.csv", "--plot", "b.gif"], "must end in"),
        (["backtest", "load.csv", "--out", "folder.csv"], "is a folder"),
        (["backtest", "load.csv", "--model", "m", "--horizon", "9"], "--horizon cannot be given with --model"),
        (["fit", "load.csv", "--out", "taken"], "is not bsat's"),
        (["fit", "semicolons.csv", "--out", "m"], "separated by commas"),
        (["fit", "bare.csv", "--out", "m"], "must have a header line"),
        (["fit", "load.csv", "--out", "m", "--id-col", "note", "--lookback", "599"], "Shorten --lookback or"),
    ],
)
def test_mistakes_with_forecasts(bsat, load, tmp_path, words, match):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text('{"mine": 1}')
    (tmp_path / "semicolons.csv").write_text("ds;y\n2024-01-01;1,5\n")
    load[["date", "OT"]].to_csv(tmp_path / "bare.csv", index=False, header=False)
    code, _, err = bsat(*words)
    assert code == 2
    assert err.startswith("bsat: ")
    assert match in err
    assert err.count("\n") == 1
    assert not (tmp_path / "m" / "config.json").exists()
    assert (tmp_path / "taken" / "config.json").read_text() == '{"mine": 1}'


@pytest.mark.filterwarnings("always:no picture")
@pytest.mark.parametrize("name", ["indexed.csv", "numbers.csv", "gaps.csv", "dollar.csv"])
def test_files_as_people_have_them(bsat, load, tmp_path, name):
    table = load[["date", "OT"]].copy()
    words = []
    if name == "indexed.csv":  # with the index that pandas writes
        table.to_csv(tmp_path / name)
    elif name == "numbers.csv":  # days as 20260101
        table["date"] = pd.date_range("2024-01-01", periods=600, freq="D").strftime("%Y%m%d").astype(int)
        table.to_csv(tmp_path / name, index=False)
    elif name == "gaps.csv":  # so many of them in the last window that no picture can be drawn
        table.drop(index=range(540, 585)).to_csv(tmp_path / name, index=False)
        words = ["--gaps", "fit"]
    else:
        table.assign(unique_id="cost_$a_{$").to_csv(tmp_path / name, index=False)
    code, said, err = bsat("fit", name, "--out", "m", *SMALL, *words)
    assert code == 0, err
    assert re.search(r"^BSAT +[\d.]+", said, re.M)
    assert (tmp_path / "m" / "forecast.png").exists() == (name != "gaps.csv")
    assert ("no picture" in err) == (name == "gaps.csv")
    assert not (tmp_path / "m" / "training.safetensors").exists()
    first = pd.read_csv(io.StringIO(bsat("predict", "m")[1]))["date"].iloc[0]
    assert first == ("2025-08-23" if name == "numbers.csv" else "2026-01-26 00:00:00")


def test_ids_match_from_any_file(bsat, load, tmp_path):
    """A series that the model knows is scaled as in training: with an id of another kind it would be unknown."""
    two = pd.concat([load[["date", "OT"]].assign(shop=n, OT=load["OT"] * n) for n in (1, 22)])
    two.to_csv(tmp_path / "two.csv", index=False)
    two.to_parquet(tmp_path / "two.parquet")
    for model, file in (("text", "two.csv"), ("numbers", "two.parquet")):
        assert bsat("fit", file, "--out", model, *SMALL, "--id-col", "shop")[0] == 0
        known = Forecaster.load(tmp_path / model)
        assert set(known.ids_) == ({"1", "22"} if model == "text" else {1, 22})
        want = bsat("predict", model)[1]
        assert bsat("predict", model, "two.csv")[1] == bsat("predict", model, "two.parquet")[1] == want
        assert bsat("backtest", "two.csv", "--model", model, "--windows", 2, "--quiet")[0] == 0


def test_a_model_reads_what_it_was_fitted_from(bsat, load, tmp_path):
    days = pd.date_range("2024-01-01", periods=600, freq="D").strftime("%Y%m%d").astype(int)
    table = load[["OT"]].assign(day=days)
    table.to_csv(tmp_path / "days.csv", index=False)
    table.rename(columns={"day": "ds"}).to_csv(tmp_path / "renamed.csv", index=False)
    assert bsat("fit", "days.csv", "--out", "m", *SMALL)[0] == 0
    assert bsat("predict", "m", "days.csv")[1] == bsat("predict", "m")[1]
    assert bsat("backtest", "days.csv", "--model", "m", "--windows", 2, "--quiet")[0] == 0
    code, _, err = bsat("predict", "m", "renamed.csv")
    assert code == 2
    assert "renamed.csv must have the column 'day', which the model was fitted with; it has OT, ds. Rename" in err
    assert "--time-col" not in err


def test_without_a_test_fold(bsat, load):
    code, said, _ = bsat("fit", "load.csv", "--out", "m", *SMALL, "--no-test")
    assert code == 0
    assert "BSAT: validation RMSE" in said


def test_a_model_is_not_backtested_on_what_it_learned(bsat, load):
    bsat("fit", "load.csv", "--out", "m", *SMALL)
    code, _, err = bsat("backtest", "load.csv", "--model", "m", "--windows", 30)
    assert code == 2
    assert "must come after what the model learned from" in err


def test_cache(bsat, series, tmp_path):
    BSplineTokenizer(24).transform_series(series, 240, 10, cache=tmp_path / "c")
    assert "1 files" in bsat("cache", "--dir", "c")[1]
    assert "deleted 1 files" in bsat("cache", "--dir", "c", "--clear")[1]
    assert "0 files" in bsat("cache", "--dir", "c")[1]


def test_version(bsat):
    assert bsat("--version")[1].strip() == f"bsat {__version__}"


@pytest.mark.parametrize(
    "code",
    [
        "import bsat",
        "import bsat.cli",
        "import sys; sys.argv = ['bsat', '--help']; import bsat.cli; bsat.cli.app(standalone_mode=False)",
    ],
)
def test_import_and_help_stay_light(code):
    """Neither torch nor numba, nor anything else that takes its time."""
    heavy = "{'torch', 'numba', 'pandas', 'matplotlib', 'scipy', 'sklearn'}"
    program = f"{code}\nimport sys\nloaded = {heavy} & set(sys.modules)\nassert not loaded, loaded"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_tokens_of_arrays_need_no_torch():
    program = (
        "import numpy as np, sys, bsat\n"
        "bsat.BSplineTokenizer(24).transform(np.sin(np.arange(240.0))[None])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_unknown_names_are_told():
    import bsat as package

    with pytest.raises(AttributeError, match="has no attribute 'Tokenizer'; it has BSplineTokenizer"):
        package.Tokenizer  # noqa: B018
    assert "BSplineTokenizer" in dir(package)
