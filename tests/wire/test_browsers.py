"""Requests that a browser may have sent on behalf of a page are recognised."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_wire.browsers import foreign_host, page_request


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9700", "localhost", "LocalHost:1", "[::1]", "[::1]:9700", "127.8.8.8:80"]
)
def test_a_host_that_names_loopback_is_ours(host: str) -> None:
    assert foreign_host([(b"accept", b"*/*"), (b"host", host.encode())]) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9700",
        "localhost.evil.example",
        "127.0.0.1.nip.io:9700",
        "localhost.",
        "10.0.0.1:9700",
        "0.0.0.0:9700",
        "[::]:9700",
        "127.0.0.1:9700@evil.example",
        "127.0.0.1@evil.example",
        "evil.example#[::1]",
        "[::1]evil.example",
        "[::1",
        "127.0.0.1:x",
        "",
    ],
)
def test_any_other_host_is_foreign(host: str) -> None:
    told = foreign_host([(b"host", host.encode())])
    assert told is not None
    assert repr(host) in told


def test_no_host_and_two_hosts_are_foreign() -> None:
    assert foreign_host([]) == "it has 0 Host headers"
    assert foreign_host([(b"host", b"localhost"), (b"host", b"evil.example")]) == "it has 2 Host headers"


@given(st.lists(st.text(string.ascii_letters + string.digits + "-", min_size=1, max_size=12), min_size=2))
def test_no_dotted_name_with_a_letter_in_it_is_loopback(labels: list[str]) -> None:
    name = ".".join(labels)
    if any(character.isalpha() for character in name):
        assert foreign_host([(b"host", name.encode())]) is not None


@pytest.mark.parametrize("origin", [b"https://evil.example", b"http://127.0.0.1:9700", b"null"])
def test_a_request_with_an_origin_is_from_a_page(origin: bytes) -> None:
    assert "Origin" in (page_request([(b"host", b"localhost"), (b"origin", origin)]) or "")


@pytest.mark.parametrize("site", [b"cross-site", b"same-site", b"same-origin", b"", b"none "])
def test_a_pages_request_is_recognised_and_a_users_passes(site: bytes) -> None:
    told = page_request([(b"sec-fetch-site", site)])
    assert (told is None) == (site.strip() == b"none")


def test_a_plain_client_is_no_page() -> None:
    assert page_request([(b"host", b"127.0.0.1:9700"), (b"user-agent", b"curl/8")]) is None
