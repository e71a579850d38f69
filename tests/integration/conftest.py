"""Fixtures of the integration tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from helpers.dispatcher_stage import Stage, until


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Nothing of the test's own making may be left on the loop when it ends."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        yield Stage(tmp_path, stack)
    before.update(task for task in [asyncio.current_task()] if task is not None)
    await until(lambda: asyncio.all_tasks() <= before)
