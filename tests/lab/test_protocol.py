"""What an experiment is, and its hash."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from bsat.lab import protocol
from bsat.lab.models import MODELS, SPACES
from bsat.lab.protocol import ENCODINGS, Experiment, Protocol
from bsat.search.space import Space, Whole
from bsat.tokens import BSplineTokenizer

EVEN = ("bsat-even", "bsat-even-spline")


def test_the_defaults_are_the_papers():
    assert Protocol().to_dict() == {
        "horizon": 192,
        "lookback": 720,
        "space": "paper",
        "seeds": [2025, 2026, 2027],
        "max_epochs": 100,
        "grace": 20,
        "reduction": 3,
        "selection": 5,
    }


def test_the_hash_is_that_of_canonical_json():
    e = Experiment("ETTh1", "uds", 90, "lpe", 4, Protocol())
    more = {"protocol": e.protocol.hash, "definition": MODELS["uds"].to_dict()}
    text = json.dumps({"format": 1, **e.to_dict(), **more}, sort_keys=True, separators=(",", ":"))
    assert e.hash == hashlib.sha256(text.encode()).hexdigest()
    assert e.short == e.hash[:12]


def test_hashes_do_not_change():
    """Stores of users carry them. If this fails, FORMAT must be raised."""
    assert protocol.FORMAT == 1
    assert Protocol().short == "0753241ec7b5"
    assert Experiment("etth1").short == "1c19d2aa671e"


def test_the_hash_is_the_same_in_another_process():
    code = "from bsat.lab import Experiment; print(Experiment('etth1').hash)"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert got == Experiment("etth1").hash


def test_every_field_counts(monkeypatch):
    monkeypatch.setitem(SPACES, "small", Space(n_layers=Whole(2, 3)))
    base = Experiment("etth1")
    others = [
        Experiment("etth1", trials=4),
        Experiment("ecl"),
        Experiment("etth1", "uds"),
        Experiment("etth1", tokens=90),
        Experiment("etth1", encoding="lpe"),
        *(
            base.under(**{name: value})
            for name, value in {
                "horizon": 96,
                "lookback": 360,
                "space": "small",
                "seeds": (2025,),
                "max_epochs": 3,
                "grace": None,
                "reduction": 4,
                "selection": 1,
            }.items()
        ),
    ]
    assert len({e.hash for e in [base, *others]}) == len(others) + 1
    assert {e.protocol.hash == base.protocol.hash for e in others[:5]} == {True}
    assert [e.study == base.study for e in others] == [True] + [False] * (len(others) - 1)


def test_what_a_name_stands_for_counts(monkeypatch):
    experiment, protocol = Experiment("etth1").hash, Protocol().hash
    monkeypatch.setitem(MODELS, "bsat", replace(MODELS["bsat"], tokens={**MODELS["bsat"].tokens, "clip_factor": 1.0}))
    assert Experiment("etth1").hash != experiment
    assert Protocol().hash == protocol
    monkeypatch.setitem(SPACES, "paper", Space(n_layers=Whole(2, 3)))
    assert Protocol().hash != protocol


def test_spelling_and_order_do_not_count():
    assert Experiment("ETTh1 ", "BSAT", 45, "L-RoPE+LPE") == Experiment("etth1")
    assert Protocol(seeds=[2027, 2025, 2026]).hash == Protocol().hash
    assert Protocol(grace=None, reduction=4).hash == Protocol(grace=None).hash


def test_there_and_back():
    protocol = Protocol(seeds=(1,), grace=None)
    assert Protocol.from_dict(json.loads(json.dumps(protocol.to_dict()))) == protocol
    with pytest.raises(ValueError, match="missing: max_epochs; unknown: max_epoch"):
        Protocol.from_dict({"max_epoch" if k == "max_epochs" else k: v for k, v in Protocol().to_dict().items()})


def test_differences_in_words():
    assert Protocol(max_epochs=4).differences(Protocol()) == "max_epochs 4 instead of 100"


def test_encodings_are_the_models():
    from bsat.model import ENCODINGS as OF_THE_MODEL

    assert set(ENCODINGS) == set(OF_THE_MODEL)
    assert list(MODELS) == ["bsat", "bsat-safe", "bsat-spline", *EVEN, "bsat-unit", "uds", "patchtst"]


@pytest.mark.parametrize("name", EVEN)
def test_even_knots_are_even(name):
    tokenizer = MODELS[name].make_tokenizer(45)
    assert isinstance(tokenizer, BSplineTokenizer)
    bent = np.cumsum(np.random.default_rng(0).standard_cauchy((50, 720)), axis=1)
    knots = tokenizer.fit(bent).transform(bent).knots
    inner = knots[:, tokenizer.degree : -tokenizer.degree]
    np.testing.assert_allclose(np.diff(inner), 719 / (45 - tokenizer.degree), rtol=1e-6)
    assert MODELS[name].kin == MODELS[name.replace("-even", "")].kin, "they train side by side"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"dataset": "etth2"}, r"one of etth1, .*got 'etth2'\. Did you mean etth1"),
        ({"model": "informer"}, "`model` must be one of 'bsat', .*'uds', 'patchtst'; got 'informer'"),
        ({"encoding": "alibi"}, "`encoding` must be one of 'lpe'.*got 'alibi'"),
        ({"tokens": 720}, "`tokens` must be at least 8 and fewer than the lookback = 720; got 720"),
        ({"tokens": 7}, "`tokens` must be at least 8 and fewer"),
        ({"tokens": 720, "model": "uds"}, "`tokens` must be at least 2 and fewer"),
        ({"trials": 0}, "`trials` must be at least 1; got 0"),
        ({"tokens": 0}, "`tokens` must be at least 1; got 0"),
        ({"model": "patchtst", "tokens": 50}, "divide it, for PatchTST's patches; got 50.*45 or 90 or 180"),
    ],
)
def test_experiments_that_cannot_be(words, message):
    with pytest.raises(ValueError, match=message):
        Experiment(**{"dataset": "etth1", **words})


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"max_epochs": 0}, ValueError, "`max_epochs` must be at least 1; got 0"),
        ({"max_epochs": 2.0}, TypeError, "`max_epochs` must be a whole number"),
        ({"seeds": ()}, ValueError, "`seeds` must be a list of at least one"),
        ({"seeds": 2025}, ValueError, "`seeds` must be a list of at least one"),
        ({"seeds": (1, 1)}, ValueError, "`seeds` must differ"),
        ({"seeds": (2**63, 1)}, ValueError, r"`seeds` must be less than 2\^63; got 9223372036854775808\. Lower"),
        ({"space": ""}, ValueError, "`space` must be one of 'paper'; got ''"),
        ({"reduction": 1}, ValueError, "`reduction` must be at least 2"),
    ],
)
def test_protocols_that_cannot_be(words, error, message):
    with pytest.raises(error, match=message):
        Protocol(**words)
