"""The command line, as a user calls it."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from bsat import BSplineTokenizer, __version__
from bsat.cli import main
from conftest import make_signals


@pytest.fixture
def bsat(monkeypatch, capsys, tmp_path):
    """Run `bsat WORDS...` in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["bsat", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


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
        (["tokenize", "s.csv", "--tokens", "3"], "`n_tokens` must be greater than degree + 1 = 4; got 3"),
        (["tokenize", "s.csv", "--lookback", "5000"], "`lookback` must not exceed the length of `series` = 1500"),
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


def test_demo(bsat, tmp_path):
    code, said, _ = bsat("demo", "--out", "pictures")
    assert code == 0
    assert "35,040 samples" in said
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == ["diagnosis.png", "tokens.png"]


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
