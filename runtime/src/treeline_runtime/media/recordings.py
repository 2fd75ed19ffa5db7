"""Decodes recordings and makes spectrograms, as the model's processor does. Imported only in a process for it."""

from __future__ import annotations

import io
import wave
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from transformers import AutoFeatureExtractor

from treeline_runtime.media.protocol import Made, Refused
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
        if count > most:
            raise Refused(f"it takes {count} tokens of the context, which has room for {most}")
        made = self._extractor(
            [samples], sampling_rate=self._rate, padding=True, return_attention_mask=True, return_tensors="np"
        )
        spectrogram, frames = made["input_features"][0], int(made["attention_mask"].sum())
        return Made(count_of(frames, self._chunk), (frames, 1, 1), spectrogram.shape), spectrogram

    def _samples(self, data: bytes) -> npt.NDArray[np.float32]:
        """One channel at the processor's rate. Raises Refused."""
        form = next((form for at, head, form in _BEGINNINGS if data.startswith(head, at)), None)
        if form is None:
            raise Refused("it is no recording in a known format (WAV, MP3, FLAC, Ogg, M4A, MP4 or WebM)")
        pieces, left = list[npt.NDArray[np.float32]](), self._seconds * self._rate
        try:
            with av.open(io.BytesIO(data), "r", format=form) as container:
                resampler = av.AudioResampler(format="flt", layout="mono", rate=self._rate)
                for frame in (*container.decode(audio=0), None):
                    for piece in resampler.resample(frame):
                        pieces.append(piece.to_ndarray()[0].copy())
                        left -= piece.samples
                        if left < 0:
                            raise Refused(f"it is longer than {self._seconds} s (--max-audio-seconds)")
        except (av.FFmpegError, ValueError, IndexError, OSError):
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
