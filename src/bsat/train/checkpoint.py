"""The state of a training on disk, whole after every epoch: one safetensors file, no pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..atomic import leftovers, replacing, save_tensors

NAME = "training.safetensors"


class Checkpoint:
    """Weights, best weights, the optimizer's moments and the history so far, in a folder.

    Args:
        folder: where the file lies.
        fingerprint: of everything that shapes the training; a checkpoint of another one is refused.
        resume: go on from what is there; without it, an unfinished training is not overwritten but refused.
    """

    def __init__(self, folder: os.PathLike[str] | str, fingerprint: str, *, resume: bool) -> None:
        self.path = Path(folder) / NAME
        self.fingerprint = fingerprint
        self.resume = resume
        if not resume and self._unfinished():
            raise ValueError(
                f"{self.path} is a training that was not finished. Resume it, or delete that file to start anew."
            )
        for left in leftovers(self.path.parent, self.path.stem):  # of whoever was killed here
            left.unlink(missing_ok=True)

    def _unfinished(self) -> bool:
        """Whether there is a training whose end has not come; what cannot be read is none."""
        from safetensors import SafetensorError, safe_open

        if not self.path.is_file():
            return False
        try:
            with safe_open(self.path, "pt") as file:
                return not json.loads((file.metadata() or {}).get("history", "{}")).get("stopped")
        except (SafetensorError, ValueError):
            return False

    def save(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, best: dict[str, Tensor], history: dict[str, Any]
    ) -> None:
        """Whole or not at all."""
        tensors = {f"now.{name}": a for name, a in network.state_dict().items()}
        tensors |= {f"best.{name}": a for name, a in best.items()}
        for i, state in optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{key}": a for key, a in state.items()}
        tensors = {name: a.detach().cpu().contiguous().clone() for name, a in tensors.items()}
        meta = {"fingerprint": self.fingerprint, "history": json.dumps(history)}
        with replacing(self.path) as temporary:
            save_tensors(tensors, temporary, meta)

    def load(
        self, network: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Put weights and moments back; returns the best weights and the history, or None if there is nothing."""
        from safetensors import SafetensorError, safe_open

        if not self.resume or not self.path.is_file():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{self.path} is not a whole checkpoint ({error}). Delete it and train again, without resuming."
            ) from error
        if meta.get("fingerprint") != self.fingerprint:
            raise ValueError(
                f"{self.path} belongs to a training on other data or with other settings. "
                f"Train with the same ones, or without resuming, or into another folder."
            )

        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: a for name, a in tensors.items() if name.startswith(prefix)}

        network.load_state_dict(part("now."))
        state: dict[int, dict[str, Tensor]] = {}
        for name, a in part("adam.").items():
            i, key = name.split(".", 1)
            state.setdefault(int(i), {})[key] = a
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        device = next(network.parameters()).device
        return {name: a.to(device) for name, a in part("best.").items()}, json.loads(meta["history"])


def clear_checkpoint(folder: os.PathLike[str] | str) -> None:
    """The training is over."""
    (Path(folder) / NAME).unlink(missing_ok=True)
