"""Fixtures for tests of the picker's connections to engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.epp_io import FakeEngine, engines
from treeline_epp.endpoints.http_client import HttpClient


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with engines(1) as (fake,):
        yield fake
