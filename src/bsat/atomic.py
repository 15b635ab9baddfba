"""Files appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

_WRITING = ".bsat-writing-"


def whole(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder by a pattern of their names, in order; not those that someone is writing or left half
    written, which `Path.glob` finds as well."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith(_WRITING))


def leftovers(folder: Path, stem: str = "", *, age: float = 0) -> Iterator[Path]:
    """What killed writers of files whose names begin with ``stem`` left in a folder, never read by anyone: those that
    nobody has touched for ``age`` seconds, as a younger one may be someone's work."""
    for path in folder.glob(f"{_WRITING}{escape(stem)}*"):
        with suppress(FileNotFoundError):  # another process may be clearing
            if time.time() - path.stat().st_mtime >= age:
                yield path


@contextmanager
def replacing(path: os.PathLike[str] | str, *, keep: bool = False, sync: bool = False) -> Iterator[Path]:
    """A temporary path beside ``path``, with its suffix, that takes its place if the block ends well; with ``keep``
    only if nobody else has been quicker, with ``sync`` only once the disk has it, so that it outlives a power cut."""
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f"{_WRITING}{path.stem[:100]}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's own is for the owner alone
        if sync:
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
        if not keep or not _link(temporary, path):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
