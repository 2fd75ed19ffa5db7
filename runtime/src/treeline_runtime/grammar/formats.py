"""Formats of JSON Schema as patterns of our own, since libraries differ and accept the 31st of April.

From RFC 3339 (dates and times; no leap seconds, which no parser takes), RFC 5321 (email: dot-string and domain), RFC
1123 (hostname; no label has `--` in its third place, as those in Punycode do: a pattern cannot tell whether they are
right), RFC 4291 (IPv6 without embedded IPv4), RFC 3986 and 3987 (uri, iri and references: with a host's name or a
path), RFC 6570 (uri-template), RFC 6901 (json-pointer), ISO 8601 (duration). `regex` has what every dialect reads
alike: characters, simple sets, repetitions, groups that are not in one another. Names of hosts are ASCII's.
"""

from __future__ import annotations

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:(?:[1-9]\d|0[1-9]){_LEAP}|00{_LEAP}|{_LEAP}00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = (
    r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,2}[A-Za-z0-9]"
    r"|[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,35}[A-Za-z0-9])?"
)
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,5}}"  # 245 characters at most, of 253
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_HOURS = r"(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_H16 = r"[0-9A-Fa-f]{1,4}"
_BEYOND_ASCII = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9]\d{0,3}|\*)?"
_ATOM_OF_REGEX = r"(?:[A-Za-z0-9 _,:;=@#%&~'<>/!.-]|\\[dDwWsS.\\/()*+?|^$]|\[\^?[A-Za-z0-9_]+\])[*+?]?"


def _reference(more: str = "") -> tuple[str, str]:
    """Returns (with scheme, without). more: characters beyond ASCII."""
    name = rf"(?:[A-Za-z0-9._~!$&'()*+,;={more}-]|%[0-9A-Fa-f]{{2}})"
    char = rf"(?:{name}|[:@])"
    host = rf"//(?:(?:(?:{name}|:)*@)?{name}+(?::\d{{1,5}})?(?:/{char}*)*|(?:/{char}*)+)"
    rest = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    with_scheme = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{host}|/?{char}+(?:/{char}*)*){rest}"
    return with_scheme, rf"(?:{host}|/(?:{char}+(?:/{char}*)*)?|(?:{name}|@)+(?:/{char}*)*)?{rest}"


_URI, _RELATIVE_URI = _reference()
_IRI, _RELATIVE_IRI = _reference(_BEYOND_ASCII)


def _ipv6() -> str:
    """Eight groups, or up to seven with `::` for the others."""
    forms = [rf"(?:{_H16}:){{7}}{_H16}", rf"::(?:{_H16}(?::{_H16}){{0,6}})?"]
    forms += [rf"{_H16}(?::{_H16}){{{n - 1}}}::(?:{_H16}(?::{_H16}){{0,{6 - n}}})?" for n in range(1, 7)]
    return "|".join([*forms, rf"{_H16}(?::{_H16}){{6}}::"])


FORMATS: dict[str, str] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": rf"{_DATE}T{_TIME}",
        "duration": rf"P(?:\d+W|{_DAYS}(?:T{_HOURS})?|T{_HOURS})",
        **dict.fromkeys(("email", "idn-email"), rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}"),
        **dict.fromkeys(("hostname", "idn-hostname"), _HOST),
        "emoji": "[\U0001f600-\U0001f64f]+",
        "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
        "ipv6": _ipv6(),
        "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "uri": _URI,
        "uri-reference": f"{_URI}|{_RELATIVE_URI}",
        "iri": _IRI,
        "iri-reference": f"{_IRI}|{_RELATIVE_IRI}",
        "uri-template": rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|%[0-9A-Fa-f]{{2}}"
        rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*",
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
        "regex": rf"\^?(?:{_ATOM_OF_REGEX}|\((?:\?:)?(?:{_ATOM_OF_REGEX})+(?:\|(?:{_ATOM_OF_REGEX})+)*\)[*+?]?)*\$?",
    }.items()
}
"""By name; a text has the format if the pattern matches."""

REDUNDANT = {
    "duration": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,"
        r"]\d+)?S)?)?)$"
    ),
    "hostname": (
        r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?"
        r":[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
    ),
    "emoji": (
        r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])[\p{Extended_"
        r"Pictographic}\p{Emoji_Component}]+$"
    ),
}
"""Patterns that zod 4 writes beside formats; the format already covers their look-arounds."""
