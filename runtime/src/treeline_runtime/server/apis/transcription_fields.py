"""`POST /v1/audio/transcriptions`: a form with a recording → a chat, whose answer is the text that is said.

https://platform.openai.com/docs/api-reference/audio/createTranscription. Qwen3-ASR answers `language English<asr_text>`
and the text; where the language is given, the chat ends with the former.
"""

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import create_form_parser

from treeline_runtime.server.errors import ApiError, invalid, missing, short, wrong
from treeline_runtime.server.fields import Body
from treeline_runtime.server.sampling import Temperature

_MOST_PARTS: Final = 64
MARK: Final = "<asr_text>"
LANGUAGES: Final = {
    "ar": "Arabic",
    "yue": "Cantonese",
    "zh": "Chinese",
    "cs": "Czech",
    "da": "Danish",
    "nl": "Dutch",
    "en": "English",
    "fil": "Filipino",
    "fi": "Finnish",
    "fr": "French",
    "de": "German",
    "el": "Greek",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "fa": "Persian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "es": "Spanish",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
}
"""The names that the model was trained with, by ISO code."""
NAMES: Final = {"messages": "file", "max_tokens": "file"}
MEMBERS: Final[Mapping[str, str]] = {}
"""What the chat's errors are about, in this API."""


class TranscriptionBody(Body, frozen=True, kw_only=True):
    """A form (multipart/form-data)."""

    harmless: ClassVar = {"chunking_strategy": "recordings are read whole"}
    file: bytes
    """A recording: WAV, MP3, FLAC, Ogg, M4A, MP4 or WebM."""
    model: str | None = None
    language: str | None = None
    """The ISO 639-1 code or English name; the model finds it out if it is not given."""
    prompt: str | None = None
    """Names and words to expect."""
    response_format: Literal["json", "text"] | None = None
    temperature: Temperature | None = None
    stream: bool | None = None


def read_form(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of a form, in which the boundary is found as its first line. Raises ApiError 400."""
    found: dict[str, Any] = {}

    def take(name: bytes | None, value: Any) -> None:
        if len(found) == _MOST_PARTS:
            raise ApiError(400, f"The form has more than {_MOST_PARTS} fields")
        field = (name or b"").decode(errors="replace")
        if field in found:  # the picker may have read the other one
            raise wrong(field, f"The form has {short(field)!r} twice")
        found[field] = value

    def take_file(file: Any) -> None:
        file.file_object.seek(0)
        take(file.field_name, file.file_object.read())

    boundary = bytes(body[:200]).partition(b"\r\n")[0].removeprefix(b"--")
    if not boundary or not body.startswith(b"--"):
        raise ApiError(400, "The body must be a form with a recording: multipart/form-data")
    parser = create_form_parser(
        {"Content-Type": b"multipart/form-data; boundary=" + boundary},
        lambda field: take(field.field_name, (field.value or b"").decode(errors="replace")),
        take_file,
        config={"MAX_MEMORY_FILE_SIZE": len(body)},  # nothing is written to a disk
    )
    try:
        parser.write(bytes(body))
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"The form is not understood: {error}") from None
    for name in found.keys() & {"temperature", "stream"}:
        with contextlib.suppress(msgspec.MsgspecError, TypeError):  # what is no number is refused by its type
            found[name] = msgspec.json.decode(found[name])
    return found


def chat_of(body: TranscriptionBody) -> dict[str, Any]:
    """The chat in which a recording is asked about. Raises ApiError 400."""
    if not body.file:
        raise missing("file")
    sound = {"type": "input_audio", "input_audio": {"data": b64encode(body.file).decode()}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [sound]}]
    if body.prompt:
        messages.insert(0, {"role": "system", "content": body.prompt})
    chat = {"model": body.model, "messages": messages, "temperature": body.temperature or 0.0}
    if not body.language:
        return chat
    language = LANGUAGES.get(body.language.lower(), body.language.title())
    if language not in LANGUAGES.values():
        raise invalid("language", f"it is none of {', '.join(LANGUAGES)}")
    messages.append({"role": "assistant", "content": f"language {language}{MARK}"})
    return chat | {"continue_final_message": True, "add_generation_prompt": False}
