"""A prefill and a decode worker that are connected."""

from collections.abc import AsyncIterator

import pytest

from helpers.fake_runner import SLOT_BYTES
from helpers.local_worker import BLOCK_SIZE
from helpers.transfer_pair import Pair, connected
from kvasir.worker.transfer import layout


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames have the 4 blocks of one chunk, however many chunks are done at once."""
    monkeypatch.setattr(layout, "FRAME_BYTES", 4 * BLOCK_SIZE * SLOT_BYTES)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with connected() as pair:
        yield pair
