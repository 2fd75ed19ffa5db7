"""What a model's files tell its processors. Nothing heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

TOGETHER: Final = "Qwen3VLVideoProcessor"
"""The processor whose bounds of pixels are for all frames, and not for each; each stands behind its time."""
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "Qwen2VLVideoProcessor": {
        "do_sample_frames": False,
        "fps": None,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    },
    TOGETHER: {
        "do_sample_frames": True,
        "fps": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    },
}
_COMMON: Final = {"max_frames": 768, "merge_size": 2, "min_frames": 4, "num_frames": None, "temporal_patch_size": 2}
_ALWAYS: Final = {
    "cap_pixels_per_frame": False,
    "do_center_crop": False,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
"""The only values with which these settings are obeyed."""
_BY_MODEL: Final = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": TOGETHER, "qwen3_vl_moe": TOGETHER}


def read_settings(folder: Path) -> dict[str, Any]:
    """All settings for videos, with `video_processor_type`. Raises ValueError for one that is not obeyed."""
    given = settings_of(folder, "processor_config.json").get("video_processor")
    given = given or settings_of(folder, "video_preprocessor_config.json")
    given = given or settings_of(folder, "preprocessor_config.json")
    given = {name: value for name, value in given.items() if value is not None}
    of_model = _BY_MODEL.get(settings_of(folder, "config.json").get("model_type", ""))
    kind = given.setdefault("video_processor_type", of_model or "Qwen2VLVideoProcessor")
    if kind not in _DEFAULTS or of_model not in (None, kind):
        raise ValueError(f"video_processor_type {kind!r} is not known")
    for name, only in _ALWAYS.items():
        if given.get(name, only) != only:
            raise ValueError(f"{name} {given[name]!r} is not supported, only {only!r}")
    made: dict[str, Any] = _COMMON | _DEFAULTS[kind] | given
    names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    made["size"] = size = made["size"] | {edge: given[name] for edge, name in names.items() if name in given}
    if not names.keys() <= size.keys():
        raise ValueError(f"size {size!r} is not supported, only {' and '.join(names)}")
    return made


def pans(folder: Path) -> bool:
    """Whether the processor cuts images into some more, which do not have as many tokens."""
    files = [settings_of(folder, path.name) for path in folder.glob("*processor_config.json")]
    nested = [one.get("image_processor") or {} for one in files]
    return any(one.get("do_pan_and_scan") for one in files + nested)


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    """The content of a model's JSON file; {} without it. Raises ValueError."""
    path = folder / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
