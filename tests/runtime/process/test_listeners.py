"""The sockets that a server listens on."""

from __future__ import annotations

import pytest
from treeline_runtime.listeners import ListenError, listen


@pytest.mark.parametrize("host", ["nosuch.invalid", "a" * 70, "", "127.0.0.1:80", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_refused_with_valid_ones(host: str) -> None:
    with pytest.raises(ListenError, match=r"^--metrics-host: .* is no address of this machine: give 127\.0\.0\.1 "):
        listen(host, 0, "metrics-")
