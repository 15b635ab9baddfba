"""A model's folder: tensors in safetensors, everything else in JSON, nothing pickled, nothing taken on trust."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from .atomic import later_interrupt, leftovers, replacing, save_tensors

FORMAT = 1
"""Raise it when older releases could not read the folder any more."""

READS = 4
"""Times that a folder is read: another process may be saving a model over it, and be between its two files."""

CONFIG, TENSORS = "config.json", "model.safetensors"


def write_folder(folder: os.PathLike[str] | str, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Both files are whole before either takes its place. Should the machine die between the two renames, the one does
    not vouch for the other, and the folder is refused rather than misread; Ctrl-C waits until both are done."""
    folder = Path(folder)
    check_target(folder)
    from . import __version__

    json.dumps(config, allow_nan=False)  # what cannot be written is told before anything is
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: a.detach().cpu().contiguous() for name, a in tensors.items()}
    for left in (*leftovers(folder, Path(TENSORS).stem, age=3600), *leftovers(folder, Path(CONFIG).stem, age=3600)):
        left.unlink(missing_ok=True)
    with later_interrupt(), replacing(folder / TENSORS) as new_tensors, replacing(folder / CONFIG) as new_config:
        save_tensors(tensors, new_tensors)
        whole = {"format": FORMAT, "bsat": __version__, **config, "files": {TENSORS: _digest(new_tensors.read_bytes())}}
        new_config.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def check_target(folder: Path) -> None:
    """Whether a model may be saved there: not over a file, nor over a config.json that is not ours."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"a model is saved as a folder; {folder} is a file. Choose another name.")
    path = folder / CONFIG
    if path.exists():
        try:
            ours = "bsat" in json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, RecursionError):
            ours = False
        if not ours:
            raise ValueError(f"{path} is not bsat's and would be overwritten. Choose another folder, or delete it.")


def read_folder(folder: os.PathLike[str] | str, *, links: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a folder that `write_folder` made; anything else is a ValueError.

    Args:
        folder: where they are.
        links: follow symbolic links out of the folder, as the cache of huggingface_hub needs.
    """
    folder = Path(folder)
    for _ in range(READS):
        config, path, content = _read_both(folder, links)
        if _digest(content) == config["files"][TENSORS]:
            break
        time.sleep(0.05)
    else:
        raise ValueError(
            f"{path} is not the file that was saved: its checksum differs from {CONFIG}'s. It is cut short, damaged or "
            f"was changed. Copy the folder again."
        )
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return config, load(content)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}. Refused.") from error


def _read_both(folder: Path, links: bool) -> tuple[dict[str, Any], Path, bytes]:
    config = _read_config(folder, links)
    files = config.get("files")
    if not isinstance(files, dict) or TENSORS not in files:
        raise ValueError(
            f"{folder / CONFIG} does not vouch for {TENSORS}. It is not a saved forecaster, or was edited."
        )
    for name in files:
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", "..") or "\\" in name:
            raise ValueError(f"{folder / CONFIG} names the file {name!r}, which is not inside the folder. Refused.")
    path = _inside(folder, TENSORS, links)
    content = path.read_bytes()
    if content[:1] == b"\x80" or content[:2] == b"PK":
        raise ValueError(
            f"{path} is a pickle (or a zip, as torch.save writes), not safetensors. Refused: pickles run code."
        )
    return config, path, content


def _read_config(folder: Path, links: bool) -> dict[str, Any]:
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"a saved forecaster is a folder; {folder} {kind}. Pass the folder that `save` wrote.")
    path = _inside(folder, CONFIG, links)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. The folder is damaged.") from error
    version = config.get("format") if isinstance(config, dict) else None
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"{path} is not that of a forecaster saved by bsat.")
    if version > FORMAT:
        raise ValueError(
            f"{folder} was saved by a newer bsat ({config.get('bsat')}, format {version}); this one reads up to format "
            f"{FORMAT}. Upgrade bsat."
        )
    return config


def _inside(folder: Path, name: str, links: bool) -> Path:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"a saved forecaster has a file {name}; {folder} has none. The folder is not whole.")
    if not links and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link that leads out of the folder, to {path.resolve()}. Refused.")
    return path


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
