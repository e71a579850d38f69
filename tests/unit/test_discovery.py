"""The discovery file: what it may say, and when it is read again."""

import logging
import os
from pathlib import Path

import pytest

from kvasir.router.discovery import WorkerAddress, WorkersFile, parse_workers

GOOD = '{"workers": [{"id": "w0", "address": "127.0.0.1:1"}]}'
W0 = (WorkerAddress("w0", "127.0.0.1:1"),)


def replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "file"),
        ("[]", "file"),
        ('{"workers": [', "file"),
        ("{}", "workers"),
        ('{"workers": [{"id": "a"}]}', "address"),
        ('{"workers": [{"id": "", "address": "h:1"}]}', "id"),
        ('{"workers": [{"id": "a", "address": "no-port"}]}', "address"),
        ('{"workers": [{"id": "a", "address": "h:1", "zone": "x"}]}', "zone"),
        (
            '{"workers": [{"id": "a", "address": "h:1"}, {"id": "a", "address": "h:2"}]}',
            "same id",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_workers(text.encode())


def test_a_file_is_read_once_for_each_change(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    file = WorkersFile(path)
    assert file.poll() is None
    replace(path, GOOD)
    assert file.poll() == W0
    assert file.poll() is None
    replace(path, '{"workers": []}')
    assert file.poll() == ()


def test_a_replacement_of_equal_size_and_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text(GOOD)
    file = WorkersFile(path)
    assert file.poll() == W0
    status = path.stat()
    replace(path, GOOD.replace("w0", "w1"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.poll() == (WorkerAddress("w1", "127.0.0.1:1"),)


def test_a_broken_or_missing_file_keeps_the_last_list_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers.json"
    path.write_text(GOOD)
    file = WorkersFile(path)
    assert file.poll() == W0
    with caplog.at_level(logging.WARNING):
        replace(path, '{"workers": [')
        assert [file.poll() for _ in range(5)] == [None] * 5
        assert len(caplog.records) == 1
        path.unlink()
        assert [file.poll() for _ in range(5)] == [None] * 5
        assert len(caplog.records) == 2
    replace(path, GOOD)
    assert file.poll() == W0
