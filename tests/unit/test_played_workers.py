"""The workers that the operator's tests play remember what they were told, however that ended.

Those tests kill the operator, and with it whoever is writing, at any point.
"""

import asyncio
from pathlib import Path

import pytest

from helpers.operator_process import PlayedWorkers
from kvasir.operator.cluster.observed import Pod

POD = Pod("decode-1", "decode", "smollm2-decode", ready=True)


class Killed(BaseException):
    """As if the process had ended here."""


def killed(*_: object, **__: object) -> None:
    raise Killed


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedWorkers:
    monkeypatch.setenv("KVASIR_TEST_TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("KVASIR_TEST_METRICS", str(tmp_path / "metrics.json"))
    return PlayedWorkers()


def is_draining(workers: PlayedWorkers) -> bool:
    return asyncio.run(workers.observe([POD])).loads[POD.name].draining


@pytest.mark.parametrize("before", [(), ("drain",), ("drain", "undrain")])
@pytest.mark.parametrize("point", ["write_text", "replace"])
def test_what_was_told_before_a_kill_holds(
    workers: PlayedWorkers, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], point: str
) -> None:
    for what in before:
        asyncio.run(getattr(workers, what)(POD))
    expected = is_draining(workers)
    assert expected is (before == ("drain",))
    with monkeypatch.context() as patch:
        patch.setattr(Path, point, killed)
        with pytest.raises(Killed):
            asyncio.run((workers.undrain if expected else workers.drain)(POD))
    assert is_draining(workers) is expected
    asyncio.run((workers.undrain if expected else workers.drain)(POD))
    assert is_draining(workers) is not expected
