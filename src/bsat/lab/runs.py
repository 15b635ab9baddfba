"""Runs, kept: an append-only store in a folder, one line of JSON a record.

    protocol.json                        what all runs of the folder share; a store has one protocol
    runs-HOST-PID-RANDOM.jsonl           one file for each process that writes, so that writers never meet
    runs-packed.jsonl.xz                 what `pack` made of another store, to publish
    naive-DATASET.json                   test scores of forecasts that learn nothing

A line is written by one `os.write` and an fsync, and ends with a checksum. A writer that is killed leaves at most one
torn line, the last of its file, which readers recognise and pass over; who comes next writes to a file of their own.
Nothing is ever changed in place: test scores, which come after the selection, are records of their own.

    pandas.read_json(path, lines=True)

reads a file as it stands; `read` reads a folder, checks it, and sets test scores beside their runs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import math
import os
import platform
import re
import secrets
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import leftovers, replacing
from ..tokens.door import check_choice, to_whole
from .protocol import SHORT, Experiment, Protocol

if TYPE_CHECKING:
    import pandas as pd

    from ..train.settings import History

FORMAT = 1
"""Of the records. Raise it whenever old readers would misread new records."""
STATUSES = ("finished", "halved", "failed")
METRICS = ("rmse", "mae", "mse", "smape")
REASONS = ("selected", "spread")
"""Why a run is scored on the test fold: the protocol selected it, or the heatmap of spreads asks for all runs."""
CELL = ["dataset", "model", "tokens", "encoding"]
KEY = [*CELL, "seed", "trial"]
"""By which a run is known inside its store."""

PROTOCOL_FILE = "protocol.json"
PATTERNS = ("runs-*.jsonl", "runs-*.jsonl.xz")


class StoreError(OSError):
    """A store that cannot be read or written, or that is another protocol's.

    Attributes:
        line: the record that could not be written, as bytes; None if it is not about one.
        rescued: the file that it was written to instead; None if there was no room anywhere.
    """

    def __init__(self, message: str, line: bytes | None = None, rescued: Path | None = None) -> None:
        super().__init__(message)
        self.line, self.rescued = line, rescued


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trial that has come to its end.

    Args:
        experiment: what it is a trial of.
        seed: one of the protocol's.
        trial: its number in the search of that seed.
        configuration: what the search chose.
        status: "finished", "halved" (ended at a rung) or "failed".
        reason: why it ended; a failed one must say it.
        val: scores on the validation fold, `rmse` among them unless it failed.
        curve: columns of the epochs, e.g. `loss` and `val_rmse`.
        bases: of every epoch, the learned base of each layer; empty without L-RoPE.
        seconds: of training.
        memory: peak bytes on the device; None on a CPU.
        pack: how many trained beside it, itself included; memory and seconds are its share.
        device: in words.
        engine: that trained it.
    """

    experiment: Experiment
    seed: int
    trial: int
    configuration: Mapping[str, Any]
    status: str
    reason: str = ""
    val: Mapping[str, float] = field(default_factory=dict)
    curve: Mapping[str, Sequence[float]] = field(default_factory=dict)
    bases: Sequence[Sequence[float]] = ()
    seconds: float | None = None
    memory: int | None = None
    pack: int | None = None
    device: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        _check_key(self.experiment, self.seed, self.trial)
        check_choice(self.status, "status", STATUSES)
        if self.status == "failed":
            if not self.reason:
                raise ValueError("a failed run must say why; got an empty `reason`. Pass e.g. the error's text.")
        elif not _is_finite(self.val.get("rmse")):
            raise ValueError(
                f"`val` of a {self.status} run must hold a finite rmse, by which runs are selected; got "
                f"{dict(self.val)}. Pass status='failed' with a reason if it has none."
            )

    @classmethod
    def from_history(cls, history: History, *, val: Mapping[str, float] | None = None, **rest: Any) -> Run:
        """Status, reason, curve and bases from a training's history; `val` beside the best epoch's RMSE."""
        if history.stopped in ("", "interrupted"):
            raise ValueError("a run must have come to its end; this training was interrupted. Resume it first.")
        failed, epochs = history.best_epoch < 0, history.epochs  # one that diverged later has weights worth keeping
        curve = {name: [_short(getattr(epoch, name)) for epoch in epochs] for name in ("loss", "val_rmse")}
        best = {}
        if not failed:
            best = {"rmse": history.best.val_rmse, "scaled_rmse": history.best.val_scaled_rmse}
        return cls(
            status="failed" if failed else "halved" if history.stopped == "halved" else "finished",
            reason=f"{history.stopped} after {len(epochs)} epochs",
            val={**best, **(val or {})},
            curve=curve,
            bases=[[_short(base) for base in epoch.bases] for epoch in epochs] if any(e.bases for e in epochs) else [],
            **rest,
        )

    def to_dict(self) -> dict[str, Any]:
        """The record, but for time, versions and checksum."""
        return {
            **_head("trial", self.experiment, self.seed, self.trial),
            "status": self.status,
            "reason": self.reason,
            **{f"val_{name}": value for name, value in self.val.items()},
            "configuration": dict(self.configuration),
            "curve": dict(self.curve),
            "bases": self.bases,
            "seconds": self.seconds,
            "memory": self.memory,
            "pack": self.pack,
            "device": self.device,
            "engine": self.engine,
        }


def _check_key(experiment: Experiment, seed: int, trial: int) -> None:
    to_whole(trial, "trial", 0)
    if isinstance(seed, bool) or seed not in experiment.protocol.seeds:
        raise ValueError(
            f"`seed` must be one of the protocol's, {', '.join(map(str, experiment.protocol.seeds))}; got {seed!r}."
        )


def _head(kind: str, experiment: Experiment, seed: int, trial: int) -> dict[str, Any]:
    hashes = {"protocol": experiment.protocol.hash, "experiment": experiment.hash, "study": experiment.study}
    return {"kind": kind, "format": FORMAT, **hashes, **experiment.cell, "seed": seed, "trial": trial}


def _short(value: float) -> float:
    """Six digits, which is what single precision has to say."""
    return float(f"{value:.6g}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@cache
def versions() -> dict[str, str]:
    """Of what the numbers depend on; nothing is imported for it."""
    from importlib import metadata

    from .. import __version__

    found = {"bsat": __version__, "python": platform.python_version()}
    for name in ("numpy", "torch"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ---- lines -----------------------------------------------------------------------------------------------------------

_CHECK = re.compile(rb',"check":"([0-9a-f]{16})"\}\Z')


def encode(record: Mapping[str, Any]) -> bytes:
    """A line: JSON in ASCII, whose last field is the checksum of the rest; numbers that are not finite become null."""
    text = json.dumps(_plain(record, "record"), separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    return text[:-1] + b',"check":"' + _digest(text) + b'"}\n'


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line without its end; None if it is torn or damaged."""
    found = _CHECK.search(line)
    if found is None:
        return None
    text = line[: found.start()] + b"}"
    if _digest(text) != found[1]:
        return None
    record: dict[str, Any] = json.loads(text)
    return record


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def _plain(value: Any, name: str) -> Any:
    """What JSON knows, from what numpy and torch give."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"`{name}` must have names as keys; got {wrong[0]!r}. Use strings.")
        return {key: _plain(v, key) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, name) for v in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return _plain(value.tolist(), name)
    raise TypeError(
        f"`{name}` must hold numbers, words, lists and dicts; got {value!r} of type {type(value).__name__}."
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


class Store:
    """A folder of runs, open for writing. Made if it is not there; refused if it is another protocol's.

    What could go wrong with the folder goes wrong here, before anything is trained. Threads may share a store; a forked
    process gets a file of its own.
    """

    def __init__(self, folder: os.PathLike[str] | str, protocol: Protocol) -> None:
        self.folder, self.protocol = Path(folder), protocol
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._owner = 0
        self.path: Path | None = None
        """the file of this process"""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _claim(self.folder, protocol)
            self._open()
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"a store must be a folder that can be written to; {self.folder}: {error.strerror or error}. "
                "Nothing was run. Make it writable, make room, or name another folder."
            ) from error

    def add(self, run: Run) -> None:
        """Append a trial. When this returns, it is on the disk."""
        self.check(run.experiment)
        self._append(run.to_dict())

    def add_test(
        self, experiment: Experiment, seed: int, trial: int, scores: Mapping[str, float], why: str = "selected"
    ) -> None:
        """Append the test scores of a run: rmse, mae, mse and smape."""
        self.check(experiment)
        _check_key(experiment, seed, trial)
        check_choice(why, "why", REASONS)
        lacks = [name for name in METRICS if not _is_finite(scores.get(name))]
        if lacks:
            raise ValueError(
                f"test scores must hold finite {', '.join(METRICS)}; {lacks[0]} is {scores.get(lacks[0])!r}."
            )
        tests = {f"test_{name}": value for name, value in scores.items()}
        self._append({**_head("test", experiment, seed, trial), "why": why, **tests})

    def close(self) -> None:
        """Give the file back; one that stayed empty goes."""
        with self._lock:
            if self._handle is not None and self._owner == os.getpid():
                if os.fstat(self._handle).st_size == 0 and self.path is not None:
                    with suppress(OSError):
                        self.path.unlink()
                os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, experiment: Experiment) -> None:
        """Refuse what is of another protocol."""
        if experiment.protocol != self.protocol:
            raise StoreError(
                f"runs of a store must share its protocol {self.protocol.short}; got one of {experiment.protocol.short}"
                f" ({experiment.protocol.differences(self.protocol)}). Open a store of its own."
            )

    def _open(self) -> int:
        if self._handle is None or self._owner != os.getpid():  # a forked child must not share its parent's file
            self.path = self.folder / _file_name()
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
            self._owner = os.getpid()
            _sync_folder(self.folder)
        return self._handle

    def _append(self, record: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = encode({**record, "written": now, "versions": versions()})
        with self._lock:
            try:
                handle = self._open()
                start = os.fstat(handle).st_size
                try:
                    written = os.write(handle, line)
                    if written < len(line):
                        raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes could be written")
                    os.fsync(handle)
                except BaseException:
                    self._give_up(handle, start)
                    raise
            except OSError as error:
                raise self._not_written(error, line) from error

    def _give_up(self, handle: int, start: int) -> None:
        """After a torn line this file takes no more: whatever came next would be part of it."""
        with suppress(OSError):
            os.ftruncate(handle, start)
        with suppress(OSError):
            os.close(handle)
        self._handle = None

    def _not_written(self, error: OSError, line: bytes) -> StoreError:
        where, rescued = "There was no room for it elsewhere; it is the error's `line`.", None
        try:
            handle, name = tempfile.mkstemp(prefix="runs-rescued-", suffix=".jsonl")
            rescued = Path(name)
            try:
                if os.write(handle, line) < len(line):
                    raise OSError(errno.ENOSPC, "no room")
                os.fsync(handle)
            finally:
                os.close(handle)
            where = f"The record is in {rescued}: move that file into the store."
        except OSError:
            if rescued is not None:
                rescued.unlink(missing_ok=True)
                rescued = None
        return StoreError(
            f"a run could not be written to {self.folder}: {error.strerror or error}. What was there before is whole. "
            f"{where} Make room, and go on.",
            line,
            rescued,
        )


def _file_name() -> str:
    host = re.sub(r"[^A-Za-z0-9.]+", "_", platform.node())[:40] or "host"
    return f"runs-{host}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"


def write_naive(
    folder: os.PathLike[str] | str, protocol: Protocol, dataset: str, scores: Mapping[str, Mapping[str, float]]
) -> Path:
    """Test scores of naive forecasts, by name and metric; they depend on the dataset and the protocol alone. Returns
    the file."""
    kept = {name: {metric: float(own[metric]) for metric in METRICS} for name, own in scores.items()}
    content = {"format": FORMAT, "protocol": protocol.hash, "dataset": dataset, "scores": kept}
    path = naive_path(folder, dataset)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    return path


def naive_path(folder: os.PathLike[str] | str, dataset: str) -> Path:
    """Where a store has them."""
    return Path(folder) / f"naive-{dataset}.json"


def _sync_folder(folder: Path) -> None:
    """So that a new file's name outlives a power cut; not every system lets a folder be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _claim(folder: Path, protocol: Protocol) -> None:
    """Write down the protocol of a new store; of many who try at once one succeeds, and the others compare."""
    target = folder / PROTOCOL_FILE
    if not target.exists():
        content = {"format": FORMAT, "hash": protocol.hash, "protocol": protocol.to_dict()}
        with replacing(target, keep=True) as temporary, temporary.open("w", encoding="ascii") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(folder)
    _compare(folder, read_protocol(folder), protocol)


def _compare(folder: Path, found: Protocol, wanted: Protocol) -> None:
    if found != wanted:
        raise StoreError(
            f"{folder} must be a store of protocol {wanted.short}; it is one of {found.short} "
            f"({found.differences(wanted)}). Name another folder, or run with the store's protocol."
        )


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_protocol(folder: os.PathLike[str] | str) -> Protocol:
    """What all runs of a store share."""
    path = Path(folder) / PROTOCOL_FILE
    try:
        content = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise StoreError(
            f"{folder} must be a store of runs; it has no {PROTOCOL_FILE}. `bsat lab run` makes one."
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise StoreError(f"{path} must be JSON; it is damaged ({error}). Put it back from a copy.") from error
    try:
        if content["format"] > FORMAT:
            raise StoreError(
                f"{folder} was written by a newer bsat (format {content['format']}; this one reads {FORMAT}). Upgrade."
            )
        protocol = Protocol.from_dict(content["protocol"])
        whole = protocol.hash == content["hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} must describe a protocol; it does not: {error}.") from error
    if not whole:
        raise StoreError(
            f"{path} must have the hash of what it says, {protocol.short}; got {str(content['hash'])[:SHORT]}. "
            "It was changed by hand, or written by another version; put it back as it was."
        )
    return protocol


def read(folder: os.PathLike[str] | str, protocol: Protocol | None = None, *, curves: bool = True) -> pd.DataFrame:
    """All runs of a store, one row each, test scores beside them where there are any (else NaN).

    Rows come in the order of `KEY`, whoever wrote them. `spread` is the largest less the smallest of the learned bases
    at a run's end, NaN where none can be learned. Torn and damaged lines are passed over with a warning. Of
    records of one run, what finished or was halved goes before what failed, then the one written first; a warning says
    so if they differ.

    Args:
        folder: the store.
        protocol: refuse a store of another one.
        curves: with the columns `curve` and `bases`, which are most of a large store.
    """
    folder = Path(folder)
    found = read_protocol(folder)
    if protocol is not None:
        _compare(folder, found, protocol)
    runs: dict[tuple[Any, ...], dict[str, Any]] = {}
    tests: dict[tuple[Any, ...], dict[str, Any]] = {}
    records = sorted(
        _records(folder, found, curves), key=lambda r: (r.get("status") == "failed", r["written"], r["check"])
    )
    for record in records:
        key = tuple(record[name] for name in KEY)
        kept = (runs if record["kind"] == "trial" else tests).setdefault(key, record)
        if _content(kept) != _content(record) and record.get("status") != "failed":
            _warn(
                f"{folder} has two different {record['kind']} records of {_in_words(key)}; the first one written counts"
            )
    for key in tests.keys() - runs.keys():
        _warn(f"{folder} has test scores of {_in_words(key)}, but not the run; they are passed over")
    frame = _frame(runs, tests)
    return frame if curves else frame.drop(columns=["curve", "bases"])


def read_naive(folder: os.PathLike[str] | str) -> dict[str, dict[str, dict[str, float]]]:
    """The scores of `write_naive`, by dataset, name and metric; those of another protocol are passed over with a
    warning."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    protocol = read_protocol(folder)
    for path in sorted(Path(folder).glob(naive_path(folder, "*").name)):
        try:
            content = json.loads(path.read_text(encoding="ascii"))
            dataset, scores = content["dataset"], content["scores"]
            whole = content["protocol"] == protocol.hash
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} must hold scores of naive forecasts; it does not: {error!r}. Delete it."
            ) from error
        if whole:
            found[dataset] = scores
        else:
            _warn(f"{path} is of another protocol; it is passed over")
    return found


def _records(folder: Path, protocol: Protocol, curves: bool) -> Iterator[dict[str, Any]]:
    for path in sorted(path for pattern in PATTERNS for path in folder.glob(pattern)):
        try:
            content = path.read_bytes()
            if path.suffix == ".xz":
                content = lzma.decompress(content)
            elif content and not content.endswith(b"\n"):  # its writer may be at it
                time.sleep(0.05)
                content = path.read_bytes()
        except FileNotFoundError:  # its writer wrote nothing, and took it along just now
            continue
        except (OSError, lzma.LZMAError) as error:
            raise StoreError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        *lines, rest = content.split(b"\n")
        if rest:
            _warn(f"the last line of {path} is torn (its writer was killed, or is writing it now); it is passed over")
        for number, line in enumerate(lines, 1):
            record = decode(line)
            if record is None:
                _warn(f"line {number} of {path} is damaged: its checksum is wrong; it is passed over")
                continue
            if record["format"] > FORMAT:
                raise StoreError(f"{path} was written by a newer bsat (format {record['format']}). Upgrade.")
            if record["protocol"] != protocol.hash:
                raise StoreError(
                    f"all runs of {folder} must be of its protocol {protocol.short}; line {number} of {path.name} is "
                    f"of {record['protocol'][:SHORT]}. Move that file to a store of its own."
                )
            record["check"] = _digest(line).decode()  # an order for records of the same millisecond
            if not curves:
                record["curve"], record["bases"] = None, (record.get("bases") or [])[-1:]
            yield record


def _content(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("written", "why", "check")}


def _in_words(key: tuple[Any, ...]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(KEY, key, strict=True))


def _warn(text: str) -> None:
    warnings.warn(f"{text}.", RuntimeWarning, stacklevel=4)


def _frame(runs: dict[tuple[Any, ...], dict[str, Any]], tests: dict[tuple[Any, ...], dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for key in sorted(runs):
        test = {n: v for n, v in tests.get(key, {}).items() if n.startswith("test_") or n == "why"}
        rows.append({n: v for n, v in {**runs[key], **test}.items() if n not in ("kind", "format")})
    scores = [f"{fold}_{metric}" for fold in ("val", "test") for metric in METRICS]
    more = sorted({name for row in rows for name in row if name.startswith(("val_", "test_"))} - set(scores))
    rest = ["configuration", "curve", "bases", "seconds", "memory", "pack", "device", "engine", "versions", "written"]
    columns = [*KEY, "status", "reason", *scores, *more, "why", *rest, "experiment", "study", "protocol"]
    frame = pd.DataFrame(rows, columns=columns)
    spreads = [_spread(*of) for of in zip(frame["bases"], frame["configuration"], strict=True)]
    frame.insert(frame.columns.get_loc("why"), "spread", spreads)  # type: ignore[arg-type]
    numbers = [*scores, *more, "spread", "seconds", "memory", "pack"]
    return frame.astype(dict.fromkeys(numbers, "float64") | dict.fromkeys(("tokens", "seed", "trial"), "int64"))


def _spread(bases: Any, point: Any) -> float:
    """The largest less the smallest base when a run ended; NaN if none is learned. Heads of two numbers learn none: a
    single pair turns at frequency 1, whatever the base."""
    alone = isinstance(point, dict) and "n_heads" in point and point.get("d_model") == 2 * point["n_heads"]
    return max(bases[-1]) - min(bases[-1]) if isinstance(bases, list) and bases and not alone else math.nan


def select(runs: pd.DataFrame, k: int) -> pd.DataFrame:
    """The k best runs of every experiment and seed by validation RMSE, with their `rank` from 1 on.

    "For each seed, the best 5 runs by validation RMSE are selected" (Reproducibility). Runs that were halved have a
    validation RMSE and may be among them; failed ones may not. Of equals the earlier trial goes first.
    """
    good = runs[(runs["status"] != "failed") & runs["val_rmse"].notna()]
    best = good.sort_values([*CELL, "seed", "val_rmse", "trial"], kind="stable")
    rank = best.groupby([*CELL, "seed"]).cumcount() + 1
    return best.assign(rank=rank)[rank <= k].reset_index(drop=True)


def pack(folder: os.PathLike[str] | str, out: os.PathLike[str] | str) -> Path:
    """A small copy of a store in a new folder: one compressed file. Curves and the way of the bases stay for selected
    runs only, of the others the last bases; tables and figures are the same. Returns the file."""
    folder, out = Path(folder), Path(out)
    protocol = read_protocol(folder)
    beside = (folder / PROTOCOL_FILE, *sorted(folder.glob(naive_path(folder, "*").name)))
    if out.exists() and (not out.is_dir() or not _is_begun(out, beside)):
        raise StoreError(f"{out} must be a new or empty folder; it is not. Name another one.")
    chosen = select(read(folder, protocol, curves=False), protocol.selection)
    selected = set(zip(*(chosen[name] for name in KEY), strict=True))
    lines = []
    for record in _records(folder, protocol, curves=True):
        del record["check"]
        if record["kind"] == "trial" and tuple(record[name] for name in KEY) not in selected:
            record |= {"curve": {}, "bases": record["bases"][-1:]}
        lines.append((tuple(record[name] for name in KEY), record["kind"] != "trial", encode(record)))
    out.mkdir(parents=True, exist_ok=True)
    for path in beside:
        with replacing(out / path.name) as temporary:
            temporary.write_bytes(path.read_bytes())
    target = out / "runs-packed.jsonl.xz"
    with replacing(target) as temporary:
        content = b"".join(line for *_, line in sorted(lines))
        temporary.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    for left in leftovers(out):
        left.unlink(missing_ok=True)
    return target


def _is_begun(out: Path, beside: Sequence[Path]) -> bool:
    """Whether a folder holds nothing, or what a `pack` of the same store left that was killed before its end."""
    known = {path.name: path for path in beside}
    return all(
        path.name in known and path.read_bytes() == known[path.name].read_bytes()
        for path in set(out.iterdir()) - set(leftovers(out))
    )
