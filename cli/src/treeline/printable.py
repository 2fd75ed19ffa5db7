"""What others wrote, made fit for a terminal."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which begin a terminal's escape sequences; marks that reorder a line, so that it reads other than
it is; halves of characters, which no terminal can be sent."""


def printable(text: str) -> str:
    """The text as a terminal may have it: nothing in it moves the cursor, changes a setting or hides what follows."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))
