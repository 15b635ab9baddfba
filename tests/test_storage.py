"""A forecaster's folder: what is saved is what is loaded, and nothing else is."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file, save_file

from bsat import BSplineTokenizer, DownsampleTokenizer, Forecaster, PatchTokenizer, storage
from bsat.storage import CONFIG, TENSORS, _digest
from conftest import full_disk
from small import L, make_forecaster, make_long, make_values, weights_of

FILES = [CONFIG, TENSORS]


@pytest.fixture(scope="module")
def frame():
    return make_long(a=400, b=360)


@pytest.fixture(scope="module")
def fitted(frame):
    """Shared: tests must not change it."""
    return make_forecaster().fit(frame)


@pytest.fixture(scope="module")
def original(fitted, tmp_path_factory):
    """A saved forecaster, shared: tests must not change it."""
    folder = tmp_path_factory.mktemp("original") / "model"
    fitted.save(folder)
    return folder


@pytest.fixture
def saved(original, tmp_path):
    """A copy of it to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(folder):
    return Forecaster.load(folder, device="cpu", verbose=False)


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def rewrite(folder, tensors=None, **changes):
    """Change tensors and entries of the config, and have the config vouch for the result."""
    if tensors is not None:
        save_file(tensors, folder / TENSORS)
    config = json.loads((folder / CONFIG).read_text())
    config["files"][TENSORS] = _digest((folder / TENSORS).read_bytes())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


def assert_same(p, q):
    assert_frame_equal(p, q, check_exact=True)


# ---- save and load ---------------------------------------------------------------------------------------------------


def test_a_loaded_forecaster_is_the_saved_one(fitted, original, frame):
    f = load(original)
    assert names_in(original) == FILES
    assert_same(f.predict(), fitted.predict())
    assert_same(f.predict(level=[80, 95]), fitted.predict(level=[80, 95]))
    assert_same(f.predict(frame), fitted.predict(frame))
    new = make_long(n=100)
    assert_same(f.predict(new, level=[80]), fitted.predict(new, level=[80]))
    windows = np.random.default_rng(0).normal(size=(5, L))
    np.testing.assert_array_equal(f.forecast(windows, ids=list("aabba")), fitted.forecast(windows, ids=list("aabba")))
    assert_same(f.cross_validation(frame, n_windows=2), fitted.cross_validation(frame, n_windows=2))
    assert f.scores_ == fitted.scores_
    assert f.history_ == fitted.history_
    assert f.freq_ == fitted.freq_
    assert repr(f) == repr(fitted)
    assert not f.network_.training
    weights = weights_of(f)
    for name, a in weights_of(fitted).items():
        np.testing.assert_array_equal(weights[name], a)


def test_a_loaded_forecaster_can_be_saved_again(fitted, original, tmp_path):
    load(original).save(tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (original / name).read_bytes()


def test_a_loaded_forecaster_can_be_fitted_again(fitted, original, frame):
    f = load(original).fit(frame)
    assert_same(f.predict(), fitted.predict())


def test_saving_over_another_one(fitted, original, frame, tmp_path):
    other = make_forecaster(seed=5, n_layers=2).fit(make_long(c=300))
    folder = tmp_path / "deep" / "model"
    other.save(folder)
    assert_same(load(folder).predict(), other.predict())
    fitted.save(str(folder))
    assert names_in(folder) == FILES
    assert_same(load(str(folder)).predict(level=[80]), fitted.predict(level=[80]))
    fitted.save(folder)
    assert_same(load(folder).predict(level=[80]), fitted.predict(level=[80]))


def test_files_of_others_in_the_folder_are_left_alone(fitted, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    fitted.save(tmp_path)
    assert names_in(tmp_path) == sorted([*FILES, "notes.txt"])
    assert_same(load(tmp_path).predict(), fitted.predict())


def with_gaps(df):
    df = df.drop(index=[30, 250, 380])
    df.loc[[100, 310, 375, 740], "y"] = np.nan
    return df


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        pytest.param({"tokenizer": BSplineTokenizer(10, clip_factor=float("inf"))}, None, id="clip_factor=inf"),
        pytest.param({"tokenizer": BSplineTokenizer(10, clip_factor="auto")}, None, id="clip_factor=auto"),
        pytest.param({"tokenizer": BSplineTokenizer(10, detail=3)}, None, id="detail"),
        pytest.param({"tokenizer": BSplineTokenizer(10, max_coefficient=10, recency=3)}, None, id="recency"),
        pytest.param({"tokenizer": BSplineTokenizer(9, coefficients="asinh"), "norm": "window"}, None, id="asinh"),
        pytest.param({"tokenizer": BSplineTokenizer(9, placement="paper", feature="slope")}, None, id="paper"),
        pytest.param({"tokenizer": PatchTokenizer(12)}, None, id="patches"),
        pytest.param({"tokenizer": DownsampleTokenizer(12)}, None, id="downsample"),
        pytest.param({"head": "spline", "encoding": "f-rope", "n_layers": 2}, None, id="spline head"),
        pytest.param({"encoding": "lpe", "norm": "window", "dropout": 0}, None, id="window norm"),
        pytest.param({"folds": (0.8, 0.2, 0), "epoch_windows": None}, None, id="no test fold"),
        pytest.param({"gaps": "fit"}, with_gaps, id="gaps"),
        pytest.param({"gaps": "fill", "freq": "h"}, with_gaps, id="filled gaps"),
        pytest.param({"target_col": ["y", "z"]}, lambda df: df.assign(z=make_values(760, 9)), id="channels"),
        pytest.param({"id_col": None}, lambda df: df.iloc[:400], id="one series"),
        pytest.param({}, lambda df: df.replace({"unique_id": {"a": 7, "b": -3}}).infer_objects(), id="integer ids"),
        pytest.param({}, lambda df: df.replace({"unique_id": {"a": "ä\n\"'", "b": ""}}), id="odd ids"),
        pytest.param({}, lambda df: df.astype({"unique_id": "category"}), id="categories"),
        pytest.param({}, lambda df: df.assign(ds=np.r_[5:405, 5:365]), id="integer stamps"),
        pytest.param({"freq": 1}, lambda df: df.assign(ds=np.r_[5:405, 5:365].astype("int32")), id="int32 stamps"),
        pytest.param({}, lambda df: df.assign(ds=df["ds"].dt.tz_localize("Europe/Berlin")), id="time zone"),
        pytest.param({}, lambda df: df.assign(ds=df["ds"].dt.tz_localize("+05:30")), id="offset from UTC"),
        pytest.param({}, lambda df: df.assign(ds=df["ds"].astype("M8[s]")), id="seconds"),
        pytest.param({}, lambda df: make_long(freq="MS", start="1980-01-01", a=400), id="months"),
        pytest.param(
            {"horizon": np.int64(12), "d_model": np.int32(8), "batch_size": np.int64(64)}, None, id="numpy integers"
        ),
        pytest.param({"tokenizer": BSplineTokenizer(10, clip_factor=np.float32(0.5))}, None, id="numpy floats"),
        pytest.param({"freq": pd.offsets.Hour(1)}, None, id="an offset"),
    ],
)
def test_everything_round_trips(frame, tmp_path, changes, change):
    df = frame if change is None else change(frame)
    f = make_forecaster(**changes).fit(df)
    before, level = f.predict(level=[80]), [80]
    f.save(tmp_path / "model")
    assert names_in(tmp_path / "model") == FILES
    g = load(tmp_path / "model")
    assert_same(g.predict(level=level), before)
    assert_same(g.predict(df, level=level), before)
    assert_same(f.predict(level=level), before)  # saving has not changed it
    assert repr(g.tokenizer) == repr(f.tokenizer)
    assert g.tokenizer.get_params() == f.tokenizer.get_params()
    assert getattr(g.tokenizer_, "clip_factor_", None) == getattr(f.tokenizer_, "clip_factor_", None)
    mine, its = f.get_params(), g.get_params()
    assert {**its, "tokenizer": 0, "freq": str(its["freq"])} == {**mine, "tokenizer": 0, "freq": str(its["freq"])}
    assert g.scores_ == f.scores_


def test_ids_that_json_cannot_say_are_refused(frame, tmp_path):
    day = pd.Timestamp("2024-01-01")
    with pytest.warns(UserWarning, match="this forecaster cannot be saved: ids must be text or numbers"):
        f = make_forecaster().fit(frame.iloc[:400].assign(unique_id=[day] * 400))
    with pytest.raises(ValueError, match=r"ids must be text or numbers to be saved; got .*Convert the id column"):
        f.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_another_process_predicts_the_same(fitted, original, tmp_path):
    script = (
        "import sys, bsat\n"
        "f = bsat.Forecaster.load(sys.argv[1], device='cpu', verbose=False)\n"
        "f.predict(level=[80, 95]).to_pickle(sys.argv[2])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, original, tmp_path / "forecast"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_same(pd.read_pickle(tmp_path / "forecast"), fitted.predict(level=[80, 95]))


def test_the_config_is_plain_json(original):
    def refuse(word):
        raise AssertionError(f"JSON has no {word}")

    config = json.loads((original / CONFIG).read_text(encoding="utf-8"), parse_constant=refuse)
    assert config["format"] == 1
    assert config["tokenizer"] == {"kind": "BSplineTokenizer", "params": BSplineTokenizer(10).get_params()}
    assert config["files"] == {TENSORS: _digest((original / TENSORS).read_bytes())}
    assert config["series"]["ids"] == ["a", "b"]


# ---- a save that fails -----------------------------------------------------------------------------------------------


def test_a_file_is_not_a_place_for_a_model(fitted, tmp_path):
    path = tmp_path / "model"
    path.write_text("something else")
    with pytest.raises(ValueError, match=r"saved as a folder; .*model is a file\. Choose another name"):
        fitted.save(path)
    assert path.read_text() == "something else"
    assert names_in(tmp_path) == ["model"]


def test_a_full_disk_leaves_the_older_model_whole(fitted, saved):
    other = make_forecaster(seed=5).fit(make_long(c=300))
    with full_disk(1000), pytest.raises(OSError, match=r"[Tt]oo large"):
        other.save(saved)
    assert names_in(saved) == FILES
    assert_same(load(saved).predict(), fitted.predict())


def test_a_reader_never_mixes_two_models(fitted, saved, tmp_path, monkeypatch):
    """Another process saves over the folder while this one reads it: at any moment it is the one or the other."""
    other = make_forecaster(seed=5).fit(make_long(c=300))
    first, inside = storage._read_config, []

    def interrupted(folder, links):
        config = first(folder, links)
        if not inside:
            inside.append(1)
            other.save(saved)  # config read, tensors not yet
        return config

    monkeypatch.setattr(storage, "_read_config", interrupted)
    assert_same(load(saved).predict(), other.predict())
    digest, calls = storage._digest, []

    def late(content):
        if not calls:
            calls.append(1)
            fitted.save(saved)  # both read, the checksum not yet compared
        return digest(content)

    monkeypatch.setattr(storage, "_digest", late)
    assert_same(load(saved).predict(), other.predict())
    assert_same(load(saved).predict(), fitted.predict())


def test_an_interrupt_between_the_two_files_comes_after_both(saved, monkeypatch, ctrl_c):
    other = make_forecaster(seed=5).fit(make_long(c=300))
    rename = Path.replace

    def press(self, target):
        rename(self, target)
        ctrl_c()

    monkeypatch.setattr(Path, "replace", press)
    with pytest.raises(KeyboardInterrupt):
        other.save(saved)
    monkeypatch.undo()
    assert names_in(saved) == FILES
    assert_same(load(saved).predict(), other.predict())


def test_what_killed_writers_left_goes_in_time(fitted, saved):
    old, young = saved / ".bsat-writing-model-1.safetensors", saved / ".bsat-writing-config-2.json"
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (0, 0))
    fitted.save(saved)
    assert names_in(saved) == sorted([*FILES, young.name])


def test_a_config_that_cannot_be_written_leaves_the_older_model_whole(fitted, saved):
    other = make_forecaster(seed=5).fit(make_long(c=300))
    other.history_.stopped = float("nan")  # which JSON has not
    with pytest.raises(ValueError, match="JSON"):
        other.save(saved)
    assert names_in(saved) == FILES
    assert_same(load(saved).predict(), fitted.predict())


# ---- folders that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 8, 100, 0.5, -1])
def test_a_flipped_bit_is_noticed(saved, at):
    path = saved / TENSORS
    data = bytearray(path.read_bytes())
    data[int(at * len(data)) if at == 0.5 else at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"checksum differs .*damaged|is a pickle"):
        load(saved)


@pytest.mark.parametrize("keep", [0, 1, 7, 9, 100, 0.5, -1])
def test_a_tensor_file_cut_short_is_refused(saved, keep):
    path = saved / TENSORS
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 if keep == 0.5 else keep])
    with pytest.raises(ValueError, match=r"checksum differs .*cut short"):
        load(saved)
    rewrite(saved)  # even if the config vouches for it
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load(saved)


@pytest.mark.parametrize("keep", [0, 1, 20, 0.5, -3])
def test_a_config_cut_short_is_refused(saved, keep):
    path = saved / CONFIG
    text = path.read_text()
    path.write_text(text[: len(text) // 2 if keep == 0.5 else keep])
    with pytest.raises(ValueError, match=r"config\.json is not JSON.*damaged"):
        load(saved)


@pytest.mark.parametrize(
    "text", ["[]", "null", "1", '"format"', "{}", '{"format": true}', '{"format": "1"}', '{"format": 0}', "[" * 100_000]
)
def test_a_config_of_something_else_is_refused(saved, text):
    (saved / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not"):
        load(saved)


def test_a_config_that_is_not_text_is_refused(saved):
    (saved / CONFIG).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load(saved)


def test_a_newer_format_is_refused(saved):
    rewrite(saved, format=2, bsat="9.0")
    with pytest.raises(ValueError, match=r"saved by a newer bsat \(9\.0, format 2\).* up to format 1\. Upgrade bsat"):
        load(saved)


class Bomb:
    """Its pickle creates a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("protocol", [0, 2, 5, "torch", "old torch"])
def test_pickles_are_refused_unread(saved, tmp_path, protocol, vouched):
    harm, path = tmp_path / "harm", saved / TENSORS
    if isinstance(protocol, int):
        path.write_bytes(pickle.dumps(Bomb(harm), protocol=protocol))
    else:
        torch.save({"weight": Bomb(harm)}, path, _use_new_zipfile_serialization=protocol == "torch")
    if vouched:
        rewrite(saved)
    message = r"is a pickle .*Refused: pickles run code" if protocol != 0 else "not a safetensors file|checksum differs"
    with pytest.raises(ValueError, match=message):
        load(saved)
    assert not harm.exists()
    if protocol == 5:
        pickle.loads(path.read_bytes()).close()
        assert harm.exists()  # it was a live one


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "..\\evil"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_config_that_names_files_elsewhere_is_refused(saved, tmp_path, name, beside):
    shutil.copy(saved / TENSORS, tmp_path / "evil.safetensors")
    digest = _digest((saved / TENSORS).read_bytes())
    rewrite(saved, files={name: digest, TENSORS: digest} if beside else {name: digest})
    with pytest.raises(ValueError, match="which is not inside the folder" if beside else "does not vouch for"):
        load(saved)


@pytest.mark.parametrize("files", [None, [], [TENSORS], "model.safetensors", {}, {TENSORS: None}, {TENSORS: "md5:0"}])
def test_a_config_that_vouches_for_nothing_is_refused(saved, files):
    rewrite(saved, files=files)
    with pytest.raises(ValueError, match=r"does not vouch for|checksum differs"):
        load(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_refused(saved, tmp_path, name):
    (saved / name).rename(tmp_path / "elsewhere")
    (saved / name).symlink_to("../elsewhere")
    with pytest.raises(ValueError, match=r"is a link that leads out of the folder, to .*elsewhere\. Refused"):
        load(saved)


def test_links_that_stay_inside_are_followed(fitted, saved, tmp_path):
    (saved / TENSORS).rename(saved / "weights")
    (saved / TENSORS).symlink_to("weights")
    (tmp_path / "link").symlink_to(saved)
    assert_same(load(tmp_path / "link").predict(), fitted.predict())


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(ValueError, match=f"has a file {name}; .* has none"):
        load(saved)
    (saved / name).mkdir()
    with pytest.raises(ValueError, match=f"has a file {name}; .* has none"):
        load(saved)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has a file config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["BpeTokenizer", "Tokenizer", "os.system", "", None, 3])
def test_an_unknown_tokenizer_is_refused(saved, kind):
    rewrite(saved, tokenizer={"kind": kind, "params": {}})
    with pytest.raises(ValueError, match=f"unknown tokenizer {kind!r}"):
        load(saved)


@pytest.mark.parametrize("name", ["network", "mean", "deviation", "conformal"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(saved, name, value):
    tensors = load_file(saved / TENSORS)
    name = next(key for key, a in tensors.items() if key.startswith(name) and a.is_floating_point())
    tensors[name].view(-1)[0] = value
    rewrite(saved, tensors)
    with pytest.raises(ValueError, match=f"tensor {name} holds numbers that are not finite"):
        load(saved)


ARRAYS = ["conformal", "deviation", "learned_until", "mean", "tail.first", "tail.offsets", "tail.values"]


def test_all_arrays_are_tried(original):
    assert sorted(name for name in load_file(original / TENSORS) if not name.startswith("network.")) == ARRAYS


@pytest.mark.parametrize("name", [*ARRAYS, "network.head.project.weight", "network.embedding.bias"])
def test_parts_that_do_not_fit_together_are_refused(saved, name):
    tensors = load_file(saved / TENSORS)
    a = tensors.pop(name)
    axis = 1 if name == "conformal" else 0  # there may be any number of scores, but of H steps
    size = a.shape[axis]
    changed = {
        "missing": None,
        "shorter": a.narrow(axis, 0, size - 1),
        "longer": torch.cat([a, a.narrow(axis, 0, 1)], axis),
        "empty": a.narrow(axis, 0, 0),
        "another shape": a.unsqueeze(-1),
    }
    accepted = []
    for change, b in changed.items():
        rewrite(saved, tensors if b is None else {**tensors, name: b.contiguous()})
        try:
            load(saved)
            accepted.append(change)
        except ValueError as error:
            assert "is not a whole forecaster" in str(error)  # noqa: PT017
    assert accepted == []


def test_offsets_that_lead_astray_are_refused(saved):
    tensors = load_file(saved / TENSORS)
    assert tensors["tail.offsets"].tolist() == [0, L, 2 * L]
    for offsets in ([0, L, 3 * L], [0, -L, 2 * L], [0, 10, 2 * L], [L, 0, 2 * L]):
        rewrite(saved, {**tensors, "tail.offsets": torch.tensor(offsets)})
        with pytest.raises(ValueError, match="is not a whole forecaster"):
            load(saved)


def entries(node, path=()):
    """The way to every entry of a config."""
    for key in node if isinstance(node, dict) else range(min(len(node), 2)):
        yield (*path, key)
        if isinstance(node[key], (dict, list)):
            yield from entries(node[key], (*path, key))


def test_whatever_an_entry_of_the_config_is_changed_to_there_is_a_clear_answer(saved):
    """Loaded (it may have been a harmless one), or a ValueError; never another exception."""
    text = (saved / CONFIG).read_text()
    tried, surprises = 0, []
    for way in entries(json.loads(text)):
        for value in (None, "x", -1, [], {"x": None}, "gone"):
            config = json.loads(text)
            parent = config
            for key in way[:-1]:
                parent = parent[key]
            if value == "gone":
                del parent[way[-1]]
            else:
                parent[way[-1]] = value
            (saved / CONFIG).write_text(json.dumps(config))
            tried += 1
            try:
                load(saved)
            except ValueError:
                pass
            except Exception as error:
                surprises.append(f"{'.'.join(map(str, way))} = {value!r}: {error!r}")
    assert tried > 300
    assert surprises == []


def test_a_device_that_is_not_there_is_not_the_fault_of_the_folder(original):
    with pytest.raises(ValueError, match=r"`device` must be 'auto', 'cpu' or 'cuda'; got 'quantum'") as refused:
        Forecaster.load(original, device="quantum")
    assert "not a whole forecaster" not in str(refused.value)


# ---- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch):
    """Whoever asks for the network gets an error."""

    def refuse(*_, **__):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", refuse)
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", refuse)


@pytest.mark.usefixtures("offline")
def test_from_pretrained_reads_a_saved_folder(fitted, original):
    for folder in (original, str(original)):
        f = Forecaster.from_pretrained(folder, device="cpu", verbose=False)
        assert_same(f.predict(level=[80]), fitted.predict(level=[80]))
        assert (f.device, f.verbose) == ("cpu", False)
        assert repr(f) == repr(fitted)


@pytest.mark.usefixtures("offline")
def test_save_pretrained_writes_a_folder_that_both_ways_read(fitted, tmp_path):
    for _ in range(2):  # also over itself
        fitted.save_pretrained(tmp_path / "model")
        assert names_in(tmp_path / "model") == sorted([*FILES, "README.md"])
        assert_same(load(tmp_path / "model").predict(level=[80]), fitted.predict(level=[80]))
        f = Forecaster.from_pretrained(tmp_path / "model", device="cpu", verbose=False)
        assert_same(f.predict(level=[80]), fitted.predict(level=[80]))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "library_name: bsat" in card
    assert "time-series-forecasting" in card


@pytest.mark.usefixtures("offline")
def test_a_folder_that_is_damaged_is_refused_by_from_pretrained(saved):
    path = saved / TENSORS
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match="checksum differs"):
        Forecaster.from_pretrained(saved)


@pytest.mark.usefixtures("offline")
def test_from_pretrained_refuses_settings_that_were_decided_by_fit(original):
    with pytest.raises(TypeError, match="horizon"):
        Forecaster.from_pretrained(original, device="cpu", horizon=24)


@pytest.mark.usefixtures("offline")
def test_push_to_hub_uploads_a_folder_that_loads(fitted, tmp_path, monkeypatch):
    class Hub:
        def __init__(self, token=None):
            assert token == "secret"

        def create_repo(self, *, repo_id, private, exist_ok):
            assert (private, exist_ok) == (True, True)
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, *, repo_id, repo_type, folder_path, commit_message, **_):
            shutil.copytree(folder_path, tmp_path / repo_id)
            return "https://huggingface.co/commit"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Hub)
    url = fitted.push_to_hub("me/household", private=True, token="secret")
    assert url == "https://huggingface.co/commit"
    assert names_in(tmp_path / "me" / "household") == sorted([*FILES, "README.md"])
    assert_same(load(tmp_path / "me" / "household").predict(level=[80]), fitted.predict(level=[80]))


@pytest.fixture
def snapshot(saved, tmp_path):
    """As the hub's cache keeps it: a folder of links to blobs."""
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in FILES:
        shutil.move(saved / name, blobs / f"blob-of-{name}")
        (snapshot / name).symlink_to(Path("../../blobs") / f"blob-of-{name}")
    return snapshot


@pytest.fixture
def downloads(snapshot, monkeypatch, offline):
    asked = []

    def hf_hub_download(repo_id, filename, **_):
        assert repo_id == "me/household"
        return str(snapshot / filename)

    def snapshot_download(repo_id, **options):
        asked.append((repo_id, options))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_from_pretrained_reads_a_repository(fitted, downloads):
    f = Forecaster.from_pretrained("me/household", revision="v2", token="secret", device="cpu", verbose=False)
    assert_same(f.predict(level=[80]), fitted.predict(level=[80]))
    ((repo_id, options),) = downloads
    assert repo_id == "me/household"
    assert (options["revision"], options["token"]) == ("v2", "secret")
    assert sorted(options["allow_patterns"]) == FILES  # and nothing else that may lie there


def test_a_repository_is_trusted_no_more_than_a_folder(downloads, snapshot, tmp_path):
    blob = (snapshot / TENSORS).resolve()
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="checksum differs"):
        Forecaster.from_pretrained("me/household")
    blob.write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    with pytest.raises(ValueError, match="is a pickle"):
        Forecaster.from_pretrained("me/household")
    assert not (tmp_path / "harm").exists()
