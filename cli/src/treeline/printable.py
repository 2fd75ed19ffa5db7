"""Makes other people's text safe for a terminal."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which begin a terminal's escape sequences; marks that reorder a line and so change how it reads;
lone surrogates, which cannot be encoded."""


def printable(text: str) -> str:
    """Replaces characters that could move the cursor, change a setting or hide other text."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))
