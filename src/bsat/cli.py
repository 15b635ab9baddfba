"""The command line: one function per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="bsat",
    help="Forecasting with tokens that go where the signal is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """What stands before a command."""
    if version:
        from . import __version__

        print(f"bsat {__version__}")
        raise typer.Exit


@app.command()
def tokenize(
    file: Annotated[Path, typer.Argument(help="CSV or parquet with one row per sample.", show_default=False)],
    column: Annotated[
        str | None, typer.Option(help="The column to tokenize.", show_default="y, or the only number")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per window.")] = 45,
    degree: Annotated[int, typer.Option(help="Degree of the spline, 1 to 6.")] = 3,
    lookback: Annotated[int, typer.Option(help="Samples per window.")] = 720,
    stride: Annotated[int | None, typer.Option(help="Samples between windows.", show_default="the lookback")] = None,
    clip_factor: Annotated[str, typer.Option(help='A number, "inf", or "auto" for the grid search.')] = "0.62",
    placement: Annotated[str, typer.Option(help='"safe" or "paper".')] = "safe",
    feature: Annotated[str, typer.Option(help='"curvature", "slope" or "uniform".')] = "curvature",
    recency: Annotated[float, typer.Option(help="How much denser the knots are at the new end.")] = 1.0,
    fit_gaps: Annotated[
        bool, typer.Option("--fit-gaps", help="Fit around missing values instead of refusing them.")
    ] = False,
    window: Annotated[int, typer.Option(help="The window to draw; -1 is the last.")] = -1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a window's knots, basis and tokens.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write all tokens (.parquet or .csv).", show_default=False)] = None,
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Report how well the tokens fit the series.")] = False,
) -> None:
    """Turn a series into B-spline tokens; draw a window, write them all."""
    import numpy as np

    from .data import read_series
    from .tokens import BSplineTokenizer
    from .tokens.pictures import check_format

    if plot is not None:
        check_format(plot)
    if out is not None:
        check_output(out, file)
    tokenizer = BSplineTokenizer(
        tokens, degree, clip_factor=to_clip_factor(clip_factor), placement=placement, feature=feature, recency=recency
    )
    name, series = read_series(file, column)
    missing = np.isnan(series)
    if missing.any() and not fit_gaps:
        raise ValueError(
            f"column {name!r} of {file.name} must have no missing values; row {int(missing.argmax()) + 1} is empty "
            f"({int(missing.sum())} in all). Pass --fit-gaps to fit around them."
        )
    if missing.any() and (diagnose or clip_factor == "auto"):
        raise ValueError(
            f"--diagnose and --clip-factor auto need a series without missing values; column {name!r} of {file.name} "
            f"has {int(missing.sum())}. Fill them first."
        )
    if tokenizer.clip_factor == "auto":
        tokenizer.fit(series, lookback=lookback)
        print(f"clip factor {tokenizer.clip_factor_:.2f} (grid search)")
    stride = lookback if stride is None else stride
    result = tokenizer.transform_series(series, lookback, stride, mask=missing if missing.any() else None)
    if not -len(result) <= window < len(result):
        raise ValueError(f"--window must lie between {-len(result)} and {len(result) - 1}; got {window}.")
    starts = np.arange(len(result)) * stride
    print(
        f"{len(result):,} windows of {lookback} samples of {name!r} ({len(series):,} samples) as {tokens} tokens each; "
        f"{int(result.fallback.sum())} ridge fallbacks"
    )
    if out is not None:
        write_tokens(result, starts, out)
        print(f"wrote {out}")
    if plot is not None:
        start = int(starts[window])
        part = slice(start, start + lookback)
        title = f"{name}, samples {start:,} to {start + lookback - 1:,}"
        tokenizer.plot(series[part], plot, mask=missing[part], title=title)
        print(f"drew {plot}")
    if diagnose:
        tokenizer.diagnose(series, lookback)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the pictures go.")] = Path("bsat-demo"),
) -> None:
    """Tokenize a shipped series and draw it; needs no network."""
    from .data import SHIPPED, load_shipped
    from .tokens import BSplineTokenizer

    about = SHIPPED["solar"]
    series = load_shipped("solar")["y"].to_numpy()
    print(f"solar: {about.about}, {about.unit}, every {about.cadence}, {len(series):,} samples\n({about.credit})\n")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = BSplineTokenizer(n_tokens=90, degree=3)
    tokenizer.diagnose(series, lookback=720, plot=folder / "diagnosis.png")
    tokenizer.plot(series[-720:], folder / "tokens.png", title="A week of sunshine: 720 samples as 90 tokens")
    print(f"\ndrew {folder / 'tokens.png'} and {folder / 'diagnosis.png'}")


@app.command()
def cache(
    folder: Annotated[Path | None, typer.Option("--dir", help="The cache folder.", show_default="BSAT_CACHE")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the token files.")] = False,
) -> None:
    """Show the token files kept on disk, or delete them."""
    from .tokens import TokenCache

    tokens = TokenCache(folder)
    if clear:
        count, size = tokens.clear()
        print(f"deleted {count} files, {size / 1e6:,.1f} MB, from {tokens.folder}")
        return
    files = list(tokens.files())
    for path, size in files:
        print(f"{size / 1e6:10,.1f} MB  {path.name}")
    print(f"{len(files)} files, {sum(size for _, size in files) / 1e6:,.1f} MB, in {tokens.folder}")


def to_clip_factor(text: str) -> float | str:
    """A number, or "auto"."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'--clip-factor must be a positive number, "inf" or "auto"; got {text!r}.') from None


def check_output(path: Path, source: Path) -> None:
    """Before any work: can the table be written there?"""
    if path.resolve() == source.resolve():
        raise ValueError(f"--out must not be the file that is read; got {path}. Choose another name.")
    if path.suffix.lower() not in (".parquet", ".csv"):
        raise ValueError(f"--out must end in .parquet or .csv; got {path.name!r}. Rename it.")
    if not path.parent.is_dir():
        raise ValueError(f"--out needs an existing folder; {path.parent} is none. Create it first.")


def write_tokens(tokens: Any, starts: Any, path: Path) -> None:
    """A long table: window, start (its first sample), token, coefficient, center, left and right end of its support."""
    import numpy as np
    import pandas as pd

    from .atomic import replacing

    W, n = tokens.coefficients.shape
    p = tokens.degree
    table = pd.DataFrame(
        {
            "window": np.repeat(np.arange(W), n),
            "start": np.repeat(starts, n),
            "token": np.tile(np.arange(n), W),
            "coefficient": tokens.coefficients.reshape(-1),
            "center": tokens.centers.reshape(-1),
            "left": tokens.knots[:, :n].reshape(-1),
            "right": tokens.knots[:, p + 1 :].reshape(-1),
        }
    )
    with replacing(path) as temporary:
        if path.suffix.lower() == ".parquet":
            table.to_parquet(temporary, index=False)
        else:
            table.to_csv(temporary, index=False)


def main() -> None:
    """Errors of the user's are one line and exit code 2; a traceback only with --debug."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"bsat: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("bsat: stopped", file=sys.stderr)
        raise SystemExit(130) from None
