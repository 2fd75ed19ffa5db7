"""Credentials for an API server, from a kubeconfig or from the pod's ServiceAccount."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treeline_kube.errors import NoCluster

if TYPE_CHECKING:
    from kubernetes.aio.client.configuration import Configuration

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_SELF_EXPLAINING: Final = frozenset({"ConfigException", "ParserError", "ScannerError"})
"""Errors of libraries whose message explains what is wrong with a file."""


class Credentials:
    """Fills a configuration from `kubeconfig`, else $KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config."""

    def __init__(
        self, configuration: Configuration, kubeconfig: str | Path | None = None, context: str | None = None
    ) -> None:
        self._configuration = configuration
        self._given = str(kubeconfig or "")
        self._context = context
        named = self._given or os.environ.get("KUBECONFIG", "")
        in_pod = not context and bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
        self._file = named or ("" if in_pod else "~/.kube/config")
        """The kubeconfig, or several as $KUBECONFIG separates them; empty for the pod's own account."""

    async def load(self) -> None:
        """Read them, again if they were read before. Raises NoCluster."""
        from kubernetes.aio import config

        library: Any = config  # untyped
        try:
            if not self._file:
                library.load_incluster_config(client_configuration=self._configuration)
                return
            self._must_exist()
            await library.load_kube_config(
                config_file=self._file,
                context=self._context,
                client_configuration=self._configuration,
                persist_config=False,
            )
        except NoCluster:
            raise
        except Exception as error:  # what can be wrong with a file has all sorts of types in the library
            raise self.refused(error) from error

    def refused(self, error: Exception) -> NoCluster:
        """The error for unusable credentials, in one line."""
        where = self._file or "the service account of this pod"
        explains = isinstance(error, OSError | ValueError) or type(error).__name__ in _SELF_EXPLAINING
        what = " ".join(str(error).split()) if explains else "it is not a kubeconfig"
        fix = "correct it, or give another --kubeconfig FILE or --context NAME"
        return NoCluster(f"no Kubernetes credentials from {where}: {what}; {fix}", sent=False)

    def certificates(self) -> list[tuple[str, int]]:
        """The files of the TLS connection and when they were written: other ones need another connection."""
        configuration = self._configuration
        files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        return [(name, Path(name).stat().st_mtime_ns) for name in files if name and Path(name).exists()]

    def _must_exist(self) -> None:
        if any(Path(name).expanduser().is_file() for name in self._file.split(os.pathsep)):
            return
        if self._given:
            raise NoCluster(f"--kubeconfig: there is no file {self._given}", sent=False)
        outside = "" if os.environ.get("KUBERNETES_SERVICE_HOST") else "this is not a pod, and "
        text = f"no Kubernetes credentials: {outside}there is no file {self._file}; give --kubeconfig FILE"
        raise NoCluster(text, sent=False)
