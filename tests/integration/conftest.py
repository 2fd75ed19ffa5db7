import pytest
from openai import AsyncOpenAI, OpenAI
from support.stack import Stack, running_stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Two runtimes, the picker and Envoy, shared by a module's tests; a test must restart what it ends."""
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def client(stack: Stack):
    """The official client, through the gateway. It does not retry: an error is an error."""
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
        yield openai


@pytest.fixture
async def aclient(stack: Stack):
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
        yield openai
