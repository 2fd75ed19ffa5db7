"""TLS towards the clients, and mutual TLS between Envoy and the picker: each shows a certificate there, and verifies
the other's.

The files are those of mounted Secrets (`tls.crt`, `tls.key`, and `ca.crt` of the picker's). Envoy reads them through
discovery files of ours, which hold no secret themselves, so that it loads them anew when the Secret changes.
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

from treeline_operator.envoy.config import CERTIFICATE, PickerTls, Tls

_CERTIFICATE = "picker-certificate"
_AUTHORITY = "picker-authority"


def to_clients(tls: Tls | None) -> core_v3.TransportSocket | None:
    """How clients connect to Envoy; None for plain text."""
    if tls is None:
        return None
    watched = [] if tls.discovery_file is None else [_found(CERTIFICATE, tls.discovery_file)]
    context = tls_v3.CommonTlsContext(
        tls_certificates=[] if watched else [_certificate(tls.certificate_file, tls.key_file)],
        tls_certificate_sds_secret_configs=watched,
        alpn_protocols=["h2", "http/1.1"],
    )
    return _socket(tls_v3.DownstreamTlsContext(common_tls_context=context))


def to_picker(tls: PickerTls | None) -> core_v3.TransportSocket | None:
    """How Envoy connects to the picker; None for plain text."""
    if tls is None:
        return None
    certificate, authority = (
        _found(name, str(PurePosixPath(tls.discovery_dir) / f"{name}.json")) for name in (_CERTIFICATE, _AUTHORITY)
    )
    context = tls_v3.CommonTlsContext(
        tls_certificate_sds_secret_configs=[certificate],
        validation_context_sds_secret_config=authority,
        alpn_protocols=["h2"],
    )
    return _socket(tls_v3.UpstreamTlsContext(common_tls_context=context, sni=tls.server_name))


def tls_json(tls: Tls) -> str:
    """The text of `tls.discovery_file`: it names the certificate's files."""
    certificate = _certificate(tls.certificate_file, tls.key_file, _watched(PurePosixPath(tls.certificate_file).parent))
    return _response(tls_v3.Secret(name=CERTIFICATE, tls_certificate=certificate))


def picker_tls_files(tls: PickerTls) -> dict[str, str]:
    """File name → text of what belongs into `tls.discovery_dir`: the names of the Secret's files, and the name that
    the picker's certificate must have. (Envoy takes one secret from a file.)"""
    folder = PurePosixPath(tls.folder)
    watched = _watched(folder)
    certificate = _certificate(str(folder / "tls.crt"), str(folder / "tls.key"), watched)
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


def from_file(path: str) -> core_v3.ConfigSource:
    """A file that Envoy reads again when it is replaced by renaming."""
    return core_v3.ConfigSource(
        path_config_source=core_v3.PathConfigSource(path=path), resource_api_version=core_v3.ApiVersion.V3
    )


def _found(name: str, file: str) -> tls_v3.SdsSecretConfig:
    return tls_v3.SdsSecretConfig(name=name, sds_config=from_file(file))


def _watched(folder: PurePosixPath) -> core_v3.WatchedDirectory:
    """A mounted Secret changes by a rename in this directory, not in the files' own."""
    return core_v3.WatchedDirectory(path=str(folder))


def _certificate(chain: str, key: str, watched: core_v3.WatchedDirectory | None = None) -> tls_v3.TlsCertificate:
    return tls_v3.TlsCertificate(
        certificate_chain=core_v3.DataSource(filename=chain),
        private_key=core_v3.DataSource(filename=key),
        watched_directory=watched,
    )


def _socket(context: betterproto2.Message) -> core_v3.TransportSocket:
    return core_v3.TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def _response(secret: tls_v3.Secret) -> str:
    response = DiscoveryResponse(version_info="1", resources=[Any.pack(secret)])
    return json.dumps(response.to_dict(casing=betterproto2.Casing.SNAKE), indent=2)
