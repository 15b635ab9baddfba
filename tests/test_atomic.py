"""Files that are whole or not there, whoever writes, reads, dies or presses Ctrl-C."""

import os
import signal
import stat
import threading

import numpy as np
import pytest
import torch

from bsat.atomic import alone, later_interrupt, leftovers, replacing, save_tensors, whole
from conftest import full_disk


def test_what_is_being_written_is_not_among_the_whole(tmp_path):
    (tmp_path / "1.json").touch()
    with replacing(tmp_path / "0.json") as temporary:
        assert whole(tmp_path, "*.json") == [tmp_path / "1.json"]
        assert list(leftovers(tmp_path)) == list(leftovers(tmp_path, "0")) == [temporary]
        assert list(leftovers(tmp_path, "1")) == list(leftovers(tmp_path, age=60)) == []
    assert whole(tmp_path, "*.json") == [tmp_path / "0.json", tmp_path / "1.json"]
    assert list(leftovers(tmp_path)) == []


@pytest.mark.parametrize("stem", ["系" * 80, "a" * 240, "[odd]*?"])
def test_any_name_of_a_file_will_do(tmp_path, stem):
    """Names are counted in bytes: 80 letters may be 240 of them."""
    with replacing(tmp_path / f"{stem}.csv") as temporary:
        temporary.write_text("content")
        assert list(leftovers(tmp_path, stem)) == [temporary]
    assert (tmp_path / f"{stem}.csv").read_text() == "content"


def test_permissions_are_those_of_any_new_file(tmp_path):
    """And the process's own mask is never touched, in which another thread would make its files."""
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "a") as temporary:
            temporary.write_text("content")
    finally:
        assert os.umask(before) == 0o027
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("tensors", [{"a": np.ones(1000)}, {"a": torch.ones(1000)}], ids=["numpy", "torch"])
def test_a_full_disk_is_an_error_of_the_system(tmp_path, tensors):
    with full_disk(1000), pytest.raises(OSError, match=r"[Tt]oo large"), replacing(tmp_path / "a") as temporary:
        save_tensors(tensors, temporary)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_waits_for_the_end(ctrl_c):
    done = []

    def work():
        with later_interrupt():
            ctrl_c()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    with later_interrupt():
        done.append("again")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_other_threads_there_is_no_interrupt_to_wait_for():
    done = []

    def work():
        with later_interrupt():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


def test_one_at_a_time(tmp_path):
    with alone(tmp_path / "a", "work"):
        with pytest.raises(BlockingIOError, match=r"work in .* is being worked on by another process"):
            alone(tmp_path / "a", "work").__enter__()
        with alone(tmp_path / "a", "other"), alone(tmp_path / "b", "work"):
            pass
    with alone(tmp_path / "a", "work"):
        pass
    assert list(tmp_path.iterdir()) == []
