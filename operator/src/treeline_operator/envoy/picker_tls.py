"""Mutual TLS between Envoy and the picker: each shows a certificate, and verifies the other's.

The files are those of one Secret (`tls.crt`, `tls.key`, `ca.crt`), which both mount. Envoy reads them through
discovery files of ours, so that it loads them anew when the Secret changes.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath

import betterproto2
from envoy_data_plane.envoy.config.core import v3 as core_v3
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls_v3
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryResponse
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from treeline_operator.envoy.config import PickerTls

_CERTIFICATE = "picker-certificate"
_AUTHORITY = "picker-authority"


def transport_socket(tls: PickerTls | None) -> core_v3.TransportSocket | None:
    """How Envoy connects to the picker; None for plain text."""
    if tls is None:
        return None
    context = tls_v3.CommonTlsContext(
        tls_certificate_sds_secret_configs=[_secret(tls, _CERTIFICATE)],
        validation_context_sds_secret_config=_secret(tls, _AUTHORITY),
        alpn_protocols=["h2"],
    )
    typed = Any.pack(tls_v3.UpstreamTlsContext(common_tls_context=context, sni=tls.server_name))
    return core_v3.TransportSocket(name="envoy.transport_sockets.tls", typed_config=typed)


def picker_tls_files(tls: PickerTls) -> dict[str, str]:
    """File name → text of what belongs into `tls.discovery_dir`: the names of the Secret's files, and the name that
    the picker's certificate must have. They hold no secret themselves. (Envoy takes one secret from a file.)"""
    folder = PurePosixPath(tls.folder)
    # A mounted Secret changes by a rename in this directory, not in the files' own.
    watched = core_v3.WatchedDirectory(path=str(folder))
    certificate = tls_v3.TlsCertificate(
        certificate_chain=core_v3.DataSource(filename=str(folder / "tls.crt")),
        private_key=core_v3.DataSource(filename=str(folder / "tls.key")),
        watched_directory=watched,
    )
    name = tls_v3.SubjectAltNameMatcher(
        san_type=tls_v3.SubjectAltNameMatcherSanType.DNS, matcher=StringMatcher(exact=tls.server_name)
    )
    authority = tls_v3.CertificateValidationContext(
        trusted_ca=core_v3.DataSource(filename=str(folder / "ca.crt")),
        watched_directory=watched,
        match_typed_subject_alt_names=[name],
    )
    secrets = (
        tls_v3.Secret(name=_CERTIFICATE, tls_certificate=certificate),
        tls_v3.Secret(name=_AUTHORITY, validation_context=authority),
    )
    return {f"{secret.name}.json": _response(secret) for secret in secrets}


def _secret(tls: PickerTls, name: str) -> tls_v3.SdsSecretConfig:
    path = str(PurePosixPath(tls.discovery_dir) / f"{name}.json")
    source = core_v3.ConfigSource(
        path_config_source=core_v3.PathConfigSource(path=path), resource_api_version=core_v3.ApiVersion.V3
    )
    return tls_v3.SdsSecretConfig(name=name, sds_config=source)


def _response(secret: tls_v3.Secret) -> str:
    response = DiscoveryResponse(version_info="1", resources=[Any.pack(secret)])
    return json.dumps(response.to_dict(casing=betterproto2.Casing.SNAKE), indent=2)
