"""The model that a form names (`multipart/form-data`). Recordings come with their fields, in either order."""

from __future__ import annotations

import re
from typing import Final

from treeline_epp.requests.body import Body, Edit

_ENDS: Final = 16 * 1024
"""Bytes of a form's beginning, and of its end, in which its model is looked for: clients put the recording last or
first."""
_BOUNDARY: Final = re.compile(rb"--[^\r\n]{1,200}\r\n")
_HEADERS: Final = rb'(?i:content-disposition): *form-data; *name="?model"?\r\n(?:[\w-]+:[^\r\n]*\r\n)?\r\n'


def model_field(body: bytes | Body) -> Edit | None:
    """Return the place and the text of the model in a form; None without one, and for other bodies. O(1)."""
    whole = body if isinstance(body, Body) else Body([body])
    size = len(whole)
    boundary = _BOUNDARY.match(whole.slice(0, 256))
    if boundary is None:
        return None
    line = re.escape(boundary.group()[:-2])
    field = re.compile(line + rb"\r\n" + _HEADERS + rb"([^\r\n]{1,1000})\r\n" + line)
    for start in (0, max(0, size - _ENDS)):
        found = field.search(whole.slice(start, min(size, start + _ENDS)))
        if found is not None:
            return Edit(start + found.start(1), start + found.end(1), found[1])
    return None
