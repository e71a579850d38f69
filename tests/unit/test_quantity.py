"""Sizes and durations as Kubernetes and Go write them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.operator.quantity import format_bytes, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512Mi", 512 * 1024**2),
        ("1Gi", 1024**3),
        ("1.5G", 1_500_000_000),
        ("1.5Gi", 1_610_612_736),
        ("100k", 100_000),
        ("1Ki", 1024),
        ("2T", 2 * 10**12),
        (".5Ki", 512),
        ("1.", 1),
        ("0", 0),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("1073741824", 1024**3),
        (1073741824, 1024**3),
        ("0.1", 1),  # a fraction of a byte is rounded up
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1Gi",
        "1 Gi",
        "1gi",
        "1K",
        "1GB",
        "1m",
        "-1",
        -1,
        "+1",
        "1e",
        "1e-3",
        "1e3Gi",
        "Gi",
        ".",
        "1,5G",
        "0x10",
        "٣Gi",
        "9223372036854775808",
        "8Ei",
        "1e99",
        "9" * 10_000,
    ],
)
def test_not_bytes(text: str | int) -> None:
    with pytest.raises(ValueError, match="write a size such as 512Mi"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 0.5),
        ("300s", 300.0),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("0s", 0.0),
        ("1m500ms", 60.5),
        ("0.1s", 0.1),
    ],
)
def test_duration(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text", ["", "5", "5 s", "s", "-5s", "5d", "5S", "1s ", "1e3s", "5us", "٣s"]
)
def test_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="500ms, 300s or 5m"):
        parse_duration(text)


@given(st.integers(0, 2**63 - 1))
def test_plain_numbers_are_bytes(count: int) -> None:
    assert parse_bytes(str(count)) == parse_bytes(count) == count


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_duration):
        with suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (512 * 1024**2, "512 MiB"),
        (1536 * 1024**2, "1.5 GiB"),
        (2**63, "8192 PiB"),
    ],
)
def test_bytes_for_people(count: int, expected: str) -> None:
    assert format_bytes(count) == expected
