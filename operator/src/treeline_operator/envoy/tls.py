"""TLS for clients, and mutual TLS between Envoy and the picker.

The files come from mounted Secrets (`tls.crt`, `tls.key`, and `ca.crt` of the picker's). Envoy reads them through our
discovery files, which contain no secret, so that it reloads them when the Secret changes.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Final

from treeline_operator.envoy.config import CERTIFICATE, PickerTls, Tls
from treeline_operator.envoy.messages import Message, extension, from_file, typed

_CERTIFICATE: Final = "picker-certificate"
_AUTHORITY: Final = "picker-authority"
_TLS: Final = "extensions.transport_sockets.tls.v3"


def to_clients(tls: Tls | None) -> Message:
    """TLS between clients and Envoy, as a field of a filter chain; empty for plain text."""
    if tls is None:
        return {}
    shown: Message = {"tls_certificates": [_certificate(tls.certificate_file, tls.key_file)]}
    if tls.discovery_file is not None:
        shown = {"tls_certificate_sds_secret_configs": [_found(CERTIFICATE, tls.discovery_file)]}
    return _socket("DownstreamTlsContext", {**shown, "alpn_protocols": ["h2", "http/1.1"]})


def to_picker(tls: PickerTls | None) -> Message:
    """TLS between Envoy and the picker, as a field of a cluster; empty for plain text."""
    if tls is None:
        return {}
    certificate, authority = (
        _found(name, str(PurePosixPath(tls.discovery_dir) / f"{name}.json")) for name in (_CERTIFICATE, _AUTHORITY)
    )
    context = {
        "tls_certificate_sds_secret_configs": [certificate],
        "validation_context_sds_secret_config": authority,
        "alpn_protocols": ["h2"],
    }
    return _socket("UpstreamTlsContext", context, sni=tls.server_name)


def tls_json(tls: Tls) -> str:
    """The text of `tls.discovery_file`: it names the certificate's files."""
    certificate = _certificate(tls.certificate_file, tls.key_file)
    return _response(CERTIFICATE, PurePosixPath(tls.certificate_file).parent, tls_certificate=certificate)


def picker_tls_files(tls: PickerTls) -> dict[str, str]:
    """File name → text of what belongs into `tls.discovery_dir`: the names of the Secret's files, and the name that
    the picker's certificate must have. (Envoy takes one secret from a file.)"""
    folder = PurePosixPath(tls.folder)
    certificate = _certificate(str(folder / "tls.crt"), str(folder / "tls.key"))
    authority = {
        "trusted_ca": {"filename": str(folder / "ca.crt")},
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": tls.server_name}}],
    }
    return {
        f"{_CERTIFICATE}.json": _response(_CERTIFICATE, folder, tls_certificate=certificate),
        f"{_AUTHORITY}.json": _response(_AUTHORITY, folder, validation_context=authority),
    }


def _found(name: str, file: str) -> Message:
    return {"name": name, "sds_config": from_file(file)}


def _certificate(chain: str, key: str) -> Message:
    return {"certificate_chain": {"filename": chain}, "private_key": {"filename": key}}


def _socket(context: str, common: Message, **more: str) -> Message:
    fields = {"common_tls_context": common, **more}
    return {"transport_socket": extension("transport_sockets.tls", f"{_TLS}.{context}", fields)}


def _response(name: str, folder: PurePosixPath, **secret: Message) -> str:
    """A discovery response. A mounted Secret changes by a rename in its directory, not in the files' own."""
    watched = {kind: {**fields, "watched_directory": {"path": str(folder)}} for kind, fields in secret.items()}
    resource = typed(f"{_TLS}.Secret", {"name": name, **watched})
    return json.dumps({"version_info": "1", "resources": [resource]})
