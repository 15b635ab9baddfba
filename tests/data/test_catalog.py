"""The catalog: what it says of the datasets, and tiny files in the formats of the real ones."""

import hashlib
import json
import os
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bsat.data import CATALOG, SHIPPED, DownloadError, catalog, download, find_dataset, load, load_shipped
from bsat.data.catalog import File, describe, find_source, format_catalog, how_to_get, whereabouts

REAL = [d for d in CATALOG.values() if d.role != "shipped"]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """An empty BSAT_DATA and an empty folder of downloads."""
    mine, cache = tmp_path / "mine", tmp_path / "cache"
    mine.mkdir()
    monkeypatch.setenv("BSAT_DATA", str(mine))
    monkeypatch.setenv("BSAT_DATASETS", str(cache))
    return mine, cache


@pytest.fixture
def no_download(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing should be downloaded")

    monkeypatch.setattr(catalog, "fetch", refuse)


def sha(data):
    return hashlib.sha256(data).hexdigest()


def tiny(name):
    """A file like the dataset's own, and the stamps and values that should come of it."""
    rng = np.random.default_rng(len(name))
    if name == "etth1":
        stamps, y = pd.date_range("2016-07-01", periods=50, freq="h"), rng.normal(20, 5, 50)
        rows = [f"{s:%Y-%m-%d %H:%M:%S},1.5,{v!r}" for s, v in zip(stamps, y.tolist(), strict=True)]
        return "\n".join(["date,HUFL,OT", *rows, ""]), stamps, y
    if name.startswith("alabama"):
        stamps, y = pd.date_range("2006-01-01", periods=90, freq="5min"), rng.uniform(0, 38, 90).round(1)
        rows = [f"{s:%m/%d/%y %H:%M},{v}" for s, v in zip(stamps, y.tolist(), strict=True)]
        return "\n".join(["LocalTime,Power(MW)", *rows, ""]), stamps[::3], y.reshape(30, 3).mean(1)
    if name == "ecl":
        stamps, y = pd.date_range("2011-01-01 00:15", periods=80, freq="15min"), rng.uniform(0, 3e3, 80)
        y[:3] = 0.0, 7.0, 1e-3
        rows = [
            f'"{s:%Y-%m-%d %H:%M:%S}";0;{repr(v).replace(".", ",") if v != int(v) else int(v)};1,25'
            for s, v in zip(stamps, y.tolist(), strict=True)
        ]
        return "\n".join(['"";"MT_001";"MT_320";"MT_370"', *rows, ""]), stamps[:60], y[:60]
    stamps, y = pd.date_range("2011-01-01", periods=49, freq="h"), rng.uniform(900, 2e3, 49)
    rows = [f"{s:%Y-%m-%d},{s.hour},{v!r}" for s, v in zip(stamps, y.tolist(), strict=True)]
    return "\n".join(["date,hour,MT_200", *rows, ""]), stamps[:48], y[:48]


@pytest.fixture
def entry(monkeypatch):
    """Put a tiny version of an entry into the catalog; returns its text, and what should come of it."""

    def make(name, **changes):
        text, ds, y = tiny(name)
        old = CATALOG[name]
        known = File(old.file.name, len(text), sha(text.encode())) if old.file.sha256 else File(old.file.name)
        recipe = replace(old.recipe, rows=len(y)) if old.recipe.rows else old.recipe
        values = {"file": known, "length": len(y), "recipe": recipe} | changes
        if old.archive is not None:
            values.setdefault("archive", File(old.archive.name))
        monkeypatch.setitem(CATALOG, name, replace(old, **values))
        return text, ds, y

    return make


def check(frame, name, ds, y):
    assert list(frame.columns) == ["unique_id", "ds", "y"]
    assert (frame["unique_id"] == name).all()
    assert frame["ds"].tolist() == list(ds)
    np.testing.assert_array_equal(frame["y"], y)
    assert frame["y"].dtype == np.float64


# ---- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", CATALOG.values(), ids=lambda d: d.name)
def test_entries_are_whole(dataset):
    assert dataset.role in ("paper", "stand-in", "shipped")
    assert (dataset.stands_for in CATALOG) == (dataset.role == "stand-in")
    for text in (dataset.title, dataset.owner, dataset.licence, dataset.citation, dataset.preparation, dataset.unit):
        assert text
    assert all(a.startswith("https://") and a.endswith(dataset.source.name) for a in dataset.addresses)
    assert dataset.addresses or dataset.role != "paper"
    for file in (dataset.file, dataset.archive):
        assert file is None or file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)
    assert all(windows == samples - 720 - 192 + 1 for samples, windows in dataset.folds().values())
    json.dumps(dataset.to_dict())


def test_shipped_series_are_as_said():
    for name in SHIPPED:
        frame = load(name)
        pd.testing.assert_frame_equal(frame, load_shipped(name))
        assert len(frame) == CATALOG[name].length
        assert CATALOG[name].unit == SHIPPED[name].unit


@pytest.mark.parametrize(("name", "near"), [("ETH1", "etth1"), ("alabama", "alabama-pv"), ("electricity", None)])
def test_an_unknown_name(name, near):
    with pytest.raises(ValueError, match=f"one of etth1, alabama-pv, ecl, .*household; got '{name}'") as told:
        find_dataset(name)
    assert (f"Did you mean {near}?" in str(told.value)) if near else ("Did you" not in str(told.value))


def test_names_may_be_written_as_in_the_paper():
    assert find_dataset("ETTh1") is CATALOG["etth1"]
    assert find_dataset("ECL") is CATALOG["ecl"]


def test_tables_fit_a_terminal(folders):
    assert max(map(len, format_catalog().splitlines()[:-1])) <= 80
    for dataset in CATALOG.values():
        for line in describe(dataset).splitlines():
            assert len(line) <= 80 or "http" in line


# ---- preparation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [d.name for d in REAL])
def test_preparation(folders, no_download, entry, name):
    text, ds, y = entry(name)
    (folders[0] / CATALOG[name].file.name).write_text(text)
    check(load(name), name, ds, y)
    assert sorted(p.name for p in folders[0].iterdir()) == [CATALOG[name].file.name]  # nothing is written there
    check(load(name), name, ds, y)  # from what is kept


def test_windows_line_ends_are_the_same(folders, no_download, entry):
    text, ds, y = entry("alabama-pv")
    (folders[0] / CATALOG["alabama-pv"].file.name).write_bytes(text.replace("\n", "\r\n").encode())
    check(load("alabama-pv"), "alabama-pv", ds, y)


@pytest.mark.parametrize("place", [0, 1])
def test_from_an_archive(folders, no_download, entry, place):
    folder, cache = folders[place], folders[1]
    text, ds, y = entry("ecl")
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / CATALOG["ecl"].archive.name, "w") as content:
        content.writestr("LD2011_2014.txt", text)
        content.writestr("other.txt", "x")
    check(load("ecl", verbose=False), "ecl", ds, y)
    assert not [p for p in cache.iterdir() if p.name.endswith(".txt")]  # the text does not stay
    assert (cache / "electricityloaddiagrams20112014.zip.sha256").exists()


def archive_of(name, text, folder):
    with zipfile.ZipFile(folder / CATALOG[name].archive.name, "w") as content:
        content.writestr(CATALOG[name].file.name, text)


def test_two_of_one_process_number_prepare_the_same_archive(folders, no_download, entry, monkeypatch):
    """As threads do, and processes of two containers: the second comes and goes while the first has its text."""
    text, ds, y = entry("ecl")
    archive_of("ecl", text, folders[0])
    prepare, frames = catalog._prepare, []

    def second_meanwhile(*arguments):
        monkeypatch.setattr(catalog, "_prepare", prepare)
        frames.append(load("ecl", verbose=False))
        return prepare(*arguments)

    monkeypatch.setattr(catalog, "_prepare", second_meanwhile)
    frames.append(load("ecl", verbose=False))
    assert len(frames) == 2
    for frame in frames:
        check(frame, "ecl", ds, y)


@pytest.mark.skipif(sys.platform == "win32", reason="the system deletes a killed process's files there")
@pytest.mark.parametrize("where", ["_copy", "_prepare"])
def test_who_is_killed_while_preparing_leaves_no_text(folders, no_download, entry, monkeypatch, where):
    text, ds, y = entry("ecl")
    archive_of("ecl", text, folders[0])
    seen = []

    def killed(*_):
        seen.extend(folders[1].iterdir())  # what a kill in this moment would leave
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(catalog if where == "_prepare" else download, where, killed)
        with pytest.raises(KeyboardInterrupt):
            load("ecl", verbose=False)
    assert seen == []
    check(load("ecl", verbose=False), "ecl", ds, y)


def test_what_others_left_half_written_goes(folders, no_download, entry):
    """Also where nothing is to be prepared; what is young may be at work."""
    text, ds, y = entry("etth1")
    (folders[0] / "ETTh1.csv").write_text(text)
    load("etth1")
    old, young = (folders[1] / f".bsat-writing-ecl-{name}.parquet" for name in ("old", "young"))
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    check(load("etth1"), "etth1", ds, y)
    assert not old.exists()
    assert young.exists()


def test_what_is_kept_is_not_parsed_again(folders, no_download, entry, monkeypatch):
    text, ds, y = entry("etth1")
    source = folders[0] / "ETTh1.csv"
    source.write_text(text)
    load("etth1")
    monkeypatch.setattr(catalog, "_prepare", None)
    monkeypatch.setattr(catalog, "hash_file", None)
    check(load("etth1"), "etth1", ds, y)
    source.unlink()
    assert whereabouts(CATALOG["etth1"]).endswith("etth1.parquet")
    check(load("etth1"), "etth1", ds, y)


def test_a_changed_source_is_prepared_anew(folders, no_download, entry):
    text, _, _ = entry("etth1", file=File("ETTh1.csv"))
    source = folders[0] / "ETTh1.csv"
    source.write_text(text)
    before = load("etth1")
    source.write_text(text.replace(",1.5,", ",1.25,"))
    with pytest.raises(DownloadError, match=r"as on first use; got .* delete .*ETTh1.csv.sha256"):
        load("etth1")
    (folders[1] / "ETTh1.csv.sha256").unlink()
    pd.testing.assert_frame_equal(load("etth1"), before)


def test_a_file_that_cannot_be_used_is_not_pinned(folders, no_download, entry):
    text, ds, y = entry("alabama-pv")
    source = folders[0] / CATALOG["alabama-pv"].archive.name
    source.write_text("no zip")
    with pytest.raises(DownloadError, match="not a zip"):
        load("alabama-pv", verbose=False)
    with zipfile.ZipFile(source, "w") as content:
        content.writestr(f"al-pv-2006/{CATALOG['alabama-pv'].file.name}", text)
    check(load("alabama-pv", verbose=False), "alabama-pv", ds, y)
    assert sorted(p.name for p in folders[1].iterdir()) == [
        "Actual_35.05_-87.65_2006_DPV_38MW_5_Min.csv.sha256",
        "al-pv-2006.zip.sha256",
        "alabama-pv.parquet",
    ]


def test_a_damaged_kept_file_is_made_again(folders, no_download, entry):
    text, ds, y = entry("etth1")
    (folders[0] / "ETTh1.csv").write_text(text)
    load("etth1")
    kept = folders[1] / "etth1.parquet"
    whole = kept.read_bytes()
    for broken in (b"PAR1 nonsense", whole[:20] + bytes(100) + whole[120:], b""):
        kept.write_bytes(broken)
        check(load("etth1"), "etth1", ds, y)


def test_another_recipe_prepares_anew(folders, no_download, entry):
    text, ds, y = entry("etth1")
    (folders[0] / "ETTh1.csv").write_text(text)
    load("etth1")
    recipe = replace(CATALOG["etth1"].recipe, value="HUFL")
    CATALOG["etth1"] = replace(CATALOG["etth1"], recipe=recipe)  # `entry` puts the old one back
    check(load("etth1"), "etth1", ds, np.full(len(y), 1.5))


def test_a_folder_that_cannot_be_written_to(folders, no_download, entry):
    text, ds, y = entry("etth1")
    (folders[0] / "ETTh1.csv").write_text(text)
    folders[1].write_text("a file")
    with pytest.warns(RuntimeWarning, match="could not be kept in .*BSAT_DATASETS"):
        check(load("etth1"), "etth1", ds, y)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.replace(",OT", ",XY"), "no column 'OT'"),
        (lambda t: "\n".join(t.splitlines()[:-1]), "must have 50 rows, .*has 49"),
        (
            lambda t: "\n".join([*t.splitlines()[:10], *t.splitlines()[11:], t.splitlines()[10]]),
            "every 60 minutes, .*2 at another step",
        ),
        (lambda t: re.sub(r"1\.5,.*\n", "1.5,\n", t, count=1), "1 empty"),
        (lambda t: t.replace("2016-07-01 00", "someday 00"), "cannot be read as the source of etth1"),
        (lambda t: "", "cannot be read as the source of etth1"),
    ],
)
def test_another_file_is_told(folders, no_download, entry, change, match):
    text, _, _ = entry("etth1", file=File("ETTh1.csv"))
    (folders[0] / "ETTh1.csv").write_text(change(text))
    with pytest.raises(ValueError, match=match):
        load("etth1")


def test_checksums_of_what_users_have(folders, no_download, entry):
    text, _, _ = entry("etth1")
    source = folders[0] / "ETTh1.csv"
    source.write_text(text[:-5] + "1234\n")
    with pytest.raises(DownloadError, match=f"must have sha256 {sha(text.encode())}; got {sha(source.read_bytes())}"):
        load("etth1")
    assert source.exists()  # it is theirs


def test_a_damaged_download_is_deleted(folders, no_download, entry):
    text, _, _ = entry("etth1")
    folders[1].mkdir()
    (folders[1] / "ETTh1.csv").write_text(text[:-5])
    with pytest.raises(DownloadError, match=r"got .* It is deleted; `bsat data get etth1` gets it again"):
        load("etth1")
    assert find_source(CATALOG["etth1"]) is None


# ---- downloads -------------------------------------------------------------------------------------------------------


def test_what_is_not_at_hand_is_downloaded(folders, entry, monkeypatch):
    text, ds, y = entry("etth1")
    asked = []

    def fetch(addresses, target, *, size, sha256, show):
        asked.append((addresses, size, sha256))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    monkeypatch.setattr(catalog, "fetch", fetch)
    with pytest.raises(FileNotFoundError, match=r"etth1 is not at hand. `bsat data get etth1` downloads it"):
        load("etth1", download=False)
    check(load("etth1"), "etth1", ds, y)
    check(load("etth1"), "etth1", ds, y)
    assert asked == [(CATALOG["etth1"].addresses, len(text), sha(text.encode()))]
    assert whereabouts(CATALOG["etth1"]) == str(folders[1] / "ETTh1.csv")


def test_a_pinned_hash_is_asked_for(folders, entry, monkeypatch):
    entry("alabama-pv")
    folders[1].mkdir()
    (folders[1] / "al-pv-2006.zip.sha256").write_text("abc  al-pv-2006.zip\n")

    def fetch(addresses, target, *, size, sha256, show):
        raise DownloadError(f"must have sha256 {sha256}; got other.")

    monkeypatch.setattr(catalog, "fetch", fetch)
    with pytest.raises(DownloadError, match=r"must have sha256 abc; .*if the change is meant, delete .*zip.sha256"):
        load("alabama-pv")


def test_without_a_network_it_is_said_what_to_do(folders, monkeypatch):
    def fetch(*_, **__):
        raise DownloadError("no way.")

    monkeypatch.setattr(catalog, "fetch", fetch)
    with pytest.raises(DownloadError, match="BSAT_DATA") as told:
        load("ecl")
    for part in (
        "no way.",
        "LD2011_2014.txt",
        "electricityloaddiagrams20112014.zip",
        "https://archive",
        "d51565f2cb5a",
    ):
        assert part in str(told.value)
    with pytest.raises(FileNotFoundError, match=r"is not at hand. Without a network: put LD_MT200_hour.csv"):
        load("ecl-mt200-hourly")
    assert "pinned on first use" in how_to_get(CATALOG["alabama-pv"])


def test_a_folder_that_is_none_is_told(monkeypatch):
    monkeypatch.setenv("BSAT_DATA", "/no/such/folder")
    with pytest.raises(ValueError, match="BSAT_DATA must name a folder; /no/such/folder is none"):
        load("etth1")


# ---- commands --------------------------------------------------------------------------------------------------------


def test_data_list(folders, bsat):
    code, out, _ = bsat("data", "list")
    assert code == 0
    assert all(name in out for name in CATALOG)
    assert "261 MB to get" in out
    code, out, _ = bsat("data", "list", "--json")
    listed = json.loads(out)["datasets"]
    assert [d["name"] for d in listed] == list(CATALOG)
    assert listed[0]["folds"]["train"] == {"samples": 10_452, "windows": 9_541}
    assert listed[0]["at_hand"] is None
    code, out, _ = bsat("data", "list", "ETTh1")
    assert "10,452 / 3,484 / 3,484 samples (train / val / test)" in out
    assert "9,541 / 2,573 / 2,573 (lookback 720, horizon 192)" in out
    code, _, err = bsat("data", "list", "ettm1")
    assert code == 2
    assert err.count("\n") == 1
    assert "Did you mean etth1?" in err


def test_data_get(folders, bsat, entry):
    text, _, _ = entry("etth1")
    (folders[0] / "ETTh1.csv").write_text(text)
    code, out, _ = bsat("data", "get", "etth1", "solar")
    assert code == 0
    assert f"etth1: 50 samples, one every hour, in °C; {folders[0] / 'ETTh1.csv'}" in out
    assert "solar: 35,040 samples, one every 15 minutes, in W/m²; inside the package" in out
    code, out, _ = bsat("data", "get", "etth1", "--json")
    assert json.loads(out)["datasets"][0]["rows"] == 50
    code, _, err = bsat("data", "get", "ecl-mt200-hourly")
    assert code == 2
    assert "put LD_MT200_hour.csv" in err


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    budget = "max_epochs=5, epoch_windows=2000"
    assert budget in code
    exec(code.replace(budget, "max_epochs=1, epoch_windows=64, d_model=8, verbose=False"), {})
    assert "BSAT-hi-80" in capsys.readouterr().out


def test_the_page_says_what_the_catalog_says():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for dataset in CATALOG.values():
        folds, windows = (" / ".join(f"{n:,}" for n in part) for part in zip(*dataset.folds().values(), strict=True))
        assert re.search(rf"\| `{re.escape(dataset.name)}` \|.*\| {dataset.length:,} \| {folds} \| {windows} \|", page)
        assert dataset.licence.partition(" (")[0] in page
        for file in (dataset.file, dataset.archive):
            assert file is None or dataset.role == "shipped" or f"`{file.name}`" in page
