"""The one place that speaks to the API server: GETs and watches over ``kubernetes.aio``, errors as one type."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import yaml
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from treeline_epp.kube.mirror import SILENCE_S, Failure, Request

_CONNECT_S = 5.0
_LIST_S = 30.0
LONGEST_RETRY_AFTER_S = 60.0
"""A server that asks for more patience than this is asked again all the same."""
_NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError, ConfigException)


class NoCluster(Exception):
    """There is no way to an API server; the message says what was tried."""


class KubeClient:
    """An API server and our identity there, from a kubeconfig or from the pod's own service account.

    Credentials are read again when the server no longer takes them.
    """

    def __init__(
        self, kubeconfig: Path | None = None, context: str | None = None, *, silence_s: float = SILENCE_S
    ) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._silence_s = silence_s
        self._api: ApiClient | None = None

    async def open(self) -> None:
        """Read the credentials. Raises :class:`NoCluster`."""
        configuration = Configuration()
        in_pod = self._kubeconfig is None and bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
        file = "" if in_pod else self._file()
        try:
            if in_pod:
                load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                await load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=file,
                    context=self._context,
                    client_configuration=configuration,
                    persist_config=False,
                )
            # Chains and names are verified; what is waived is the letter of RFC 5280, which many clusters' own
            # certificates do not keep and Python asks for since 3.13.
            configuration.disable_strict_ssl_verification = True
            self._api = ApiClient(configuration)
        except Exception as error:  # what can be wrong with a file has all sorts of types in the library
            where = file or "the service account of this pod"
            message = f"no Kubernetes credentials from {where}: {_what_is_wrong(error)}"
            raise NoCluster(
                f"{message}; correct it, or give another --kubeconfig FILE or --context NAME"
            ) from error

    def _file(self) -> str:
        """The kubeconfig, or several as $KUBECONFIG separates them. Raises :class:`NoCluster` where there is none."""
        if self._kubeconfig is not None:
            if not self._kubeconfig.is_file():
                raise NoCluster(f"--kubeconfig: there is no file {self._kubeconfig}")
            return str(self._kubeconfig)
        default = os.environ.get("KUBECONFIG") or "~/.kube/config"
        if not any(Path(name).expanduser().is_file() for name in default.split(os.pathsep)):
            raise NoCluster(
                f"no Kubernetes credentials: this is no pod, and there is no file {default}; give --kubeconfig FILE"
            )
        return default

    async def close(self) -> None:
        """Give all connections back."""
        api, self._api = self._api, None
        if api is not None:
            await api.close()  # type: ignore[no-untyped-call]

    async def get(self, request: Request) -> bytes:
        """The whole answer. Raises :class:`Failure`."""
        limits = aiohttp.ClientTimeout(total=_LIST_S, sock_connect=_CONNECT_S)
        async with self._send(request, limits) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def watch(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """The answer as it comes, in pieces of any length. Raises :class:`Failure`, also when it falls silent."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._silence_s)
        async with self._send(request, limits) as response:
            yield response.content.iter_any()

    @contextlib.asynccontextmanager
    async def _send(
        self, request: Request, limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._api is None:
            await self.open()
        api = self._api
        assert api is not None
        try:
            method, url, headers, body, form = await api.param_serialize(
                "GET",
                request.path,
                query_params=list(request.query.items()),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
            answer = await api.call_api(method, url, headers, body, form, _request_timeout=limits)
            async with answer.response as response:
                if response.status != 200:
                    raise await self._refused(response, api)
                yield response
        except _NO_ANSWER as error:
            if api is not self._api:  # another request was told that the credentials are not good
                raise Failure(0, "the connection was given up for new credentials") from error
            raise Failure(0, str(error) or type(error).__name__) from error
        except RuntimeError as error:
            if api is self._api:
                raise
            raise Failure(0, "the connection was given up for new credentials") from error

    async def _refused(self, response: aiohttp.ClientResponse, api: ApiClient) -> Failure:
        if response.status == 401 and api is self._api:
            await self.close()  # a token was rotated: the next request reads it again
        try:
            message = msgspec.json.decode(await response.read(), type=_Status).message
        except (msgspec.MsgspecError, UnicodeDecodeError, aiohttp.ClientError, TimeoutError):
            message = ""
        retry_after = response.headers.get("retry-after", "")
        return Failure(
            response.status,
            message or response.reason or "no reason given",
            min(LONGEST_RETRY_AFTER_S, float(retry_after)) if retry_after.isdecimal() else 0.0,
        )


def _what_is_wrong(error: Exception) -> str:
    """One line, also where the file is something else altogether."""
    if isinstance(error, (ConfigException, OSError, ValueError, yaml.YAMLError)):
        return " ".join(str(error).split())
    return "it is no kubeconfig"


class _Status(msgspec.Struct):
    message: str = ""
