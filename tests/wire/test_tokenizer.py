"""Tokenizer bundles: read from a model directory, sent as JSON."""

import json
from pathlib import Path

import pytest
from support import wire as support
from treeline_wire.chat import ChatTemplate
from treeline_wire.keys import PrefixKeys
from treeline_wire.tokenizer import MAX_BUNDLE_BYTES, BundleError, TokenizerBundle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(support.tokenizer("gpt2").to_str())
    return tmp_path


def configure(folder: Path, **members: object) -> TokenizerBundle:
    (folder / "tokenizer_config.json").write_text(json.dumps(members))
    return TokenizerBundle.from_dir(folder)


def test_a_directory_with_a_tokenizer_alone(folder: Path) -> None:
    bundle = TokenizerBundle.from_dir(folder)
    assert bundle.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert (bundle.chat_template, bundle.bos_token, bundle.add_bos) == (None, None, None)
    assert ChatTemplate.from_bundle(bundle) is None


def test_special_tokens_are_texts_or_objects(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"unk_token": {"content": "<u>"}, "eos_token": "<old>"}')
    bundle = configure(
        folder,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        pad_token=None,
        add_bos_token=False,
        extra_special_tokens={"image_token": "<img>"},
        model_max_length=10,
    )
    assert (bundle.bos_token, bundle.eos_token, bundle.add_bos) == ("<s>", "</s>", False)
    assert bundle.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<img>",
        "unk_token": "<u>",
    }


def test_the_template_file_wins_over_the_configuration(folder: Path) -> None:
    assert configure(folder, chat_template="from config").chat_template == "from config"
    (folder / "chat_template.jinja").write_text("from file")
    assert configure(folder, chat_template="from config").chat_template == "from file"


def test_older_template_files(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert TokenizerBundle.from_dir(folder).chat_template == "from json"


def test_named_templates(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}, "?"]
    bundle = configure(folder, chat_template=named)
    assert (bundle.chat_template, bundle.tool_template) == ("plain", "tools")
    template = ChatTemplate.from_bundle(bundle, inline_seconds=60.0)
    assert template is not None
    assert template.render([{"role": "user"}], tools=[{}]) == "tools"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    assert TokenizerBundle.from_dir(folder).tool_template == "file"


def test_a_bundle_survives_the_wire(folder: Path) -> None:
    bundle = configure(folder, chat_template="é{{ bos_token }}", bos_token="<s>", add_bos_token=True)
    assert TokenizerBundle.from_json(bundle.to_json()) == bundle
    newer = json.dumps({**json.loads(bundle.to_json()), "later": 1}).encode()
    assert TokenizerBundle.from_json(newer) == bundle
    PrefixKeys.from_bundle(bundle).self_test()


def test_no_engine_chooses_the_fingerprint_of_its_tokenizer(folder: Path) -> None:
    """Otherwise another pool's prompts would be rendered by its template."""
    bundle = json.loads(configure(folder, chat_template="right", bos_token="<s>").to_json())
    for lie in ({"chat_template": "wrong"}, {"tokenizer_json": "{}"}, {"bos_token": "x"}, {"add_bos": True}):
        with pytest.raises(BundleError, match="not that of its parts"):
            TokenizerBundle.from_json(json.dumps({**bundle, **lie}).encode())


def test_fingerprints_distinguish_bundles() -> None:
    base = TokenizerBundle.build("t", chat_template="c", special_tokens={"a_token": "x", "b_token": "y"})
    same = TokenizerBundle.build("t", chat_template="c", special_tokens={"b_token": "y", "a_token": "x"})
    others = [
        TokenizerBundle.build("T", chat_template="c"),
        TokenizerBundle.build("t", chat_template="C"),
        TokenizerBundle.build("t", tool_template="c"),
        TokenizerBundle.build("t", chat_template="c", add_bos=True),
        TokenizerBundle.build("t", chat_template="c"),
    ]
    assert base == same
    assert len({base.fingerprint, *(bundle.fingerprint for bundle in others)}) == 6


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"fingerprint": 1}', b"[" * 9999, b"\xff"])
def test_bad_documents_are_one_typed_error(document: bytes) -> None:
    with pytest.raises(BundleError):
        TokenizerBundle.from_json(document)


def test_a_huge_document_is_refused_unread() -> None:
    with pytest.raises(BundleError, match="too large"):
        TokenizerBundle.from_json(bytes(MAX_BUNDLE_BYTES + 1))


def test_bad_directories_are_one_typed_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no tokenizer\.json"):
        TokenizerBundle.from_dir(tmp_path / "absent")
    for text in ("{", "[]", "[" * 99999):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(BundleError, match="JSON"):
            TokenizerBundle.from_dir(folder)
    (folder / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(BundleError, match="cannot read"):
        TokenizerBundle.from_dir(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"version": "1.0", "model": null}']
)
def test_prefix_keys_refuse_an_invalid_tokenizer(text: str) -> None:
    with pytest.raises(BundleError):
        PrefixKeys(text)


def vision(folder: Path, **files: object) -> TokenizerBundle:
    """Adds the files of a model that takes images; its placeholder is the end-of-text token of the tokenizer."""
    token = support.tokenizer("gpt2").token_to_id("<|endoftext|>")
    made = {"config.json": {"image_token_id": token}, "preprocessor_config.json": {"patch_size": 16}} | files
    for name, value in made.items():
        (folder / name).write_text(json.dumps(value))
    return TokenizerBundle.from_dir(folder)


def test_a_model_that_takes_images_names_placeholder_and_processor(folder: Path) -> None:
    plain = TokenizerBundle.from_dir(folder)
    bundle = vision(folder)
    assert bundle.media is not None
    assert bundle.media.placeholders == {"image": "<|endoftext|>"}
    assert bundle.fingerprint != plain.fingerprint
    assert TokenizerBundle.from_json(bundle.to_json()) == bundle
    other = vision(folder, **{"preprocessor_config.json": {"patch_size": 14}})
    assert other.media is not None
    assert other.media.fingerprint != bundle.media.fingerprint
    assert other.fingerprint != bundle.fingerprint
    lie = json.loads(bundle.to_json()) | {"media": {"placeholders": {"image": "x"}, "fingerprint": "y"}}
    with pytest.raises(BundleError, match="not that of its parts"):
        TokenizerBundle.from_json(json.dumps(lie).encode())


def test_a_processor_without_placeholders_takes_no_images(folder: Path) -> None:
    assert vision(folder, **{"config.json": {"image_token_id": 10**6}}).media is None
    assert vision(folder, **{"config.json": {}}).media is None
    assert vision(folder, **{"preprocessor_config.json": {}}).media is None


def test_gemma_writes_an_image_between_newlines_and_all_have_as_many_tokens(folder: Path) -> None:
    token = support.tokenizer("gpt2").token_to_id("<|endoftext|>")
    config = {"model_type": "gemma3", "image_token_index": token, "boi_token_index": token}
    bundle = vision(folder, **{"config.json": config | {"eoi_token_index": token}})
    assert bundle.media is not None
    end = "<|endoftext|>"
    assert bundle.media.in_templates == {"image": end}
    assert bundle.media.expanded(f"a{end}b") == f"a\n\n{end}{end}{end}\n\nb"
    assert bundle.media.counts == {"image": 256}
    assert TokenizerBundle.from_json(bundle.to_json()) == bundle
    other = vision(folder, **{"config.json": config | {"eoi_token_index": 10**6, "mm_tokens_per_image": 64}})
    assert other.media is not None
    assert other.media.counts == {"image": 64}
    assert other.fingerprint != bundle.fingerprint


def test_internvl_writes_an_image_between_its_tokens(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"start_image_token": "<img>", "extra_special_tokens": {"end_image_token": "</img>"}})
    )
    token = support.tokenizer("gpt2").token_to_id("<|endoftext|>")
    bundle = vision(folder, **{"config.json": {"model_type": "internvl", "image_token_id": token}})
    assert bundle.media is not None
    assert bundle.media.expanded("a<|endoftext|>") == "a<img><|endoftext|></img>"
    assert bundle.media.counts == {}
    assert TokenizerBundle.from_json(bundle.to_json()) == bundle
