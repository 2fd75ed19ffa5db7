"""Mutual TLS between a real Envoy and the picker: peers without a certificate of the right authority are refused."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from support.epp_io import FakeEngine, Plane, data_plane, engines, equal, running_picker, so, until
from support.http import client
from treeline_operator.envoy import PickerTls, picker_tls_files
from treeline_wire import headers as names

pytestmark = [pytest.mark.integration, pytest.mark.deep]

NAME = "treeline-epp.team.svc"
_PEM = serialization.Encoding.PEM


@dataclass
class Authority:
    """Signs certificates for both sides."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def made(cls) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder("authority", "authority", key.public_key())
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        return cls(key, builder.add_extension(constraint, critical=True).sign(key, hashes.SHA256()))

    def secret(self, folder: Path, name: str = NAME) -> Path:
        """Write the files of a Secret, replacing existing ones one by one."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.DNSName(name)])
        signed = (
            _builder("both", "authority", key.public_key())
            .add_extension(alternative, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        folder.mkdir(exist_ok=True)
        for file, data in (
            ("tls.key", private),
            ("tls.crt", signed.public_bytes(_PEM)),
            ("ca.crt", self.certificate.public_bytes(_PEM)),
        ):
            (folder / f".{file}").write_bytes(data)
            os.replace(folder / f".{file}", folder / file)
        return folder


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def discovered(tls: PickerTls) -> PickerTls:
    """Write the discovery files and return the settings."""
    for name, text in picker_tls_files(tls).items():
        (Path(tls.discovery_dir) / name).write_text(text)
    return tls


def impatient(bootstrap: dict[str, Any]) -> None:
    """Let Envoy start without a picker after half a second: most pickers here are refused."""
    for cluster in bootstrap["static_resources"]["clusters"]:
        if "eds_cluster_config" in cluster:
            cluster["eds_cluster_config"]["eds_config"]["initial_fetch_timeout"] = "0.5s"


@contextlib.asynccontextmanager
async def plane_with(
    folder: Path, fakes: list[FakeEngine], picker: Path, envoy: Path | None, *, name: str = NAME
) -> AsyncIterator[Plane]:
    """Run a picker with the TLS files of one folder and an Envoy with those of another; None for an Envoy without
    TLS."""
    tls = None if envoy is None else discovered(PickerTls(str(envoy), name, str(folder)))
    flags = ["--secure-serving", "--cert-path", str(picker), "--require-client-certificates"]
    async with data_plane(folder, fakes, *flags, picker_tls=tls, fail_open=False, patch=impatient) as plane:
        yield plane


async def test_envoy_and_picker_with_certificates_of_one_authority_serve(tmp_path: Path) -> None:
    secret = Authority.made().secret(tmp_path / "secret")
    async with engines(2) as fakes, plane_with(tmp_path, fakes, secret, secret) as plane:
        answer = await plane.complete()
        assert answer.status_code == 200
        assert answer.json()["headers"][names.DESTINATION], "the picker was asked"
        assert set(await plane.envoy.hosts()) == {fake.address for fake in fakes}, "EDS was heard"


def folder_in(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


async def test_an_envoy_of_another_authority_or_without_tls_is_refused(tmp_path: Path) -> None:
    ours = Authority.made().secret(tmp_path / "ours")
    other = Authority.made().secret(tmp_path / "other")
    (tmp_path / "mixed").mkdir()
    for file, source in (("tls.key", other), ("tls.crt", other), ("ca.crt", ours)):
        (tmp_path / "mixed" / file).write_bytes((source / file).read_bytes())

    async def is_not_heard(folder: Path, envoy: Path | None) -> None:
        async with engines(1) as fakes, plane_with(folder, fakes, ours, envoy) as plane:
            assert (await plane.complete()).status_code == 503
            assert await plane.envoy.hosts() == {}
            assert (await plane.picker.metrics())["treeline_epp_pick_seconds_count"] == 0
            assert fakes[0].served == []

    async with asyncio.TaskGroup() as together:
        together.create_task(is_not_heard(folder_in(tmp_path, "1"), other))
        together.create_task(is_not_heard(folder_in(tmp_path, "2"), tmp_path / "mixed"))
        together.create_task(is_not_heard(folder_in(tmp_path, "3"), None))


async def test_a_picker_of_another_authority_or_name_is_refused(tmp_path: Path) -> None:
    authority = Authority.made()
    ours = authority.secret(tmp_path / "ours")
    pretender = authority.secret(tmp_path / "pretender", name="other-epp.team.svc")
    (tmp_path / "stranger").mkdir()
    stranger = Authority.made().secret(tmp_path / "stranger")
    # A picker that accepts our Envoy, with a certificate of another authority.
    (stranger / "ca.crt").write_bytes((ours / "ca.crt").read_bytes())

    async def is_not_believed(folder: Path, picker: Path) -> None:
        async with engines(1) as fakes, plane_with(folder, fakes, picker, ours) as plane:
            assert (await plane.complete()).status_code == 503
            assert (await plane.picker.metrics())["treeline_epp_pick_seconds_count"] == 0
            await until(
                lambda: so(plane.envoy.stats("cluster.eds.ssl.fail_verify"), lambda now: any(now.values())),
                "Envoy has looked at the picker's certificate and refused it",
            )

    async with asyncio.TaskGroup() as together:
        together.create_task(is_not_believed(folder_in(tmp_path, "1"), pretender))
        together.create_task(is_not_believed(folder_in(tmp_path, "2"), stranger))


async def test_neither_port_of_the_picker_answers_without_a_client_certificate(tmp_path: Path) -> None:
    secret = Authority.made().secret(tmp_path / "secret")
    async with engines(1) as fakes, plane_with(tmp_path, fakes, secret, secret) as plane:
        authority, options = (secret / "ca.crt").read_bytes(), plane.picker.options
        key, chain = (secret / "tls.key").read_bytes(), (secret / "tls.crt").read_bytes()
        nobody = grpc.ssl_channel_credentials(authority)
        somebody = grpc.ssl_channel_credentials(authority, key, chain)
        named = (("grpc.ssl_target_name_override", NAME),)
        for port in (options.grpc_port, options.grpc_health_port):
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", nobody, named) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await _check(channel)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.secure_channel(f"127.0.0.1:{options.grpc_health_port}", somebody, named) as channel:
            assert (await _check(channel)).status == 1


async def _check(channel: grpc.aio.Channel) -> HealthCheckResponse:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    response: HealthCheckResponse = await check(HealthCheckRequest(service=""), timeout=60)
    return response


async def test_new_certificates_of_a_new_authority_are_used_without_a_restart_of_envoy(
    tmp_path: Path,
) -> None:
    secret = Authority.made().secret(tmp_path / "secret")
    async with engines(1) as fakes, plane_with(tmp_path, fakes, secret, secret) as plane:
        assert (await plane.complete()).status_code == 200
        new = Authority.made()
        new.secret(secret)

        async def envoy_has_them() -> bool:
            async with client() as http:
                page = (await http.get(f"{plane.envoy.admin}/certs")).text
            return f"{new.certificate.serial_number:x}" in page

        await until(envoy_has_them, "Envoy has read the new files")
        # Connections that are open stay; this is what a new one meets.
        old = plane.picker.options
        await plane.picker.stop()
        words = ["--grpc-port", str(old.grpc_port), "--grpc-health-port", str(old.grpc_health_port)]
        words += ["--endpoint", f"{fakes[0].name}={fakes[0].address}", "--secure-serving", "--cert-path"]
        async with running_picker(*words, str(secret), "--require-client-certificates"):
            await until(lambda: equal(plane.status(), 200), "both use the new certificates")
