"""Kubernetes quantities and Go durations, as users write them in a ModelService.

Pure. A quantity is read as whole bytes and a duration as seconds; what cannot be read is
a ValueError whose message says what is allowed.
"""

import re
from decimal import ROUND_CEILING, Decimal

_SUFFIXES = {
    "": 1,
    **{suffix: 1000 ** (power + 1) for power, suffix in enumerate("kMGTPE")},
    **{suffix + "i": 1024 ** (power + 1) for power, suffix in enumerate("KMGTPE")},
}
QUANTITY_PATTERN = (
    r"([0-9]{1,20}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:([KMGTPE]i|[kMGTPE])|[eE]([0-9]{1,2}))?"
)
"""What parse_bytes reads. RE2 reads this pattern alike."""
_LARGEST_QUANTITY = 2**63 - 1
"""The largest value that the Kubernetes API server stores."""

DURATION_PATTERN = r"(?:(?:[0-9]{1,9}(?:\.[0-9]{1,6})?m?s)|(?:[0-9]{1,6}(?:\.[0-9]{1,6})?[mh]))+"
"""What parse_duration reads: whole nanoseconds, as Go has them. RE2 reads this pattern alike."""
_DURATION_PART = re.compile(r"([0-9.]+)(ms|s|m|h)")
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}


def parse_bytes(text: str | int) -> int:
    """Bytes of a Kubernetes quantity such as 512Mi, 1.5G, 1e9 or a plain number.

    A fraction of a byte is rounded up, as Kubernetes does. The milli suffix is refused: a
    thousandth of a byte is always a mistake.
    """
    match = re.fullmatch(QUANTITY_PATTERN, str(text))
    if match is None:
        raise ValueError("write a size such as 512Mi, 1Gi or 1.5G")
    number, suffix, exponent = match.groups()
    scale = 10 ** int(exponent) if exponent else _SUFFIXES[suffix or ""]
    value = int((Decimal(number) * scale).to_integral_value(rounding=ROUND_CEILING))
    if value > _LARGEST_QUANTITY:
        raise ValueError("larger than 2^63 - 1 bytes; write a size such as 512Mi, 1Gi or 1.5G")
    return value


_AMOUNT = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]+))?")
_FRACTIONS = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}


def parse_amount(text: str | int) -> Decimal:
    """Any Kubernetes quantity that is not negative, exactly: 500m, 0.5, 64Mi, 2e3."""
    match = _AMOUNT.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is no quantity; write one such as 500m, 2 or 64Mi")
    number, suffix, exponent = match.groups()
    if exponent:
        return Decimal(f"{number}e{exponent}")
    return Decimal(number) * (_FRACTIONS.get(suffix or "") or _SUFFIXES[suffix or ""])


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 500ms, 300s, 5m or 1h30m."""
    if re.fullmatch(DURATION_PATTERN, text) is None:
        raise ValueError("write a duration with its unit, such as 500ms, 300s or 5m")
    return float(
        sum(Decimal(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    )


def format_bytes(count: int) -> str:
    """A size for people, in binary units: 512 MiB, 1.5 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
