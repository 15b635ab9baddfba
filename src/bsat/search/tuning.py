"""A forecaster in, a better one out: the search for whoever has a frame and no laboratory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..forecaster import Forecaster
from .contract import Outcome, Search, Watch
from .engines import Data, Engine
from .space import Space
from .study import read_names, run_search

if TYPE_CHECKING:
    from .cluster import Ray


def tune(
    forecaster: Forecaster,
    df: Any,
    folder: os.PathLike[str] | str,
    *,
    trials: int = 50,
    space: Space | None = None,
    engine: Engine | Ray | None = None,
    watch: Watch | None = None,
) -> tuple[Forecaster, Outcome]:
    """Search for the hyperparameters of a forecaster; the test fold is not looked at.

    Called again with the same forecaster, frame and folder, a search goes on where it was stopped.

    Args:
        forecaster: what is not in the space stays as it is here.
        df: the frame to fit on.
        folder: that is there, with no other search in it; this one is kept in its file `search.db` (with Ray, in its
            folder `search`).
        trials: how many.
        space: by default the paper's.
        engine: by default one trial after another, halved from epoch 20 on.
        watch: who wants to hear of it.

    Returns:
        The best one by validation RMSE, not fitted yet, and all that was tried.
    """
    split, tokenizer = forecaster.split(df)
    device = split.train.series.device
    data = Data(
        split.train,
        split.val,
        torch.from_numpy(split.mean).to(device),
        torch.from_numpy(split.deviation).to(device),
    )
    search = Search(
        name=f"{forecaster.name}-{_fingerprint(forecaster, data)}",
        tokenizer=tokenizer,
        trials=trials,
        space=space or Space.for_tokenizer(tokenizer),
        network=forecaster.network_config,
        train=forecaster.train_config,
        seed=forecaster.train_config.seed,
    )
    _check_folder(Path(folder), search.name)
    outcome = run_search(data, search, Path(folder) / "search.db", engine=engine, watch=watch)
    best = outcome.best()
    if not best:
        raise RuntimeError(
            f"none of {len(outcome.records)} trials gave a network; the last: {outcome.records[-1].reason}"
        )
    trial = search.build(best[0].point)
    found = {**vars(trial.network), **vars(trial.train), "tokenizer": trial.tokenizer}
    return Forecaster(**{**forecaster.get_params(), **found}), outcome


def _check_folder(folder: Path, name: str) -> None:
    """One search a folder, since the model of another would be replaced."""
    home = folder / "search"
    known = read_names(home.with_suffix(".db")) + [path.name for path in home.glob("*") if path.is_dir()]
    if known and name not in known:
        raise ValueError(
            f"`folder` = {folder} holds another search ({', '.join(known)}), with other settings or data; "
            f"this one is {name}. Name another folder."
        )


def _fingerprint(forecaster: Forecaster, data: Data) -> str:
    """Of all that shapes a search, so that another one does not go on in its place."""
    params = {k: repr(v) for k, v in forecaster.get_params().items() if k not in ("device", "verbose")}
    digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode())
    digest.update(data.train.series.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]
