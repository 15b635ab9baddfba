"""Fetching a file over HTTP, and one member of an archive: whole and checked, or not at all.

What has come of a download stays beside its target as `NAME.part` and is gone on with by the next call; it becomes the
target only after its size and hash are those asked for. Of processes that want the same target one downloads it; the
others wait, and find it. Knows nothing of the catalog.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, TYPE_CHECKING, Any

from ..atomic import is_at, take

if TYPE_CHECKING:
    import zipfile

BLOCK = 1 << 18
MOST = 4 << 30
"""The largest member that is unpacked where its size is not known beforehand: against archives made to fill a disk."""

PATIENCE = 600.0
"""Seconds for which another process may hold a part without a byte more: then it is stopped, or its machine is gone."""

Report = Callable[[int, int | None], None]
"""Bytes so far, and in all where that is known."""


class DownloadError(OSError):
    """A file could not be had, or is not the one that was asked for."""


class _CutError(Exception):
    """A failure after which another try may do better."""


class _GoneError(Exception):
    """An answer that will not change: another address may do better."""


# ---- the way of a file -----------------------------------------------------------------------------------------------


def fetch(
    addresses: Sequence[str],
    target: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    show: bool = True,
    tries: int = 4,
    pause: float = 1.0,
    timeout: float = 30.0,
) -> str:
    """Download `target` from the first of the addresses that has it, unless it is there; returns its sha256.

    Args:
        addresses: tried in turn where one answers that it has no such file.
        target: appears whole or not at all; `target.part` keeps what has come of it. One of the right size and hash, as
            another process may just have got it, is taken as it is.
        size: in bytes, if known.
        sha256: in hex, if known. A file with another is deleted.
        show: a bar with the time left, on the error stream.
        tries: failures in a row, none of which brought the file forward, after which to give up.
        pause: seconds before the second try; doubles with each.
        timeout: seconds without an answer that count as a failure.
    """
    with _folder_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            part = stack.enter_context(_own(target.with_name(target.name + ".part"), show))
            known = _hash_of_whole(target, size, sha256)
            if known is not None:
                return known
            report = stack.enter_context(progress(target.name, show))
            gone = []
            for address in addresses:
                try:
                    _persist(address, part, size, report, tries=tries, pause=pause, timeout=timeout)
                    break
                except _GoneError as answer:
                    gone.append(f"{address} ({answer})")
                except KeyboardInterrupt:
                    if show:
                        print(f"kept {part}; the same command goes on with it", file=sys.stderr)
                    raise
            else:
                raise DownloadError(f"{target.name} is not at {' nor at '.join(gone)}. The file may have moved.")
            digest = hash_file(part)
            try:
                check(part, address, size=size, sha256=sha256, digest=digest)
            except DownloadError:
                _truncate(part)
                raise
            _notes(part).unlink(missing_ok=True)
            os.replace(part, target)  # and nothing after it: a part of that name is another process's
    return digest


def _hash_of_whole(target: Path, size: int | None, sha256: str | None) -> str | None:
    """The hash of a target that is there and is the one asked for."""
    try:
        digest = hash_file(target)
        check(target, str(target), size=size, sha256=sha256, digest=digest)
    except OSError:  # a DownloadError is one
        return None
    return digest


def check(path: Path, origin: str, *, size: int | None, sha256: str | None, digest: str) -> None:
    """A DownloadError unless a file's size and hash are those that are known; names both."""
    _check(origin, path.stat().st_size, digest, size=size, sha256=sha256)


def _check(origin: str, got: int, digest: str, *, size: int | None, sha256: str | None) -> None:
    if size is not None and got != size:
        raise DownloadError(
            f"the file of {origin} must have {size:,} bytes and sha256 {sha256 or 'unknown'}; got {got:,} bytes and "
            f"{digest}. It was not used."
        )
    if sha256 is not None and digest != sha256:
        raise DownloadError(f"the file of {origin} must have sha256 {sha256}; got {digest}. It was not used.")


def hash_file(path: Path) -> str:
    """The sha256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- HTTP ------------------------------------------------------------------------------------------------------------


def _persist(
    address: str, part: Path, size: int | None, report: Report, *, tries: int, pause: float, timeout: float
) -> None:
    """Fill the part, going on after each failure where the last one stopped."""
    failures, furthest = 0, part.stat().st_size
    while True:
        try:
            return _transfer(address, part, size, report, timeout)
        except _CutError as cut:
            have = part.stat().st_size
            failures, furthest = (1, have) if have > furthest else (failures + 1, furthest)
            if failures >= tries:
                kept = f" {have:,} bytes are kept and gone on with by the next try." if have else ""
                raise DownloadError(f"{address} could not be read in {failures} tries: {cut}.{kept}") from cut
        time.sleep(pause * 2 ** (failures - 1))


def _transfer(address: str, part: Path, size: int | None, report: Report, timeout: float) -> None:
    """One request, for all of a file or for the rest of it. Returns when the part is whole."""
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    known = _remembered(part, address)  # None: a part of another address, if any, which this one may not have
    have = part.stat().st_size if known is not None else 0
    headers = {"User-Agent": "bsat (https://pypi.org/project/bsat)", "Accept-Encoding": "identity"}
    if have and known is not None:
        if known["total"] == have:
            return
        headers["Range"] = f"bytes={have}-"
        if known["tag"]:
            headers["If-Range"] = known["tag"]
    opener = urllib.request.build_opener(_safe_redirects())
    try:
        with opener.open(urllib.request.Request(address, headers=headers), timeout=timeout) as answer:
            if answer.headers.get_content_type() == "text/html":  # of a site that has no 404, or a network that logs in
                raise _GoneError("answers with a web page")
            start, total = _extent(answer)
            if start != have or (have and known is not None and known["total"] != total):
                have = 0  # the server knows no ranges, or the file is another by now
            if have == 0:
                _truncate(part)
                if start:
                    raise _CutError("the file changed on the server")
            if size is not None and total is not None and total != size:
                _truncate(part)
                raise DownloadError(
                    f"the file of {address} must have {size:,} bytes; the server offers {total:,}. It has changed."
                )
            if total is not None:
                _check_room(part.parent, total - have)
            _remember(part, address, total, answer.headers)
            with part.open("ab") as file:
                while block := answer.read1(BLOCK):  # what is there, so that a stop loses little
                    file.write(block)
                    have += len(block)
                    report(have, total)
            if total is not None and have != total:  # http.client takes an early end for the end
                if have > total:
                    _truncate(part)
                raise _CutError(f"the connection ended after {have:,} of {total:,} bytes")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            _truncate(part)
            raise _CutError("the server has no such range") from error
        if error.code >= 500 or error.code in (408, 425, 429):
            raise _CutError(f"HTTP {error.code} {error.reason}") from error
        raise _GoneError(f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _CutError(str(error.reason)) from error
    except (http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
        raise _CutError(str(error) or type(error).__name__) from error


def _extent(answer: Any) -> tuple[int, int | None]:
    """Where an answer starts in the file, and how long the file is."""
    length = answer.headers.get("Content-Length")
    if answer.status == 206:
        unit, _, span = answer.headers.get("Content-Range", "").partition(" ")
        place, _, total = span.partition("/")
        first = place.partition("-")[0]
        if unit != "bytes" or not first.isdigit():
            return -1, None  # an answer without sense: start anew
        return int(first), int(total) if total.isdigit() else None
    return 0, int(length) if length is not None and length.isdigit() else None


def _safe_redirects() -> Any:
    """Redirects that never leave https for http."""
    import urllib.error
    import urllib.request

    class Safe(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
            if req.full_url.startswith("https:") and not newurl.startswith("https:"):
                raise urllib.error.HTTPError(req.full_url, code, f"leads to {newurl}, which is not https", headers, fp)
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    return Safe()


# ---- the part --------------------------------------------------------------------------------------------------------


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _remember(part: Path, address: str, total: int | None, headers: Any) -> None:
    """What the part is of, so that it is never gone on with in another file."""
    tag = headers.get("ETag") or headers.get("Last-Modified")
    if tag and tag.startswith("W/"):  # If-Range takes no weak tags
        tag = None
    _notes(part).write_text(json.dumps({"address": address, "total": total, "tag": tag}))


def _remembered(part: Path, address: str) -> dict[str, Any] | None:
    try:
        known = json.loads(_notes(part).read_text())
        return known if known["address"] == address and {"total", "tag"} <= known.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _truncate(part: Path) -> None:
    os.truncate(part, 0)


def _forget(part: Path) -> None:
    """For who has the part: it goes last, as another may have the next one at once."""
    _notes(part).unlink(missing_ok=True)
    part.unlink(missing_ok=True)


@contextmanager
def _own(part: Path, show: bool) -> Iterator[Path]:
    """The part, for this process alone where the system has locks; an empty one is not left behind."""
    part.touch()
    with _lock(part, show) or nullcontext() as file:
        try:
            yield part
        finally:
            if (file is None or is_at(part, file)) and part.exists() and part.stat().st_size == 0:
                _forget(part)


def _lock(part: Path, show: bool) -> IO[bytes] | None:
    """The part, open, once no other process has it; where the file system has no locks, at once."""
    if sys.platform == "win32":  # where a file that is open cannot be renamed
        return None
    size, since = -1, 0.0
    while (file := take(part)) is None:
        if size < 0 and show:
            print(f"waiting for another process that is downloading to {part}", file=sys.stderr)
        have = 0
        with suppress(FileNotFoundError):  # it has just become the target
            have = part.stat().st_size
        if have != size:
            size, since = have, time.monotonic()
        elif time.monotonic() - since >= PATIENCE:
            raise DownloadError(
                f"{part} is being written by another process, which has added nothing for {PATIENCE:.0f} seconds. End "
                f"it (`fuser {part}` names it if it is on this machine), then try again."
            )
        time.sleep(0.1)
    return file


# ---- archives --------------------------------------------------------------------------------------------------------


@contextmanager
def unpacked(
    archive: Path, member: str, folder: Path, *, size: int | None = None, sha256: str | None = None, show: bool = True
) -> Iterator[tuple[IO[bytes], str]]:
    """One member of a zip, whole and checked, as an open file, and its sha256.

    The file takes room in `folder` but has no name there: nobody else can take it away, and it goes with its process,
    however that ends. The member may lie in a folder of the archive. An archive is refused as a whole if any of its
    members has an absolute name, climbs out, or is a link.
    """
    with ExitStack() as stack:
        with _folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(tempfile.TemporaryFile(prefix=".bsat-unpacked-", dir=folder))
        digest = _unpack(archive, member, file, folder, size=size, sha256=sha256, show=show)
        file.seek(0)
        yield file, digest


def _unpack(
    archive: Path, member: str, sink: IO[bytes], folder: Path, *, size: int | None, sha256: str | None, show: bool
) -> str:
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(archive) as content:
            info = _find_member(content, archive, member)
            if size is not None and info.file_size != size:
                raise DownloadError(
                    f"{member} in {archive} must have {size:,} bytes; it has {info.file_size:,}. It was not used."
                )
            if info.file_size > MOST:
                raise DownloadError(f"{member} in {archive} must not exceed {MOST:,} bytes; it has {info.file_size:,}.")
            with _folder_errors(folder):
                _check_room(folder, info.file_size)
                with content.open(info) as source, progress(member, show) as report:
                    digest = _copy(source, sink, info.file_size, report)
                sink.flush()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # or encrypted
        raise DownloadError(f"{archive} is not a zip that can be read: {error}. Delete it and get it again.") from error
    _check(f"{archive}, member {member},", sink.tell(), digest, size=info.file_size, sha256=sha256)
    return digest


def _find_member(content: zipfile.ZipFile, archive: Path, member: str) -> zipfile.ZipInfo:
    found = []
    for info in content.infolist():
        name = info.filename
        parts = PurePosixPath(name.replace("\\", "/")).parts
        absolute = parts[:1] == ("/",) or PureWindowsPath(name).drive
        if absolute or ".." in parts or stat.S_ISLNK(info.external_attr >> 16):
            raise DownloadError(
                f"{archive} must hold plain files inside its own folder; its member {name!r} is a link or leads "
                "elsewhere. Nothing was unpacked."
            )
        if not info.is_dir() and parts and parts[-1] == member:
            found.append(info)
    exact = [info for info in found if info.filename == member]
    if len(exact or found) != 1:
        raise DownloadError(f"{archive} must have one member of the name {member}; it has {len(found)}.")
    return (exact or found)[0]


def _copy(source: IO[bytes], sink: IO[bytes], total: int, report: Report) -> str:
    done, digest = 0, hashlib.sha256()
    while block := source.read(BLOCK):
        done += len(block)
        digest.update(block)
        sink.write(block)
        report(done, total)
    return digest.hexdigest()


# ---- disks and bars --------------------------------------------------------------------------------------------------


def _check_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(errno.ENOSPC, f"needs {need:,} bytes, {free:,} are free")


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    """Say of a full disk or a read-only folder which one it is, and what to do."""
    way = "Name another folder with the environment variable BSAT_DATASETS."
    try:
        yield
    except DownloadError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(f"the disk of {folder} is full ({error.strerror}). Make room, or: {way}") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise DownloadError(
                f"{folder} must be a folder that can be written to ({error.strerror}). {way}"
            ) from error
        raise


@contextmanager
def progress(label: str, show: bool) -> Iterator[Report]:
    """A bar with size, speed and time left, on the error stream."""
    if not show:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    if len(label) > 30:
        label = label[:14] + "…" + label[-15:]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(label, total=None)
    began = False

    def report(done: int, total: int | None) -> None:
        nonlocal began
        if not began:  # what was there before has not come at the speed of light
            began = True
            bar.reset(task, completed=done, total=total)
        bar.update(task, completed=done, total=total)

    with bar:
        yield report
