"""Decodes recordings and makes spectrograms, as the model's processor does. Imported only in a process for it."""

from __future__ import annotations

import io
import wave
from itertools import chain
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from transformers import AutoFeatureExtractor

from treeline_runtime.media.protocol import Made, Refused, check_room
from treeline_runtime.models.audio import count_of

_BEGINNINGS: Final = (
    (0, b"RIFF", "wav"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (4, b"ftyp", "mov"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
)
"""Offset, bytes, and the format that they begin: FFmpeg may not guess, since it has formats that name other files."""

_CODECS: Final = sorted(
    {"aac", "alac", "flac", "mp3", "mp3float", "opus", "vorbis"}
    | {name for name in av.codecs_available if name.startswith("pcm_")}
)
"""What is decoded, of sound alone: FFmpeg has hundreds of others, also for pictures, which it would look into."""
_MOST_RATE: Final = 192_000
"""Samples per second of a recording; more of them count as a longer one."""


class Recordings:
    def __init__(self, folder: str, seconds: int) -> None:
        """seconds: the most of a recording."""
        self._extractor: Any = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self._rate: int = self._extractor.sampling_rate
        self._chunk: int = 2 * self._extractor.n_window
        self._seconds = seconds

    def read(self, data: bytes, most: int) -> tuple[Made, npt.NDArray[np.float32]]:
        """A recording as the model's encoder takes it. Raises Refused."""
        samples = self._samples(data)
        count = count_of(len(samples) // self._extractor.hop_length, self._chunk)
        check_room(count, most)
        made = self._extractor(
            [samples], sampling_rate=self._rate, padding=True, return_attention_mask=True, return_tensors="np"
        )
        spectrogram, frames = made["input_features"][0], int(made["attention_mask"].sum())
        if not np.isfinite(spectrogram).all():
            raise Refused("its samples are no sound: not finite, or far too loud")
        return Made(count_of(frames, self._chunk), (frames, 1, 1), spectrogram.shape), spectrogram

    def _samples(self, data: bytes) -> npt.NDArray[np.float32]:
        """One channel at the processor's rate. Raises Refused."""
        form = next((form for at, head, form in _BEGINNINGS if data.startswith(head, at)), None)
        if form is None:
            raise Refused("it is no recording in a known format (WAV, MP3, FLAC, Ogg, M4A, MP4 or WebM)")
        pieces, left = list[npt.NDArray[np.float32]](), float(self._seconds)
        try:
            with av.open(
                io.BytesIO(data), "r", format=form, options={"codec_whitelist": ",".join(_CODECS)}
            ) as container:
                stream = container.streams.audio[0]
                if stream.codec_context.name not in _CODECS:
                    raise Refused("its codec is not known here")
                resampler = av.AudioResampler(format="flt", layout="mono", rate=self._rate)
                for frame in chain(container.decode(stream), (None,)):
                    if frame is not None:
                        left -= frame.samples / min(frame.sample_rate, _MOST_RATE)
                    if left < 0:  # before samples of a low rate become many
                        raise Refused(f"it is longer than {self._seconds} s (--max-audio-seconds)")
                    pieces += [piece.to_ndarray()[0].copy() for piece in resampler.resample(frame)]
        except Exception as error:  # whatever a decoder stumbles over
            if isinstance(error, Refused) or type(error) is MemoryError:
                raise
            raise Refused("it is broken, or has no sound: it cannot be decoded") from None
        if not pieces:
            raise Refused("it has no sound")
        return np.concatenate(pieces)

    def examples(self) -> list[bytes]:
        """A recording: decoding it does late imports."""
        file = io.BytesIO()
        with wave.open(file, "wb") as made:
            made.setparams((1, 2, 8000, 0, "NONE", ""))
            made.writeframes(bytes(16000))
        return [file.getvalue()]
