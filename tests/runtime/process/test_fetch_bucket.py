"""Models in object stores: the objects taken, the parts kept after a failure, and the errors."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import obstore
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from treeline_runtime.fetch import bucket
from treeline_runtime.fetch.__main__ import main
from treeline_runtime.fetch.folder import MARKER

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+)/([^/]+)/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w+)"
)


@dataclass
class FakeS3:
    """The bucket `weights` and the keys that may read it; `public` ones are read by all."""

    objects: dict[str, bytes] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=lambda: {"models": "a-secret"})
    public: bool = False
    url: str = ""
    page: list[str] | None = None
    """The names of every page of an endless listing, in place of the objects."""
    pages: int = 0

    def put(self, files: dict[str, bytes], folder: str = "llama/") -> None:
        self.objects |= {folder + name: data for name, data in files.items()}

    def problem(self, request: BaseHTTPRequestHandler) -> str:
        """Return the error code for a request to refuse; empty if it may be answered.

        Signature Version 4: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
        """
        found = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if found is None:
            return "" if self.public else "AccessDenied"
        who, day, region, signed, signature = found.groups()
        if who not in self.keys:
            return "InvalidAccessKeyId"
        path, _, query = request.path.partition("?")
        pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(query, True))
        lines = [
            *(request.command, path, "&".join(f"{k}={v}" for k, v in pairs)),
            *(f"{name}:{' '.join(request.headers[name].split())}" for name in signed.split(";")),
            *("", signed, request.headers["x-amz-content-sha256"]),
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        scope = f"{day}/{region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{request.headers['x-amz-date']}\n{scope}\n{digest}"
        key = f"AWS4{self.keys[who]}".encode()
        for part in (day, region, "s3", "aws4_request", text):
            key = hmac.digest(key, part.encode(), "sha256")
        return "" if hmac.compare_digest(key.hex(), signature) else "SignatureDoesNotMatch"

    def listing(self, prefix: str) -> bytes:
        objects, more = self.objects, "<IsTruncated>false</IsTruncated>"
        if self.page is not None:
            self.pages += 1
            objects = {f"{prefix}{self.pages}-{name}": b"{}" for name in self.page}
            token = f"<NextContinuationToken>{self.pages}</NextContinuationToken>"
            more = f"<IsTruncated>true</IsTruncated>{token}"
        files = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>{escape(tag_of(data))}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, data in objects.items()
            if name.startswith(prefix)
        )
        return f"<ListBucketResult>{more}{files}</ListBucketResult>".encode()


def tag_of(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FakeS3

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, bucket, name = unquote(parts.path).split("/", 2) if parts.path.count("/") > 1 else ("", parts.path[1:], "")
        query = dict(parse_qsl(parts.query, True))
        if problem := self.store.problem(self):
            self._refuse(403, problem)
        elif bucket != "weights":
            self._refuse(404, "NoSuchBucket")
        elif "list-type" in query:
            self._answer(200, self.store.listing(query.get("prefix", "")))
        elif (data := self.store.objects.get(name)) is None:
            self._refuse(404, "NoSuchKey")
        elif self.headers.get("if-match", tag_of(data)) != tag_of(data):
            self._refuse(412, "PreconditionFailed")
        else:
            first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
            self._answer(
                206,
                data[first : last + 1],
                {
                    "Content-Range": f"bytes {first}-{last}/{len(data)}",
                    "ETag": tag_of(data),
                    "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                },
            )

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running_s3(store: FakeS3 | None = None) -> Iterator[FakeS3]:
    """Run an S3 server on a free port of loopback."""
    store = store or FakeS3()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


WEIGHTS = b"w" * 5000
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "notes.md": b"#", "original/model.safetensors": b"again"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with running_s3() as store:
        for name, value in (
            ("AWS_ENDPOINT_URL", store.url),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "models"),
            ("AWS_SECRET_ACCESS_KEY", store.keys["models"]),
        ):
            monkeypatch.setenv(name, value)
        yield store


def run(to: Path, uri: str = "s3://weights/llama") -> tuple[int, str]:
    log = to.parent / "termination-log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    status = main(["--uri", uri, "--to", str(to), "--termination-log", str(log), "--progress-seconds", "0.01"])
    return status, log.read_text()


def test_a_folder_of_a_bucket_is_downloaded_once(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put(FILES)
    store.put({"config.json": b"another model"}, "llama-2/")
    to = tmp_path / "m"
    assert run(to) == (0, "")
    there = {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()}
    assert there == {"config.json", "model.safetensors", MARKER}
    assert (to / "model.safetensors").read_bytes() == WEIGHTS
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"bytes_done": 5002, "bytes_total": 5002}
    assert [path.name for path in tmp_path.glob("*.partial")] == []

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert run(to) == (0, "")


def counted(monkeypatch: pytest.MonkeyPatch, most: int = 1000) -> list[tuple[str, Any]]:
    """Record the requested objects and ranges; the one after `most` fails."""
    asked: list[tuple[str, Any]] = []
    really: Callable[..., Any] = obstore.get

    def get(store: Any, name: str, *, options: Any) -> Any:
        if len(asked) == most:
            raise obstore.exceptions.GenericError("the network is gone")
        asked.append((name, options["range"]))
        return really(store, name, options=options)

    monkeypatch.setattr(bucket.obstore, "get", get)
    return asked


def test_a_public_bucket_needs_no_credentials(store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(FILES)
    store.public = True
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert run(tmp_path / "m") == (0, "")


def test_a_retry_resumes_the_download(store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put({"model.safetensors": bytes(range(250)) * 20})
    monkeypatch.setattr(bucket, "PIECE", 1000)
    with monkeypatch.context() as broken:
        counted(broken, most=3)
        status, said = run(tmp_path / "m")
    assert status == 1
    assert said == "DownloadFailed: s3://weights/llama could not be downloaded: the network is gone"
    assert not (tmp_path / "m").exists()
    asked = counted(monkeypatch)
    assert run(tmp_path / "m") == (0, "")
    assert [span for _, span in asked] == [(3000, 4000), (4000, 5000)]
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == bytes(range(250)) * 20


def test_partial_files_of_other_contents_are_not_used(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(FILES)
    monkeypatch.setattr(bucket, "PIECE", 1000)
    with monkeypatch.context() as broken:
        counted(broken, most=3)
        assert run(tmp_path / "m")[0] == 1
    store.put({"model.safetensors": b"n" * 5000})
    assert run(tmp_path / "m") == (0, "")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == b"n" * 5000


def test_an_object_that_is_replaced_meanwhile_is_refused(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put({"model.safetensors": WEIGHTS})
    really: Callable[..., Any] = bucket.Bucket.look

    def look(folder: bucket.Bucket, to: Path) -> Any:
        listed = really(folder, to)
        store.put({"model.safetensors": b"n" * 5000})
        return listed

    with monkeypatch.context() as hasty:
        hasty.setattr(bucket.Bucket, "look", look)
        status, said = run(tmp_path / "m")
    assert status == 1
    assert "was changed while it was downloaded" in said
    assert run(tmp_path / "m") == (0, "")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == b"n" * 5000


def test_files_are_checked_against_the_folders_digests(store: FakeS3, tmp_path: Path) -> None:
    good = hashlib.sha256(WEIGHTS).hexdigest()
    wrong = hashlib.sha256(b"other").hexdigest()
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    store.put({**files, "SHA256SUMS": f"{wrong}  model.safetensors\n{good}  ../../etc/passwd\n".encode()})
    status, said = run(tmp_path / "m")
    assert status == 1
    assert said.startswith("DownloadFailed: s3://weights/llama: model.safetensors is not what SHA256SUMS says")
    assert not (tmp_path / "m").exists()
    store.put({**files, "SHA256SUMS": f"{good} *./model.safetensors\n".encode()})
    assert run(tmp_path / "m") == (0, "")


@pytest.mark.parametrize("key", ["../evil.json", "/evil.json", "../../m/evil.json", "./evil.json"])
def test_no_key_leads_out_of_the_folder(store: FakeS3, tmp_path: Path, key: str) -> None:
    store.put(FILES)
    store.put({key: b"{}"})
    status, said = run(tmp_path / "deep" / "m")
    assert (status, list(tmp_path.rglob("evil.json"))) == (1, [])
    assert said.startswith(
        "DownloadFailed: s3://weights/llama could not be downloaded: Encountered object with invalid"
    )


@pytest.mark.parametrize("name", ["{}.json", "{}.gz", ""], ids=["wanted", "unwanted", "empty"])
def test_an_endless_listing_is_given_up(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store.page = [name.format(number) for number in range(1000)] if name else []
    monkeypatch.setattr(bucket, "LISTING_S", 3600 if name else 0.5)
    status, said = run(tmp_path / "m")
    assert status == 1
    if name:
        assert said == "DownloadFailed: s3://weights/llama has more than 10000 objects: name the folder of one model"
        assert store.pages <= 20
    else:
        assert said == "DownloadFailed: the list of s3://weights/llama comes to no end: correct its store's address"


@pytest.mark.parametrize(
    "key",
    [
        ".treeline-complete/config.json",
        ".treeline-version",
        "a/.treeline-x.json",
        "a/" * 500 + "a.json",
        "a" * 600 + ".json",
    ],
    ids=lambda key: key[:25],
)
def test_impossible_names_of_model_files_are_refused(store: FakeS3, tmp_path: Path, key: str) -> None:
    store.put(FILES | {key if key.endswith(".json") else f"{key}/a.json": b"{}"})
    status, said = run(tmp_path / "m")
    assert status == 1
    assert said.startswith(
        f"DownloadFailed: s3://weights/llama has a file with a name that no model needs, '{key[:20]}"
    )
    assert len(said) < 300
    assert not list(tmp_path.glob("m*/*"))


def test_kept_partial_files_do_not_count_as_progress(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put(FILES)
    counted(monkeypatch, most=0)
    assert run(tmp_path / "m")[0] == run(tmp_path / "m")[0] == 1
    assert {json.loads(line)["bytes_done"] for line in capsys.readouterr().out.splitlines()} == {0}


def test_each_file_is_compared_once_however_often_the_digests_name_it(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{hashlib.sha256(WEIGHTS).hexdigest()}  model.safetensors\n"
    store.put(FILES | {"SHA256SUMS": line.encode() * 1000})
    compared = []
    really = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: compared.append(file.name) or really(file, kind))
    assert run(tmp_path / "m") == (0, "")
    assert len(compared) == 1


def test_too_many_digests_are_not_read(store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(FILES | {"SHA256SUMS": bytes(5 << 20)})
    asked = counted(monkeypatch)
    status, said = run(tmp_path / "m")
    assert (status, asked) == (1, [])
    assert said == (
        "DownloadFailed: s3://weights/llama has a SHA256SUMS of 5242880 bytes, at most 4194304 are read: "
        "write it anew for the files of this folder"
    )


def test_a_file_that_is_a_folder_too_is_refused(store: FakeS3, tmp_path: Path) -> None:
    store.put({**FILES, "a.json": b"{}", "a.json/b.json": b"{}"})
    status, said = run(tmp_path / "m")
    assert status == 1
    assert "is a file and a folder" in said


@pytest.mark.parametrize(
    ("uri", "env", "line"),
    [
        ("s3://weights/nothing", {}, "WeightsMissing: s3://weights/nothing has no files of a model"),
        ("s3://weights", {}, "WeightsMissing: s3://weights has no *.safetensors weights"),
        ("s3://no-such-bucket/m", {}, "WeightsMissing: s3://no-such-bucket/m is not there (404 NoSuchBucket)"),
        (
            "s3://weights/llama",
            {"AWS_SECRET_ACCESS_KEY": "wrong"},
            "DownloadFailed: s3://weights/llama may not be read with these credentials (403 SignatureDoesNotMatch)",
        ),
        (
            "s3://weights/llama",
            {"AWS_ACCESS_KEY_ID": "AKIANOBODY"},
            "DownloadFailed: s3://weights/llama may not be read with these credentials (403 InvalidAccessKeyId)",
        ),
        (
            "s3://weights/llama",
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
            "DownloadFailed: s3://weights/llama may not be read without credentials (403 AccessDenied)",
        ),
    ],
)
def test_an_unreadable_bucket_is_explained_in_one_line(
    store: FakeS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    env: dict[str, str | None],
    line: str,
) -> None:
    store.put({"config.json": b"{}"})
    for name, value in env.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    status, said = run(tmp_path / "m", uri)
    assert status == 1
    assert said.startswith(line)
    assert "\n" not in said
    assert store.keys["models"] not in said


class FakeGcs(FakeS3):
    """Answers who has signed with the service account's key, as Google Cloud Storage does."""

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def problem(self, request: BaseHTTPRequestHandler) -> str:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        signed, _, signature = token.rpartition(".")
        try:
            self.key.public_key().verify(_plain(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
            who = json.loads(_plain(signed.partition(".")[2]))["iss"]
        except (InvalidSignature, ValueError):
            who = ""
        return "" if who == "models@example.iam.gserviceaccount.com" else "AccessDenied"


def _plain(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def test_a_bucket_of_google_is_read_with_the_key_of_a_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with running_s3(FakeGcs()) as store:
        store.put(FILES)
        account = {
            "type": "service_account",
            "client_email": "models@example.iam.gserviceaccount.com",
            "private_key": FakeGcs.key.private_bytes(*pem).decode(),
            "private_key_id": "1",
            "gcs_base_url": store.url,
        }
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        assert run(tmp_path / "m", "gs://weights/llama") == (0, "")
        assert (tmp_path / "m" / "model.safetensors").read_bytes() == WEIGHTS
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**account, "client_email": "stranger"}))
        status, said = run(tmp_path / "other", "gs://weights/llama")
        assert status == 1
        assert "gs://weights/llama may not be read with these credentials (403 AccessDenied)" in said
