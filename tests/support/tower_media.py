"""Checkpoints of Gemma 3 and InternVL with tokenizer, template and processor, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from support.runtime_models import save
from support.runtime_towers import reference
from support.wire import byte_level

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else "
    "message.role }}\n{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for item in message.content %}{% if item.type == 'image' %}<start_of_image>{% else %}{{ item.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
INTERN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for item in message.content %}{% if item.type == 'image' %}<IMG_CONTEXT>\n"
    "{% elif item.type == 'text' %}{{ item.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES: dict[str, dict[str, str]] = {
    "Gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    "InternVL": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>", "\n\n", "\n\n\n")


def processor_of(family: str) -> Any:
    """Make transformers' processor, with a tokenizer to which runs of newlines are tokens, as to Gemma's."""
    import transformers

    names = NAMES[family]
    fast = byte_level(added=[AddedToken(text, special=text[0] == "<") for text in (*TURNS, *names.values())])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>", extra_special_tokens=names)
    template = GEMMA_TEMPLATE if family == "Gemma3" else INTERN_TEMPLATE
    if family == "Gemma3":
        images = transformers.Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=9)
    images = transformers.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=6)
    # videos need torchvision, which is not there: nothing asks for a processor of them
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    without_videos = type("InternVLProcessor", (transformers.InternVLProcessor,), unchecked)
    return without_videos(images, tokenizer, chat_template=template, image_seq_length=4)


def make_checkpoint(family: str, folder: Path) -> Any:
    """Write a model with random weights. Returns transformers' processor."""
    processor = processor_of(family)
    tokenizer = processor.tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in NAMES[family].items()}
    names = {"boi_token_index": "boi_token", "eoi_token_index": "eoi_token", "image_token_index": "image_token"}
    if family != "Gemma3":
        names = {"image_token_id": "context_image_token"}
    changes = {name: ids[token] for name, token in names.items()}
    save(reference(family, vocab_size=len(tokenizer), **changes), folder)
    if family == "Gemma3":
        processor.save_pretrained(folder)
        return processor
    tokenizer.save_pretrained(folder)  # as older versions do, in several files
    processor.image_processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    (folder / "chat_template.jinja").write_text(INTERN_TEMPLATE)
    return processor
