"""What several tests of the picker's ways to engines begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from support.epp_io import FakeEngine, engines
from support.http import client as local_client


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with local_client(trust_env=False) as client:
        yield client


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with engines(1) as (fake,):
        yield fake
