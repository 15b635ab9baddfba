"""Downloads against a server on this machine: whole and checked, or not at all."""

import errno
import hashlib
import os
import socket
import stat
import threading
import zipfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from bsat.data import download
from bsat.data.download import DownloadError, fetch, progress, unpacked

BODY = np.random.default_rng(0).bytes(600_000)
HASH = hashlib.sha256(BODY).hexdigest()


class Server:
    """What the next answers are: a body, ranges or not, cuts, errors; and what was asked."""

    def __init__(self):
        self.files = {"/file.bin": BODY}
        self.ranges, self.tag, self.cuts, self.errors, self.asked = True, '"one"', [], [], []
        self.kind = "application/octet-stream"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.http.server_port}/file.bin"

    def answer(self, request):
        self.asked.append((request.path, request.headers.get("Range")))
        if self.errors:
            request.send_error(self.errors.pop(0))
            return
        body = self.files.get(request.path)
        if body is None:
            request.send_error(404)
            return
        start, wanted = 0, request.headers.get("Range")
        same = request.headers.get("If-Range") in (None, self.tag)
        if wanted and self.ranges and same:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                request.send_error(416)
                return
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(body) - start))
        request.send_header("Content-Type", self.kind)
        if self.tag:
            request.send_header("ETag", self.tag)
        request.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(body)
        with suppress(ConnectionError):  # who asked may have seen enough
            request.wfile.write(body[start:end])

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.close()


def get(server, target, **options):
    options = {"size": len(BODY), "sha256": HASH, "show": False, "pause": 0.0, "timeout": 60.0} | options
    addresses = options.pop("addresses", [server.address])
    return fetch(addresses, target, **options)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_comes_whole_and_alone(server, tmp_path):
    assert get(server, tmp_path / "new" / "f.bin") == HASH
    assert (tmp_path / "new" / "f.bin").read_bytes() == BODY
    assert names(tmp_path / "new") == ["f.bin"]


def test_unknown_size_and_hash_are_told(server, tmp_path):
    assert get(server, tmp_path / "f.bin", size=None, sha256=None) == HASH


def test_the_bar_goes_to_the_error_stream(server, tmp_path, capsys):
    get(server, tmp_path / "f.bin", show=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "f.bin" in err or err.strip() == ""  # a bar that is not on a terminal may say nothing
    with progress("a" * 50, True) as report:
        report(5, None)
        report(7, 10)


def test_a_wrong_file_is_deleted_and_both_hashes_named(server, tmp_path):
    with pytest.raises(DownloadError, match=f"must have sha256 {'0' * 64}; got {HASH}"):
        get(server, tmp_path / "f.bin", sha256="0" * 64)
    assert names(tmp_path) == []


def test_a_wrong_size_is_told_before_anything_comes(server, tmp_path):
    with pytest.raises(DownloadError, match="must have 7 bytes; the server offers 600,000"):
        get(server, tmp_path / "f.bin", size=7)
    assert names(tmp_path) == []


def test_a_cut_connection_is_resumed(server, tmp_path):
    server.cuts = [200_000, 100_000]
    get(server, tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert [r for _, r in server.asked] == [None, "bytes=200000-", "bytes=300000-"]


def test_it_starts_anew_where_ranges_are_ignored(server, tmp_path):
    server.cuts, server.ranges = [200_000], False
    get(server, tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert [r for _, r in server.asked] == [None, "bytes=200000-"]


def stopped(server, target):
    """A download that was given up after 200,000 bytes."""
    server.cuts = [200_000, 0]
    with pytest.raises(DownloadError, match="200,000 bytes are kept"):
        get(server, target, tries=2)
    assert names(target.parent) == ["f.bin.part", "f.bin.part.json"]
    server.asked.clear()


def test_a_later_call_goes_on(server, tmp_path):
    stopped(server, tmp_path / "f.bin")
    get(server, tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert [r for _, r in server.asked] == ["bytes=200000-"]
    assert names(tmp_path) == ["f.bin"]


@pytest.mark.parametrize("tagged", [True, False])
def test_it_starts_anew_if_the_file_has_changed(server, tmp_path, tagged):
    server.tag = '"one"' if tagged else None
    stopped(server, tmp_path / "f.bin")
    server.files["/file.bin"] = other = BODY[::-1] + b"more"
    server.tag = '"two"' if tagged else None
    get(server, tmp_path / "f.bin", size=None, sha256=None)
    assert (tmp_path / "f.bin").read_bytes() == other


def test_a_part_of_unknown_origin_is_not_used(server, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(b"x" * 1000)
    get(server, tmp_path / "f.bin")
    assert [r for _, r in server.asked] == [None]


def test_a_part_survives_addresses_that_do_not_have_it(server, tmp_path):
    stopped(server, tmp_path / "f.bin")
    moved = server.address.replace("file.bin", "moved.bin")
    get(server, tmp_path / "f.bin", addresses=[moved, server.address])
    assert server.asked == [("/moved.bin", None), ("/file.bin", "bytes=200000-")]


def test_a_busy_server_is_asked_again(server, tmp_path):
    server.errors = [503, 429]
    get(server, tmp_path / "f.bin")
    assert len(server.asked) == 3


def test_404_names_the_addresses(server, tmp_path):
    one, two = (server.address.replace("file.bin", name) for name in ("a.bin", "b.bin"))
    with pytest.raises(DownloadError, match=rf"f.bin is not at {one} \(HTTP 404 Not Found\) nor at {two}"):
        get(server, tmp_path / "f.bin", addresses=[one, two])
    assert len(server.asked) == 2  # that will not change
    assert names(tmp_path) == []


def test_a_web_page_is_no_file(server, tmp_path):
    server.kind = "text/html; charset=utf-8"
    with pytest.raises(DownloadError, match=r"f.bin is not at .*\(answers with a web page\)"):
        get(server, tmp_path / "f.bin", size=None, sha256=None)
    assert names(tmp_path) == []


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # as long as it is bound, nobody else listens there
        with pytest.raises(DownloadError, match=f"{port}/x could not be read in 3 tries: .*refused"):
            fetch([f"http://127.0.0.1:{port}/x"], tmp_path / "x", show=False, tries=3, pause=0.0)
    assert names(tmp_path) == []


def test_ctrl_c_keeps_the_part(server, tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    server.cuts = [200_000]
    monkeypatch.setattr(download.time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        get(server, tmp_path / "f.bin", show=True)
    assert "the same command goes on" in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "f.bin.part").stat().st_size == 200_000


def test_a_full_disk_is_told(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: FullDisk)
    with pytest.raises(DownloadError, match=r"is full .*600,000 bytes, 100 are free.*BSAT_DATASETS"):
        get(server, tmp_path / "f.bin")
    assert names(tmp_path) == []


class FullDisk:
    free = 100


def test_a_folder_that_is_none(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match=r"must be a folder that can be written to .*BSAT_DATASETS"):
        get(server, tmp_path / "file" / "f.bin")


def test_a_read_only_folder(server, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")  # root, who may run this, could write anywhere

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    with pytest.raises(DownloadError, match=r"must be a folder that can be written to \(Read-only file system\)"):
        get(server, tmp_path / "f.bin")
    assert server.asked == []


def held(part, content=b"half"):
    """A part that another process is writing: its lock is one of another open file."""
    fcntl = pytest.importorskip("fcntl")
    part.write_bytes(content)
    other = part.open("ab")
    fcntl.flock(other, fcntl.LOCK_EX)
    return other


@pytest.mark.parametrize("ends_well", [True, False])
def test_the_second_waits_for_the_first(server, tmp_path, monkeypatch, capsys, ends_well):
    target, part, naps = tmp_path / "f.bin", tmp_path / "f.bin.part", []
    with held(part) as other:

        def nap(seconds):
            naps.append(seconds)
            if len(naps) == 3:
                if ends_well:
                    part.write_bytes(BODY)
                    os.replace(part, target)
                other.close()

        monkeypatch.setattr(download.time, "sleep", nap)
        assert get(server, target, show=True) == HASH
    err = capsys.readouterr().err.replace("\n", " ")
    assert err.count(f"waiting for another process that is downloading to {part}") == 1
    assert len(naps) == 3
    assert len(server.asked) == (0 if ends_well else 1)
    assert target.read_bytes() == BODY
    assert names(tmp_path) == ["f.bin"]


def test_ctrl_c_ends_the_wait(server, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(download.time, "sleep", stop)
    with held(tmp_path / "f.bin.part"), pytest.raises(KeyboardInterrupt):
        get(server, tmp_path / "f.bin")
    assert (tmp_path / "f.bin.part").read_bytes() == b"half"


def test_the_wait_for_one_that_does_nothing_ends(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PATIENCE", 0.0)
    with (
        held(tmp_path / "f.bin.part"),
        pytest.raises(
            DownloadError, match=r"by another process, .*nothing for 0 seconds. End it \(`fuser .*f.bin.part`"
        ),
    ):
        get(server, tmp_path / "f.bin")
    assert (tmp_path / "f.bin.part").read_bytes() == b"half"
    assert server.asked == []


def test_the_next_ones_part_is_not_taken_away(server, tmp_path, monkeypatch):
    """Another process begins in the moment in which this one has got the target."""
    part, notes, replace, others = tmp_path / "f.bin.part", tmp_path / "f.bin.part.json", os.replace, []

    def replace_and_begin(*names):
        replace(*names)
        others.append(held(part, b""))
        notes.write_text("{}")

    monkeypatch.setattr(download.os, "replace", replace_and_begin)
    assert get(server, tmp_path / "f.bin") == HASH
    (other,) = others
    with other:
        assert os.path.samestat(part.stat(), os.fstat(other.fileno()))
    assert notes.exists()


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_part_that_goes_before_it_is_locked_is_not_used(server, tmp_path, monkeypatch, ends_well):
    """Another process makes its part the target, or deletes it, between this one's opening and locking it."""
    fcntl = pytest.importorskip("fcntl")
    target, part, flock, calls = tmp_path / "f.bin", tmp_path / "f.bin.part", fcntl.flock, []

    def late(*arguments):
        if not calls and ends_well:
            part.write_bytes(BODY)
            os.replace(part, target)
        elif not calls:
            part.unlink()
        calls.append(arguments)
        return flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    assert get(server, target) == HASH
    assert len(calls) == 2
    assert len(server.asked) == (0 if ends_well else 1)
    assert names(tmp_path) == ["f.bin"]


def test_a_target_that_is_there_is_checked(server, tmp_path):
    (tmp_path / "f.bin").write_bytes(b"another")
    get(server, tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY
    get(server, tmp_path / "f.bin")
    assert len(server.asked) == 1


def test_where_there_are_no_locks_nobody_waits(server, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert get(server, tmp_path / "f.bin") == HASH
    assert names(tmp_path) == ["f.bin"]


# ---- archives --------------------------------------------------------------------------------------------------------


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as content:
        for name, text in members.items():
            content.writestr(name, text)
    return path


def unpack(archive, member, **options):
    with unpacked(archive, member, archive.parent / "out", show=False, **options) as (file, digest):
        return file.read(), digest


@pytest.mark.parametrize("inside", ["a.csv", "folder/a.csv"])
def test_only_the_member_is_unpacked(tmp_path, inside):
    archive = make_zip(tmp_path / "z.zip", {inside: "one", "b.csv": "two"})
    assert unpack(archive, "a.csv", size=3) == (b"one", hashlib.sha256(b"one").hexdigest())
    assert names(tmp_path / "out") == []


def test_errors_while_a_member_is_read_are_not_the_archives(tmp_path):
    archive = make_zip(tmp_path / "z.zip", {"a.csv": "one"})
    with pytest.raises(RuntimeError, match="mine"), unpacked(archive, "a.csv", tmp_path, show=False):
        raise RuntimeError("mine")


@pytest.mark.parametrize("bad", ["../evil.csv", "x/../../evil.csv", "/etc/evil.csv", "C:\\evil.csv", "..\\evil.csv"])
def test_a_member_that_climbs_out_is_refused(tmp_path, bad):
    archive = make_zip(tmp_path / "z.zip", {"a.csv": "one", bad: "two"})
    with pytest.raises(DownloadError, match=r"evil.csv' is a link or leads elsewhere. Nothing was unpacked"):
        unpack(archive, "a.csv")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [archive]


def test_a_link_is_refused(tmp_path):
    link = zipfile.ZipInfo("a.csv")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = make_zip(tmp_path / "z.zip", {link: "/etc/passwd"})
    with pytest.raises(DownloadError, match="is a link"):
        unpack(archive, "a.csv")


def test_archives_that_are_not_what_they_should_be(tmp_path):
    archive = make_zip(tmp_path / "z.zip", {"a.csv": "one" * 10_000, "1/b.csv": "", "2/b.csv": ""})
    with pytest.raises(DownloadError, match=r"one member of the name c.csv; it has 0"):
        unpack(archive, "c.csv")
    with pytest.raises(DownloadError, match=r"one member of the name b.csv; it has 2"):
        unpack(archive, "b.csv")
    with pytest.raises(DownloadError, match="must have 3 bytes; it has 30,000"):
        unpack(archive, "a.csv", size=3)
    with pytest.raises(DownloadError, match=f"must have sha256 {'0' * 64}; got [0-9a-f]{{64}}"):
        unpack(archive, "a.csv", sha256="0" * 64)
    content = bytearray(archive.read_bytes())
    content[60] ^= 255
    for broken in (bytes(content), archive.read_bytes()[:-30], b"<html>"):
        archive.write_bytes(broken)
        with pytest.raises(DownloadError, match=r"is not a zip that can be read"):
            unpack(archive, "a.csv")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [archive]
