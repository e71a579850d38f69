"""Recorded traffic: arrival times, lengths and shared prefixes. Pure, but for reading files.

Two public formats, told apart by the file's name:

- ``.jsonl``, Mooncake (FAST '25): ``{"timestamp": ms, "input_length": n, "output_length": n,
  "hash_ids": [...]}``. Each hash id stands for one block of 512 prompt tokens together with
  all before it; equal ids mean equal prefixes.
- ``.csv``, Azure LLM inference trace: ``TIMESTAMP,ContextTokens,GeneratedTokens``; no prefixes.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvasir.bench.workload import Prompt, RequestSpec, TokenSource, WorkloadError, json_row

_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

MOONCAKE_BLOCK = 512
"""Prompt tokens that one hash id of the Mooncake traces stands for."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request; ``at`` is seconds since the first row of the trace.

    ``hash_ids`` is empty where the trace records no prefixes.
    """

    at: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """How a trace becomes requests.

    ``speedup`` divides the gaps between arrivals. ``length_scale`` multiplies every length, and
    the size of a shared block with it, so that prefixes stay shared in the same proportion.
    Rows whose input and output exceed ``max_total`` tokens are left out, and counted.
    """

    speedup: float = 1.0
    length_scale: float = 1.0
    max_total: int | None = None


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first ``limit`` rows. Raises WorkloadError naming file and line of a bad one."""
    readers = {".jsonl": _mooncake_rows, ".csv": _azure_rows}
    reader = readers.get(path.suffix)
    if reader is None:
        raise WorkloadError(f"{path}: a trace is a .jsonl (Mooncake) or .csv (Azure) file")
    rows: list[TraceRow] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for number, row in reader(path, file):
                if rows and row.at < rows[-1].at:
                    raise WorkloadError(f"{path}:{number}: earlier than the line before it")
                rows.append(row)
                if limit is not None and len(rows) == limit:
                    break
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8 text ({error}); convert it") from None
    except csv.Error as error:
        raise WorkloadError(f"{path}: not CSV ({error})") from None
    if not rows:
        raise WorkloadError(f"{path}: no requests in this trace")
    start = rows[0].at
    return [TraceRow(r.at - start, r.input_length, r.output_length, r.hash_ids) for r in rows]


def trace_requests(
    rows: list[TraceRow], replay: Replay, tokens: TokenSource
) -> tuple[list[RequestSpec], int]:
    """The requests of a replay, and how many rows were left out as too long."""
    block = max(1, round(MOONCAKE_BLOCK * replay.length_scale))
    specs = []
    for index, row in enumerate(rows):
        input_length = max(1, round(row.input_length * replay.length_scale))
        output_length = max(1, round(row.output_length * replay.length_scale))
        if replay.max_total is not None and input_length + output_length > replay.max_total:
            continue
        prompt = _prompt(row.hash_ids, index, input_length, block, tokens)
        specs.append(RequestSpec(Prompt(prompt), output_length, row.at / replay.speedup))
    return specs, len(rows) - len(specs)


def _prompt(
    hash_ids: tuple[int, ...], index: int, length: int, block: int, tokens: TokenSource
) -> tuple[int, ...]:
    """Equal hash ids give equal blocks; what no hash id covers is the row's own."""
    ids: list[int] = []
    for hash_id in hash_ids:
        if len(ids) >= length:
            break
        ids.extend(tokens.draw(f"block {hash_id}", block))
    if len(ids) < length:
        ids.extend(tokens.draw(f"row {index}", length - len(ids)))
    return tuple(ids[:length])


def _mooncake_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, TraceRow]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = json_row(f"{path}:{number}", line, *_MOONCAKE_FIELDS)
        try:
            parsed = TraceRow(
                at=float(row["timestamp"]) / 1000,
                input_length=int(row["input_length"]),
                output_length=int(row["output_length"]),
                hash_ids=tuple(int(i) for i in row["hash_ids"]),
            )
        except (ValueError, TypeError, OverflowError):
            raise WorkloadError(
                f"{path}:{number}: timestamp, input_length and output_length must be numbers, and"
                " hash_ids a list of them"
            ) from None
        yield number, _checked(path, number, parsed)


def _azure_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, TraceRow]]:
    reader = csv.DictReader(lines)
    if not set(_AZURE_COLUMNS) <= set(reader.fieldnames or ()):
        raise WorkloadError(
            f"{path}:1: expected the columns {','.join(_AZURE_COLUMNS)}, found"
            f" {','.join(reader.fieldnames or ()) or 'none'}"
        )
    for row in reader:
        number = reader.line_num
        if missing := [column for column in _AZURE_COLUMNS if not row[column]]:
            raise WorkloadError(f"{path}:{number}: {', '.join(missing)} is missing")
        try:
            parsed = TraceRow(
                at=_timestamp(row["TIMESTAMP"]),
                input_length=int(row["ContextTokens"]),
                output_length=int(row["GeneratedTokens"]),
            )
        except ValueError:
            raise WorkloadError(
                f"{path}:{number}: TIMESTAMP must be a date and time such as 2023-11-16 18:15:46,"
                " ContextTokens and GeneratedTokens whole numbers; found"
                f" {', '.join(row[column] for column in _AZURE_COLUMNS)}"
            ) from None
        yield number, _checked(path, number, parsed)


def _timestamp(text: str) -> float:
    """Seconds since the epoch; a time without zone is UTC."""
    instant = datetime.fromisoformat(text)
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()


def _checked(path: Path, number: int, row: TraceRow) -> TraceRow:
    if not math.isfinite(row.at):
        raise WorkloadError(f"{path}:{number}: its time must be a finite number")
    if row.input_length < 0 or row.output_length < 0:
        raise WorkloadError(f"{path}:{number}: lengths must not be negative")
    return row
