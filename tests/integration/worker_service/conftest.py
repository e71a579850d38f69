"""A worker with a played model, and a router's session with it."""

from collections.abc import AsyncIterator

import pytest

from helpers.local_worker import LocalWorker, RouterSession, local_worker, router_session


@pytest.fixture
async def worker() -> AsyncIterator[LocalWorker]:
    async with local_worker() as worker:
        yield worker


@pytest.fixture
async def session(worker: LocalWorker) -> AsyncIterator[RouterSession]:
    async with router_session(worker.stub) as session:
        yield session
