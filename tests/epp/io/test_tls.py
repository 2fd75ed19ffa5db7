"""TLS on the ext_proc port: a certificate made at start, or files that are read again when they change."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from support.epp_io import engines, running_picker, until
from support.epp_kube import asked
from treeline_epp.command import main
from treeline_epp.extproc.session import SERVICE
from treeline_epp.extproc.tls import Certificate, TlsError, self_signed


def write(folder: Path, pair: tuple[bytes, bytes], stamp: int) -> None:
    """Write a certificate and its key, with the given modification time."""
    for name, data in zip(("tls.key", "tls.crt"), pair, strict=True):
        (folder / name).write_bytes(data)
        os.utime(folder / name, (stamp, stamp))


def served(port: int) -> bytes:
    return ssl.get_server_certificate(("127.0.0.1", port)).encode()


async def test_a_certificate_from_files_is_used_and_replaced_while_it_serves(tmp_path: Path) -> None:
    first, second = self_signed(), self_signed()
    write(tmp_path, first, 1)
    async with engines(1) as (engine,):
        flags = ("--endpoint", f"e0={engine.address}", "--secure-serving", "--cert-path", str(tmp_path))
        async with running_picker(*flags) as picker:
            assert await asked(picker, "tiny", secure=first[1]) == engine.address
            write(tmp_path, (second[0], first[1]), 2)
            assert await asked(picker, "tiny", secure=first[1]) == engine.address, "a bad pair changes nothing"
            write(tmp_path, second, 3)

            async def answered() -> str | int | None:
                try:
                    return await asked(picker, "tiny", secure=second[1])
                except grpc.aio.AioRpcError:  # the files are looked at once a second
                    return None

            assert await until(answered, "the new certificate is used") == engine.address


def mounted(folder: Path, pair: tuple[bytes, bytes], name: str) -> None:
    """Write certificate, key and authority as the kubelet mounts a Secret: links into a folder that is replaced at
    once."""
    (folder / name).mkdir()
    for file, data in (("tls.key", pair[0]), ("tls.crt", pair[1]), ("ca.crt", pair[1])):
        (folder / name / file).write_bytes(data)
        os.utime(folder / name / file, (1, 1))
        if not (folder / file).is_symlink():
            (folder / file).symlink_to(f"..data/{file}")
    (folder / "..new").symlink_to(name)
    os.replace(folder / "..new", folder / "..data")


async def health(port: int, pair: tuple[bytes, bytes]) -> int | None:
    """Return the port's health for a client with this certificate; None if the handshake fails."""
    options = (("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1))
    keys = grpc.ssl_channel_credentials(pair[1], *pair)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", keys, options) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            response: HealthCheckResponse = await check(HealthCheckRequest(service=""), timeout=60)
        except grpc.aio.AioRpcError:
            return None
    return response.status


async def test_both_ports_take_a_mounted_secret_that_is_replaced_under_a_running_picker(tmp_path: Path) -> None:
    first, second = self_signed(), self_signed()
    mounted(tmp_path, first, "..1")
    async with engines(1) as (engine,):
        flags = ["--endpoint", f"e0={engine.address}", "--secure-serving", "--cert-path", str(tmp_path)]
        flags += ["--require-client-certificates", "--health-checking"]
        async with running_picker(*flags) as picker:
            for port in (picker.options.grpc_port, picker.options.grpc_health_port):
                assert await health(port, first) == HealthCheckResponse.SERVING
                assert await health(port, second) is None, "nobody knows it"
            mounted(tmp_path, second, "..2")
            for port in (picker.options.grpc_port, picker.options.grpc_health_port):

                async def answered(port: int = port) -> int | None:
                    return await health(port, second)

                assert await until(answered, "the new files are used") == HealthCheckResponse.SERVING
                assert await health(port, first) is None, "the old certificate opens nothing"


async def test_without_files_a_certificate_is_made_and_health_is_served_if_enabled() -> None:
    async with engines(1) as (engine,):
        flags = ("--endpoint", f"e0={engine.address}", "--secure-serving", "--health-checking")
        async with running_picker(*flags) as picker:
            port = picker.options.grpc_port
            certificate = await asyncio.to_thread(served, port)
            assert await asked(picker, "tiny", secure=certificate) == engine.address
            options = (("grpc.ssl_target_name_override", "localhost"),)
            trusted = grpc.ssl_channel_credentials(certificate)
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options) as channel:
                check = channel.unary_unary(
                    "/grpc.health.v1.Health/Check",
                    request_serializer=HealthCheckRequest.SerializeToString,
                    response_deserializer=HealthCheckResponse.FromString,
                )
                for name in ("", "liveness", "readiness", "inference-extension", SERVICE):
                    assert (await check(HealthCheckRequest(service=name))).status == HealthCheckResponse.SERVING


def test_unusable_files_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TlsError, match=r"cannot read .*tls\.key \(No such file or directory\): name a folder"):
        Certificate(tmp_path).context()
    write(tmp_path, (self_signed()[0], self_signed()[1]), 1)
    with pytest.raises(TlsError, match="not the key"):
        Certificate(tmp_path).context()
    write(tmp_path, (b"nonsense", b"nonsense"), 2)
    with pytest.raises(TlsError):
        Certificate(tmp_path).context()
    flags = ["--endpoint", "a=127.0.0.1:1", "--secure-serving", "--cert-path", str(tmp_path)]
    assert main(flags) == 1
    write(tmp_path, self_signed(), 3)
    assert main([*flags, "--require-client-certificates"]) == 1
    assert "ca.crt" in capfd.readouterr().err


def test_a_key_with_a_password_is_reported_and_the_old_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, chain = self_signed()
    pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret = serialization.BestAvailableEncryption(b"secret")
    locked = serialization.load_pem_private_key(key, None).private_bytes(pem, kind, secret)
    write(tmp_path, (key, chain), 1)
    certificate = Certificate(tmp_path)
    certificate.context()
    write(tmp_path, (locked, chain), 2)
    assert certificate.changed() is None
    assert "the old one stays: Password was not given" in caplog.text
    with pytest.raises(TlsError, match="Password was not given"):
        Certificate(tmp_path).context()


def test_missing_files_are_reported_once_and_used_when_they_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, self_signed(), 1)
    certificate = Certificate(tmp_path)
    certificate.context()
    (tmp_path / "tls.crt").unlink()
    assert [certificate.changed() for _ in range(3)] == [None] * 3
    assert caplog.text.count("the old one stays") == 1
    write(tmp_path, self_signed(), 2)
    assert certificate.changed() is not None
    assert certificate.changed() is None, "until they change again"
