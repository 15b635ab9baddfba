"""The command line: one function per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from .forecaster import Forecaster

app = typer.Typer(
    name="bsat",
    help="Forecasting with tokens that go where the signal is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


data_app = typer.Typer(name="data", help="Named datasets: what there is, and getting them.", no_args_is_help=True)
lab_app = typer.Typer(name="lab", help="The paper's experiments, beside what it prints.", no_args_is_help=True)
app.add_typer(data_app)
app.add_typer(lab_app)


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
    series_id: Annotated[
        str | None, typer.Option("--id", help="The series of unique_id to tokenize.", show_default="the only one")
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
    name, series = read_series(file, column, series_id)
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


# What `fit` and `backtest` both take.
File = Annotated[Path, typer.Argument(help="CSV or parquet, one row per stamp (and series).", show_default=False)]
Horizon = Annotated[int, typer.Option(help="Steps to forecast.")]
Lookback = Annotated[int, typer.Option(help="Samples that a forecast looks at.")]
TokenizerName = Annotated[str, typer.Option(help='"bsat", "patchtst" or "uds".')]
TokenCount = Annotated[int | None, typer.Option(help="Tokens per window.", show_default="lookback / 16")]
Degree = Annotated[int, typer.Option(help="Degree of the spline, 1 to 6.")]
Encoding = Annotated[str, typer.Option(help="lpe, f-rope, l-rope, f-rope+lpe or l-rope+lpe.")]
Head = Annotated[str, typer.Option(help='"flatten" or "spline".')]
Epochs = Annotated[int, typer.Option(help="At most so many epochs.")]
Seed = Annotated[int, typer.Option(help="Of weights, order and dropout.")]
Gaps = Annotated[str, typer.Option(help='Missing stamps and values: "error", "fit" or "fill".')]
Freq = Annotated[str | None, typer.Option(help="Step between stamps, e.g. 15min.", show_default="found out")]
IdCol = Annotated[
    str | None, typer.Option(help="Column of the series' names.", show_default="unique_id, or one series")
]
TimeCol = Annotated[str | None, typer.Option(help="Column of the stamps.", show_default="ds, or the first of dates")]
TargetCol = Annotated[str | None, typer.Option(help="Column to forecast.", show_default="y, or the only number")]
DropShort = Annotated[bool, typer.Option("--drop-short", help="Leave out series that are too short.")]
NoTest = Annotated[bool, typer.Option("--no-test", help="Hold back no test fold: train on 80 % instead of 60.")]
Device = Annotated[str, typer.Option(help='"auto", "cpu" or "cuda".')]
Level = Annotated[list[float] | None, typer.Option(help="Interval in percent; may be repeated.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No plan and no progress bar.")]
TableOut = Annotated[Path | None, typer.Option(help="Write the table (.parquet or .csv).", show_default=False)]
Store = Annotated[Path, typer.Argument(help="A folder that `bsat lab run` made.", show_default=False)]
EngineName = Annotated[
    str, typer.Option("--engine", help='"optuna", "population" (packs of trials on one GPU) or "ray".')
]
AtOnce = Annotated[
    int | None,
    typer.Option(help="Trials at a time (optuna, ray).", show_default="1 on a GPU, else the cores; with ray 5"),
]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster.", show_default="this machine")]
Precision = Annotated[
    str, typer.Option(help='"float32", or "bfloat16" for activations of 16 bits (population, on a GPU).')
]
Plot = Annotated[Path | None, typer.Option(help="Draw it (.png, .svg or .pdf).", show_default=False)]


@app.command()
def fit(
    ctx: typer.Context,
    file: File,
    folder: Annotated[Path, typer.Option("--out", help="The folder of the model.", show_default=False)],
    horizon: Horizon = 192,
    lookback: Lookback = 720,
    tokenizer: TokenizerName = "bsat",
    tokens: TokenCount = None,
    degree: Degree = 3,
    encoding: Encoding = "l-rope+lpe",
    head: Head = "flatten",
    epochs: Epochs = 100,
    seed: Seed = 2025,
    gaps: Gaps = "error",
    freq: Freq = None,
    id_col: IdCol = None,
    time_col: TimeCol = None,
    target_col: TargetCol = None,
    drop_short: DropShort = False,
    no_test: NoTest = False,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a training that was stopped.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train on a file; save the model, its scores and a picture into a folder."""
    from .report import draw_last_window, format_scores, scores_dict
    from .storage import check_target
    from .train.checkpoint import NAME, clear_checkpoint

    check_target(folder)
    if not resume and (folder / NAME).exists():  # it goes when the model of a finished training is saved
        raise ValueError(
            f"{folder / NAME} is a training that was not finished, or whose model was not saved. Go on with --resume, "
            f"or delete that file to start anew."
        )
    forecaster, table = make_forecaster(file, ctx.params)
    forecaster.fit(table, checkpoint=folder, resume=resume)
    forecaster.save(folder)
    stopped = forecaster.history_.stopped == "interrupted"
    if not stopped:
        clear_checkpoint(folder)
    picture = draw_last_window(forecaster, table, folder / "forecast.png")
    if json_:
        print_json({"model": str(folder), "picture": str(picture) if picture else None, **scores_dict(forecaster)})
        return
    print(format_scores({forecaster.name: forecaster}))
    print(f"\nsaved {folder}" + (f", drew {picture}" if picture else "") + ("; --resume goes on" if stopped else ""))


@app.command()
def tune(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="DATASET|FILE", help="A dataset's name, or a table.", show_default=False)
    ],
    folder: Annotated[Path, typer.Option("--out", help="The folder of the search and the model.", show_default=False)],
    trials: Annotated[int, typer.Option(help="How many configurations to try.")] = 50,
    horizon: Horizon = 192,
    lookback: Lookback = 720,
    tokenizer: TokenizerName = "bsat",
    tokens: TokenCount = None,
    encoding: Encoding = "l-rope+lpe",
    head: Head = "flatten",
    epochs: Epochs = 100,
    seed: Seed = 2025,
    gaps: Gaps = "error",
    freq: Freq = None,
    id_col: IdCol = None,
    time_col: TimeCol = None,
    target_col: TargetCol = None,
    drop_short: DropShort = False,
    engine: EngineName = "optuna",
    at_once: AtOnce = None,
    address: Address = None,
    precision: Precision = "float32",
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for hyperparameters, then train and save the best; stopped, it goes on."""
    from .lab.protocol import Protocol
    from .lab.runner import make_engine
    from .progress import SearchBar
    from .report import draw_last_window, format_scores, format_trials, scores_dict, trials_dict
    from .search import Watch, tune
    from .storage import check_target

    worker = make_engine(
        engine, Protocol(max_epochs=epochs), at_once=at_once, address=address, precision=precision, device=device
    )
    check_target(folder)
    forecaster, table = make_forecaster(file, {**ctx.params, "degree": 3})
    folder.mkdir(parents=True, exist_ok=True)
    with SearchBar(trials, show=forecaster.verbose) as bar:
        watch = Watch(
            report=lambda progress: bar.update("search", progress, forecaster.name),
            lost=lambda items: print("\n".join(f"bsat: note: {item}" for item in items), file=sys.stderr),
        )
        best, outcome = tune(forecaster, table, folder, trials=trials, engine=worker, watch=watch)
    if not json_:
        print(format_trials(outcome) + "\n", flush=True)
    best.fit(table)
    if best.history_.stopped == "interrupted":  # the search is kept, and the best is soon trained again
        raise KeyboardInterrupt
    best.save(folder)
    picture = draw_last_window(best, table, folder / "forecast.png")
    if json_:
        shown = {"model": str(folder), "picture": str(picture) if picture else None}
        print_json({**shown, **trials_dict(outcome), **scores_dict(best)})
        return
    print(format_scores({best.name: best}))
    print(f"\nsaved {folder}" + (f", drew {picture}" if picture else ""))


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A folder that `bsat fit` made.", show_default=False)],
    file: Annotated[Path | None, typer.Argument(help="Newer samples.", show_default="those of the fit")] = None,
    level: Level = None,
    out: TableOut = None,
    plot: Plot = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Forecast with a saved model, with intervals if asked for."""
    from .forecaster import Forecaster
    from .report import draw_future
    from .tokens.pictures import check_format

    if out is not None:
        check_output(out, file)
    if plot is not None:
        check_format(plot)
    forecaster = Forecaster.load(model, device=device, verbose=False)
    table = None if file is None else read_for(forecaster, file)
    forecasts = forecaster.predict(table, level=level)
    if plot is not None:
        draw_future(forecaster, table, plot, level or [])
    if out is not None:
        write_table(forecasts, out)
    if json_:
        print_json({"forecasts": to_records(forecasts)})
        return
    if out is None and plot is None:
        sys.stdout.write(forecasts.to_csv(index=False))
        return
    print("\n".join(f"{word} {path}" for word, path in (("wrote", out), ("drew", plot)) if path is not None))


@app.command()
def backtest(
    ctx: typer.Context,
    file: File,
    model: Annotated[
        Path | None, typer.Option(help="A folder that `bsat fit` made, instead of training.", show_default=False)
    ] = None,
    windows: Annotated[int, typer.Option(help="How many cutoffs.")] = 4,
    step: Annotated[int | None, typer.Option(help="Samples between cutoffs.", show_default="the horizon")] = None,
    refit: Annotated[bool, typer.Option("--refit", help="Train anew before every cutoff.")] = False,
    horizon: Horizon = 192,
    lookback: Lookback = 720,
    tokenizer: TokenizerName = "bsat",
    tokens: TokenCount = None,
    degree: Degree = 3,
    encoding: Encoding = "l-rope+lpe",
    head: Head = "flatten",
    epochs: Epochs = 100,
    seed: Seed = 2025,
    gaps: Gaps = "error",
    freq: Freq = None,
    id_col: IdCol = None,
    time_col: TimeCol = None,
    target_col: TargetCol = None,
    drop_short: DropShort = False,
    level: Level = None,
    out: TableOut = None,
    plot: Plot = None,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forecast from moving cutoffs and compare with what came."""
    from .forecaster import Forecaster
    from .report import backtest_scores, draw_backtest, format_backtest
    from .tokens.pictures import check_format

    if out is not None:
        check_output(out, file)
    if plot is not None:
        check_format(plot)
    if model is not None:
        given = [name for name in TRAINING if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")]
        if given:
            raise ValueError(
                f"{', '.join('--' + name.replace('_', '-') for name in given)} cannot be given with --model, which "
                f"brings its own. Leave out one of them."
            )
        forecaster = Forecaster.load(model, device=device, verbose=not (quiet or json_))
        table = read_for(forecaster, file)
    else:
        forecaster, table = make_forecaster(file, ctx.params)
    result = forecaster.cross_validation(
        table, n_windows=windows, step=step, refit=refit, level=level, allow_fit=model is None or refit
    )
    if out is not None:
        write_table(result, out)
    if plot is not None:
        draw_backtest(forecaster, result, plot)
    scores = backtest_scores(forecaster, result)
    if json_:
        print_json(scores)
        return
    print(format_backtest(scores))
    for word, path in (("wrote", out), ("drew", plot)):
        if path is not None:
            print(f"{word} {path}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the model and the pictures go.")] = Path("bsat-demo"),
    json_: Json = False,
) -> None:
    """Train on a shipped solar series, score, draw, save; needs no network."""
    from .demo import run_demo

    scores = run_demo(folder, quiet=json_)
    if json_:
        print_json(scores)


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


@data_app.command("list")
def list_datasets(
    name: Annotated[str | None, typer.Argument(help="All about this one.", show_default="a table of all")] = None,
    json_: Json = False,
) -> None:
    """Show the named datasets, or all about one of them."""
    from .data.catalog import CATALOG, describe, find_dataset, format_catalog, whereabouts

    found = list(CATALOG.values()) if name is None else [find_dataset(name)]
    if json_:
        print_json({"datasets": [{**d.to_dict(), "at_hand": whereabouts(d) or None} for d in found]})
        return
    print(format_catalog() if name is None else describe(found[0]))


@data_app.command("get")
def get_datasets(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See `bsat data list`.", show_default=False)],
    json_: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Download datasets, check and prepare them; a broken download is gone on with."""
    from .data.catalog import find_dataset, load, whereabouts

    done = []
    for dataset in [find_dataset(name) for name in names]:
        table = load(dataset.name, verbose=not (quiet or json_))
        where = whereabouts(dataset)
        done.append({"name": dataset.name, "rows": len(table), "at_hand": where})
        if not json_:
            place = "inside the package" if where == "shipped" else where
            print(f"{dataset.name}: {len(table):,} samples, one every {dataset.cadence}, in {dataset.unit}; {place}")
    if json_:
        print_json({"datasets": done})


@lab_app.command("stats")
def lab_stats(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Datasets.", show_default="those at hand")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    json_: Json = False,
) -> None:
    """Measure the paper's table of datasets: how hard each series is for splines."""
    from .lab.stats import dataset_table, format_statistics

    if markdown and json_:
        raise ValueError("--markdown and --json cannot both be given. Leave out one of them.")
    table = dataset_table(names or ())
    if json_:
        print_json(table)
        return
    print(format_statistics(table, markdown=markdown))


@lab_app.command("run")
def lab_run(
    names: Annotated[list[str], typer.Argument(metavar="DATASET...", help="Datasets.", show_default=False)],
    store: Annotated[Path, typer.Option(help="The folder of the runs; what is there is not run again.")] = Path(
        "bsat-runs"
    ),
    models: Annotated[
        str,
        typer.Option(
            help="Some of bsat, bsat-safe, bsat-spline, bsat-even, bsat-even-spline, bsat-unit, uds, patchtst."
        ),
    ] = "bsat,uds,patchtst",
    encodings: Annotated[
        str, typer.Option(help="Some of lpe, f-rope, l-rope, f-rope+lpe, l-rope+lpe; or all.")
    ] = "l-rope+lpe",
    tokens: Annotated[str, typer.Option(help="Budgets.")] = "45",
    trials: Annotated[
        str, typer.Option(help="Of each search: one number, or one for each budget; the paper has 200.")
    ] = "200",
    seeds: Annotated[str, typer.Option(help="A search for each.")] = "2025,2026,2027",
    epochs: Epochs = 100,
    horizon: Horizon = 192,
    lookback: Lookback = 720,
    engine: EngineName = "optuna",
    at_once: AtOnce = None,
    address: Address = None,
    precision: Precision = "float32",
    processes: Annotated[
        int, typer.Option(help="Cells at a time, each in a process of its own; with engine population.")
    ] = 1,
    spread: Annotated[
        bool, typer.Option("--spread", help="Score all runs on the test fold after selection, for the heatmap.")
    ] = False,
    device: Device = "auto",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search, select by validation, score the selected runs on the test fold once."""
    from .lab.protocol import ENCODINGS, Experiment, Protocol

    protocol = Protocol(
        horizon=horizon, lookback=lookback, seeds=tuple(to_numbers(seeds, "--seeds")), max_epochs=epochs
    )
    encoded = ENCODINGS if encodings.strip() == "all" else to_words(encodings, "--encodings")
    budgets = to_numbers(tokens, "--tokens")
    experiments = [
        Experiment(name, model, budget, encoding, count, protocol)
        for name in names
        for budget, count in zip(budgets, to_trials(trials, budgets), strict=True)
        for encoding in encoded
        for model in to_words(models, "--models")
    ]

    from .lab.report import run_with_bar
    from .lab.runner import make_engine

    worker = make_engine(engine, protocol, at_once=at_once, address=address, precision=precision, device=device)
    summary = run_with_bar(
        experiments,
        store,
        engine=worker,
        device=device,
        spread=spread,
        processes=processes,
        show=not (quiet or json_),
        say=not json_,
    )
    if json_:
        print_json(summary)
        return
    print(f"\nruns in {store}; `bsat lab tables {store}` and `bsat lab figures {store}` show them")


@lab_app.command("tables")
def lab_tables(
    store: Store,
    out: Annotated[Path | None, typer.Option(help="The folder to write to.", show_default="STORE/tables")] = None,
    formats: Annotated[str, typer.Option(help="Some of md, tex, csv.")] = "md,tex,csv",
    json_: Json = False,
) -> None:
    """Make the paper's tables of stored runs, beside what it prints."""
    from .lab.report import format_summary
    from .lab.tables import write_tables

    paths = write_tables(store, out or store / "tables", to_words(formats, "--formats"))
    if json_:
        print_json({"tables": [str(path) for path in paths]})
        return
    print(format_summary(store))
    print(f"\nwrote {len(paths)} files into {out or store / 'tables'}")


@lab_app.command("figures")
def lab_figures(
    store: Store,
    out: Annotated[Path | None, typer.Option(help="The folder to write to.", show_default="STORE/figures")] = None,
    formats: Annotated[str, typer.Option(help="Some of png, svg.")] = "png,svg",
    json_: Json = False,
) -> None:
    """Draw the paper's figures of stored runs."""
    from .lab.figures import write_figures

    notes: list[str] = []
    paths = write_figures(store, out or store / "figures", to_words(formats, "--formats"), note=notes.append)
    if json_:
        print_json({"figures": [str(path) for path in paths], "notes": notes})
        return
    print("\n".join(f"drew {path}" for path in paths))
    for note in notes:
        print(f"bsat: note: {note}", file=sys.stderr)


@lab_app.command("pack")
def lab_pack(
    store: Store,
    out: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    json_: Json = False,
) -> None:
    """Make a small copy of a store, to publish; tables and figures of it are the same."""
    from .lab.runs import pack

    path = pack(store, out)
    if json_:
        print_json({"store": str(out), "file": str(path), "bytes": path.stat().st_size})
        return
    print(f"wrote {path}: {path.stat().st_size:,} bytes")


def to_words(text: str, name: str) -> list[str]:
    """The words of a list with commas, each once."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{name} must name at least one; got {text!r}. Separate several by commas.")
    return list(dict.fromkeys(words))


def to_numbers(text: str, name: str) -> list[int]:
    """Whole numbers of a list with commas."""
    words = to_words(text, name)
    try:
        return [int(word) for word in words]
    except ValueError:
        raise ValueError(f"{name} must be whole numbers, separated by commas; got {text!r}.") from None


def to_trials(text: str, budgets: Sequence[int]) -> list[int]:
    """How many trials each budget has."""
    words = [word for word in text.split(",") if word.strip()] or [text]
    counts = [number for word in words for number in to_numbers(word, "--trials")]
    if len(counts) not in (1, len(budgets)):
        raise ValueError(
            f"--trials must be one number, or one for each budget of --tokens {','.join(map(str, budgets))}; got "
            f"{text!r}, which are {len(counts)}."
        )
    return counts * (len(budgets) // len(counts))


def to_clip_factor(text: str) -> float | str:
    """A number, or "auto"."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'--clip-factor must be a positive number, "inf" or "auto"; got {text!r}.') from None


TRAINING = (
    "horizon", "lookback", "tokenizer", "tokens", "degree", "encoding", "head", "epochs", "seed", "gaps", "freq",
    "id_col", "time_col", "target_col", "drop_short",
)  # fmt: skip
"""The options that say what is trained on what."""


def make_forecaster(file: Path, options: dict[str, Any]) -> tuple[Forecaster, pd.DataFrame]:
    """What `fit`, `tune` and `backtest` train, from their options, and the table of the file, or of a dataset."""
    from .data.folds import SHARES
    from .forecaster import Forecaster, default_tokens
    from .tokens import BSplineTokenizer, DownsampleTokenizer, PatchTokenizer, Tokenizer
    from .tokens.door import check_choice, to_whole

    check_choice(options["tokenizer"], "--tokenizer", ("bsat", "patchtst", "uds"))
    lookback, freq = to_whole(options["lookback"], "lookback", 2), options["freq"]
    n = default_tokens(lookback) if options["tokens"] is None else options["tokens"]
    tokenizer: Tokenizer
    if options["tokenizer"] == "bsat":
        tokenizer = BSplineTokenizer(n, options["degree"])
    else:
        tokenizer = PatchTokenizer(n) if options["tokenizer"] == "patchtst" else DownsampleTokenizer(n)
    settings: dict[str, Any] = {
        name: options[name] for name in ("encoding", "head", "seed", "gaps", "drop_short", "device")
    }
    settings |= {
        "max_epochs": options["epochs"],
        "freq": int(freq) if freq is not None and freq.isdigit() else freq,
        "folds": (0.8, 0.2, 0) if options.get("no_test") else SHARES,
        "verbose": not (options["quiet"] or options["json_"]),
    }
    Forecaster(options["horizon"], lookback, tokenizer, **settings)  # tells mistakes before the file is read
    table, columns = read_source(file, {name: options[name] for name in ("id_col", "time_col", "target_col")})
    return Forecaster(options["horizon"], lookback, tokenizer, **(settings | columns)), table


def read_source(file: Path, columns: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table and the names of its columns: of a file, or of a dataset if there is no such file."""
    from .data import read_frame
    from .data.catalog import find_dataset, load

    if not file.exists() and file.name == str(file) and not file.suffix:
        return load(find_dataset(str(file)).name), {}
    return read_frame(file, **columns)


def read_for(forecaster: Forecaster, file: Path) -> pd.DataFrame:
    """A file for a model; where the model knows a single series, the file need not name it."""
    from .data.files import read_again

    target = forecaster.target_col
    return read_again(
        file,
        id_col=forecaster.id_col,
        time_col=forecaster.time_col,
        targets=[target] if isinstance(target, str) else target,
        ids=forecaster.ids_,
        dates=isinstance(forecaster.freq_, str),
    )


def print_json(content: dict[str, Any]) -> None:
    """One object on one line; numbers that are not finite become null, which JSON can say."""
    import json
    import math

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain(content)))


def to_records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, stamps in ISO format."""
    shown = table.copy()
    for name in shown.columns:
        if hasattr(shown[name], "dt"):
            shown[name] = [stamp.isoformat() for stamp in shown[name]]
    return shown.to_dict("records")  # type: ignore[return-value]


def check_output(path: Path, source: Path | None) -> None:
    """Before any work: can the table be written there?"""
    if source is not None and path.resolve() == source.resolve():
        raise ValueError(f"--out must not be the file that is read; got {path}. Choose another name.")
    if path.suffix.lower() not in (".parquet", ".csv"):
        raise ValueError(f"--out must end in .parquet or .csv; got {path.name!r}. Rename it.")
    if path.is_dir():
        raise ValueError(f"--out must be a file; {path} is a folder. Choose another name.")
    if not path.parent.is_dir():
        raise ValueError(f"--out needs an existing folder; {path.parent} is none. Create it first.")


def write_table(table: pd.DataFrame, path: Path) -> None:
    """A .parquet or .csv, whole or not at all."""
    from .atomic import replacing

    with replacing(path) as temporary:
        if path.suffix.lower() == ".parquet":
            table.to_parquet(temporary, index=False)
        else:
            table.to_csv(temporary, index=False)


def write_tokens(tokens: Any, starts: Any, path: Path) -> None:
    """A long table: window, start (its first sample), token, coefficient, center, left and right end of its support."""
    import numpy as np
    import pandas as pd

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
    write_table(table, path)


WORDS = {
    r'gaps="(\w+)"': r"--gaps \1",
    r"gaps='(\w+)'": r"--gaps \1",
    r"drop_short=True": "--drop-short",
    r"\b(id|time|target)_col=": r"--\1-col",
    r"`(id|time|target)_col`": r"--\1-col",
    r"`(horizon|lookback|degree|encoding|head|seed|gaps|freq|device|level|step)`": r"--\1",
    r"`(tokens|trials|seeds|engine|at_once|address|precision|processes|formats)`": r"--\1",
    r"`model`": "--models",
    r"--at_once": "--at-once",
    r"`n_tokens`": "--tokens",
    r"`n_windows`": "--windows",
    r"`max_epochs`": "--epochs",
    r"\bfreq=(?=\W)": "--freq ",
}
"""What the library calls its arguments, as the command line calls them."""


def main() -> None:
    """Errors of the user's are one line and exit code 2; a traceback only with --debug."""
    import re
    import warnings

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"bsat: note: {message}", file=sys.stderr)

    warnings.showwarning = note
    try:
        app()
    except (ValueError, TypeError, OSError, FloatingPointError, ImportError, RuntimeError) as error:
        if "--debug" in sys.argv:
            raise
        text = " ".join(str(error).split())
        for ours, theirs in WORDS.items():
            text = re.sub(ours, theirs, text)
        print(f"bsat: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as end:
        if end.code == 130:  # typer's word for Ctrl-C
            again = any(word in sys.argv[1:3] for word in ("tune", "run"))
            print("bsat: stopped" + ("; the same command goes on" if again else ""), file=sys.stderr)
        raise
