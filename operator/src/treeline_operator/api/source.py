"""Owns where a model comes from: URIs, caches, tokens."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field, StrictBool, StringConstraints
from treeline_wire.models import served_name

from treeline_operator.api.parts import SET, ConfigMapKeyRef, DnsName, KeyRef, NamedRef, Part, Quantity, ServedName
from treeline_operator.api.rules import KEYWORD, Rule, forbidden

Scheme = Literal["hf", "s3", "gs", "oci", "pvc", "path", "builtin"]
DOWNLOADED: Final = ("hf", "s3", "gs")
"""Schemes that are downloaded into a volume before the engine starts."""

_PART: Final = "[A-Za-z0-9_.@+][A-Za-z0-9_.@+=-]*"
"""One part of a path. Paths appear in command lines, mounts and environments, so they must not look like a flag, two
words, or a variable (`$(NAME)`, which the kubelet replaces)."""
_REVISION: Final = "[A-Za-z0-9_.][A-Za-z0-9_.-]*"
_PLAIN: Final = "with letters, digits and . _ @ + = -, no part starting with = or -"

_FORMS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "hf://",
        rf"^hf://[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*(@{_REVISION}(/{_REVISION})*)?$",
        "hf:// needs an organisation and a name: write hf://org/name or hf://org/name@revision",
    ),
    (
        "s3://",
        rf"^s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/{_PART})*$",
        f"s3:// needs a bucket: write s3://bucket/folder, or s3://bucket for all of it, {_PLAIN}",
    ),
    (
        "gs://",
        rf"^gs://[a-z0-9][a-z0-9._-]*[a-z0-9](/{_PART})*$",
        f"gs:// needs a bucket: write gs://bucket/folder, or gs://bucket for all of it, {_PLAIN}",
    ),
    (
        "oci://",
        "^oci://[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+"
        rf"(:[A-Za-z0-9_][A-Za-z0-9_.-]*|@sha256:[0-9a-f]{{64}})(/{_PART})*$",
        "oci:// needs an image with a registry and a tag or digest: write oci://registry/org/name:tag, or"
        " oci://registry/org/name:tag/folder",
    ),
    (
        "pvc://",
        rf"^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/{_PART})*$",
        f"pvc:// needs the name of a claim: write pvc://claim/path, or pvc://claim for all of it, {_PLAIN}",
    ),
    (
        "path://",
        rf"^path://(/{_PART})+$",
        f"path:// needs an absolute directory: write path:///models/name, {_PLAIN}",
    ),
    (
        "builtin://",
        r"^builtin://[a-z0-9][-a-z0-9]*$",
        "builtin:// needs a model of the image: write builtin://tiny",
    ),
)
_UPWARDS: Final = "[/@][.][.](/|$)"
_MERGED: Final = "^hf://.*(--|[.][.])"
"""Two sources would share one download folder, whose name joins all parts with `--`."""
_MERGED_MESSAGE: Final = "-- and .. are not allowed in an hf:// uri: correct it"
_SCHEMES: Final = (
    "write hf://org/name, s3://bucket/folder, gs://bucket/folder, oci://registry/org/name:tag, pvc://claim/path,"
    " path:///directory or builtin://tiny"
)


def _check_uri(uri: str) -> str:
    for scheme, form, message in _FORMS:
        if uri.startswith(scheme):
            if not re.fullmatch(form, uri):
                raise ValueError(message)
            if re.search(_UPWARDS, uri):
                raise ValueError("a model URI must not lead upwards: remove '..'")
            if re.search(_MERGED, uri):
                raise ValueError(_MERGED_MESSAGE)
            return uri
    raise ValueError(f"{uri!r} is no model URI: {_SCHEMES}")


_URI_RULES: Final = [
    {"rule": "self.matches('^(hf|s3|gs|oci|pvc|path|builtin)://.')", "message": f"no model URI: {_SCHEMES}"},
    *(
        {"rule": f"!self.startsWith('{scheme}') || self.matches('{form}')", "message": message}
        for scheme, form, message in _FORMS
    ),
    {"rule": f"!self.matches('{_UPWARDS}')", "message": "a model URI must not lead upwards: remove '..'"},
    {"rule": f"!self.matches('{_MERGED}')", "message": _MERGED_MESSAGE},
]

Uri = Annotated[
    str,
    StringConstraints(min_length=1, max_length=512),
    AfterValidator(_check_uri),
    Field(json_schema_extra={KEYWORD: _URI_RULES}),
]


class Source(NamedTuple):
    """A parsed model URI.

    `root` is the repository, bucket, image, claim, directory or built-in name, `path` the rest.
    """

    scheme: Scheme
    root: str
    path: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, uri: str) -> Source:
        """Raises ValueError."""
        scheme, separator, rest = uri.partition("://")
        match scheme if separator and rest else "":
            case "hf":
                repository, _, revision = rest.partition("@")
                return cls("hf", repository, revision=revision)
            case ("s3" | "gs" | "pvc") as volume:
                root, _, path = rest.partition("/")
                return cls(volume, root, path.strip("/"))
            case "oci":
                # The registry may have a port; after it the first colon or @ is that of the tag or digest.
                registry, _, named = rest.partition("/")
                if (tagged := re.match("[^:@]+[:@][^/]+", named)) is not None:
                    return cls("oci", f"{registry}/{tagged[0]}", named[tagged.end() :].strip("/"))
            case "path":
                return cls("path", rest)
            case "builtin":
                return cls("builtin", rest)
        raise ValueError(f"{uri!r} is no model URI: {_SCHEMES}")


def is_downloaded(uri: str) -> bool:
    """Whether the pods download it."""
    return uri.partition("://")[0] in DOWNLOADED


class Cache(Part):
    """A volume that outlives pods: an existing claim, or one made for the pool."""

    RULES = (
        Rule(
            "has(self.claimName) != has(self.size)",
            "set either claimName (an existing claim) or size (a claim to make)",
        ),
        forbidden(
            "!has(self.claimName) || (!has(self.storageClassName)"
            " && (!has(self.accessModes) || self.accessModes.size() == 0))",
            "storageClassName and accessModes are for a claim to make: remove them, or replace claimName by size",
            field=".claimName",
        ),
    )

    claim_name: DnsName | None = None
    """An existing PersistentVolumeClaim of this namespace. It is not deleted with the pool."""
    size: Quantity | None = None
    """Size of the claim to make. It is deleted with the pool."""
    storage_class_name: DnsName | None = None
    """Storage class of the claim to make; absent means the cluster's default."""
    access_modes: Annotated[
        tuple[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"], ...],
        Field(max_length=4, json_schema_extra=SET),
    ] = ()
    """Access modes of the claim to make; absent means ReadWriteOnce.

    Replicas on several nodes need ReadWriteMany."""


class ModelSource(Part):
    """The model that the pool serves."""

    RULES = (
        forbidden(
            "!has(self.tokenSecretRef) || self.uri.startsWith('hf://')"
            " || (has(self.tokenizer) && self.tokenizer.startsWith('hf://'))",
            "a token is sent to Hugging Face only: remove tokenSecretRef, or use an hf:// uri",
            field=".tokenSecretRef",
        ),
        forbidden(
            "!has(self.credentialsSecretRef) || self.uri.startsWith('s3://') || self.uri.startsWith('gs://')"
            " || (has(self.tokenizer) && (self.tokenizer.startsWith('s3://') || self.tokenizer.startsWith('gs://')))",
            "credentialsSecretRef is for object stores: remove it, or use an s3:// or gs:// uri",
            field=".credentialsSecretRef",
        ),
        forbidden(
            "!self.pickerReadsClaim || (has(self.tokenizer) ? self.tokenizer : self.uri).startsWith('pvc://')",
            "the tokenizer is not on a claim: remove pickerReadsClaim, or set tokenizer to a pvc:// uri",
            field=".pickerReadsClaim",
        ),
        Rule(
            "!has(self.size) || !has(self.cache) || !has(self.cache.size)"
            " || quantity(string(self.cache.size)).compareTo(quantity(string(self.size))) >= 0",
            "the weights do not fit into the cache: raise cache.size to model.size or more",
            field=".cache.size",
        ),
    )

    uri: Uri
    """Address of the weights: `hf://org/name[@revision]`, `s3://bucket/folder`, `gs://bucket/folder`,
    `oci://registry/org/name:tag[/folder]` (mounted as an image volume), `pvc://claim/path`, `builtin://tiny`, or
    `path:///directory` in the image or in a volume of the template."""
    name: ServedName | None = None
    """Name of the model in requests; absent means the last part of the uri."""
    tokenizer: Uri | None = None
    """The tokenizer's address, if it is not with the weights. For engines sglang and vllm."""
    chat_template_ref: ConfigMapKeyRef | None = None
    """ConfigMap with a chat template (Jinja) for engine and picker, in place of the model's. Give a changed template
    another name: running pods keep the old one. For engines sglang and vllm."""
    token_secret_ref: KeyRef | None = None
    """Secret with the Hugging Face token, for gated models. Mounted into the download and, for engines other than
    treeline, into the picker."""
    credentials_secret_ref: NamedRef | None = None
    """Secret whose keys are environment variables of the download: for s3:// `AWS_ACCESS_KEY_ID`,
    `AWS_SECRET_ACCESS_KEY`, `AWS_REGION` and `AWS_ENDPOINT_URL` (stores other than Amazon's); for gs://
    `GOOGLE_SERVICE_ACCOUNT_KEY`. Absent: the bucket is public, or the cloud gives the pod an identity in its
    environment."""
    picker_reads_claim: StrictBool = False
    """Mount the tokenizer's claim read-only into the picker. Only for claims that several nodes can mount
    (ReadOnlyMany, ReadWriteMany). Without it, and without a tokenizer on Hugging Face, requests are routed by history.
    For engines sglang, vllm and custom."""
    cache: Cache | None = None
    """Volume for downloaded weights; absent means that every pod downloads into an emptyDir."""
    size: Quantity | None = None
    """Size of the weights, such as `16Gi`. It sets the longest start and the requested disk."""

    @property
    def source(self) -> Source:
        return Source.parse(self.uri)

    @property
    def downloads(self) -> bool:
        """Whether the weights or the tokenizer are downloaded."""
        return any(is_downloaded(uri) for uri in (self.uri, self.tokenizer or ""))

    @property
    def served_name(self) -> str:
        return served_name(self.name, self.uri)
