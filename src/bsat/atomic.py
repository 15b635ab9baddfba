"""Files appear whole or not at all, and what must not be done twice is done by one process at a time."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

_WRITING = ".bsat-writing-"


def whole(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder by a pattern of their names, in order; not those that someone is writing or left half
    written, which `Path.glob` finds as well."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith(_WRITING))


def leftovers(folder: Path, stem: str = "", *, age: float = 0) -> Iterator[Path]:
    """What killed writers of files whose names begin with ``stem`` left in a folder, never read by anyone: those that
    nobody has touched for ``age`` seconds, as a younger one may be someone's work."""
    for path in folder.glob(f"{_WRITING}{escape(_cut(stem))}*"):
        with suppress(FileNotFoundError):  # another process may be clearing
            if time.time() - path.stat().st_mtime >= age:
                yield path


@contextmanager
def replacing(path: os.PathLike[str] | str, *, keep: bool = False, sync: bool = False) -> Iterator[Path]:
    """A temporary path beside ``path``, with its suffix, that takes its place if the block ends well; with ``keep``
    only if nobody else has been quicker, with ``sync`` only once the disk has it, so that it outlives a power cut."""
    path = Path(path)
    temporary = path.with_name(f"{_WRITING}{_cut(path.stem)}-{secrets.token_hex(6)}{path.suffix}")
    temporary.touch(exist_ok=False)  # with the permissions of any new file, which `tempfile` would not give
    try:
        yield temporary
        if sync:
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
        if not keep or not _link(temporary, path):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_tensors(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """All torch tensors or all arrays, as safetensors. A full disk is an OSError here, as of any other file."""
    from safetensors import SafetensorError

    kind = "numpy" if all(isinstance(a, np.ndarray) for a in tensors.values()) else "torch"
    try:
        import_module(f"safetensors.{kind}").save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{error}, at {path.parent}") from error


@contextmanager
def later_interrupt() -> Iterator[None]:
    """A Ctrl-C in here comes at the end: what must be done whole is."""
    ours = signal.getsignal(signal.SIGINT) is not None  # and not that of a program around Python
    if not ours or threading.current_thread() is not threading.main_thread():  # which alone hears of it
        yield
        return
    heard: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *args: heard.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard and callable(before):
        before(*heard[0])


def _cut(stem: str) -> str:
    """What of a name fits into another one, in the bytes that a file system counts."""
    return os.fsencode(stem)[:150].decode(errors="ignore")


def _link(temporary: Path, path: Path) -> bool:
    """Give a file its name unless that is taken; False if this file system knows no links."""
    try:
        os.link(temporary, path)  # unlike a rename, it never takes another's place
    except FileExistsError:
        pass
    except OSError:
        return False
    temporary.unlink()
    return True


@contextmanager
def alone(path: Path, name: str) -> Iterator[None]:
    """One process at a time works on what has this name, so whatever is under way when another begins has lost its
    process. The lock is a file beside the path, which goes with its last owner."""
    if sys.platform == "win32":  # where a file that is open cannot be deleted
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.parent / f".{path.name}.{name}.lock"
    file = take(lock)
    if file is None:
        raise BlockingIOError(f"{name} in {path.parent} is being worked on by another process. Wait for it.")
    with file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def take(path: Path) -> IO[bytes] | None:
    """The file of that name, made if there is none, open and for this process alone until it is closed; None while
    another has it. Where the file system has no locks, it is only opened."""
    import fcntl

    while True:
        with ExitStack() as stack:
            file = stack.enter_context(path.open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                    raise
            if is_at(path, file):  # else its last owner has just renamed it, or taken it away
                stack.pop_all()
                return file


def is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
