"""Files appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEFTOVERS = ".bsat-writing-*"
"""What a killed writer may leave behind; never read by anyone."""


@contextmanager
def replacing(path: os.PathLike[str] | str, *, keep: bool = False) -> Iterator[Path]:
    """A temporary path beside ``path``, with its suffix, that takes its place if the block ends well; with ``keep``
    only if nobody else has been quicker."""
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=LEFTOVERS[:-1], suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's own is for the owner alone
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
