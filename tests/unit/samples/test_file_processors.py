"""Processors that are read without transformers, compared with those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from evaluation_checkpoints import WORDS, text_tokenizer
from generating import CHAT_TEMPLATE
from winml.modelkit.errors import InputError
from winml.modelkit.samples import processors, template_rendering
from winml.modelkit.samples.file_image_processor import DEFAULTS, FileImageProcessor, is_readable
from winml.modelkit.samples.file_tokenizer import FileTokenizer

TEXT, LONG = " ".join(WORDS[:3]), " ".join([*WORDS] * 8)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileTokenizer, Any]:
    """The same tokenizer of words by both readers."""
    folder = tmp_path_factory.mktemp("tokenizer")
    text_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return FileTokenizer(folder / "tokenizer.json", config), theirs


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        ((TEXT,), {}),
        ((LONG,), {"truncation": True, "return_tensors": "np"}),
        (([TEXT, LONG],), {"truncation": True, "padding": True, "return_tensors": "np"}),
        (([TEXT],), {"padding": "max_length", "max_length": 20, "return_tensors": "np", "truncation": True}),
        ((LONG, TEXT), {"truncation": "only_first", "max_length": 40}),
        (([TEXT.split()],), {"is_split_into_words": True, "return_offsets_mapping": True}),
        (([TEXT], [LONG]), {
            "truncation": "only_second", "max_length": 20, "stride": 4, "padding": True, "return_tensors": "np",
            "return_overflowing_tokens": True, "return_offsets_mapping": True,
        }),
        ((TEXT,), {"return_special_tokens_mask": True, "add_special_tokens": False}),
    ],
)  # fmt: skip
def test_tokens_equal_those_of_transformers(
    tokenizers: tuple[FileTokenizer, Any], texts: tuple[Any, ...], options: dict[str, Any]
) -> None:
    ours, theirs = (tokenizer(*texts, **options) for tokenizer in tokenizers)
    assert {*theirs} <= {*ours}
    for name, values in theirs.items():
        assert np.array_equal(np.asarray(values), np.asarray(ours[name])), name
    assert theirs.sequence_ids(0) == ours.sequence_ids(0)
    assert theirs.word_ids(0) == ours.word_ids(0)


def test_special_tokens_and_texts_equal_those_of_transformers(tokenizers: tuple[FileTokenizer, Any]) -> None:
    ours, theirs = tokenizers
    for name in ("pad_token", "mask_token_id", "eos_token", "model_max_length", "is_fast"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert sorted(theirs.all_special_ids) == sorted(ours.all_special_ids)
    assert theirs.get_vocab() == ours.get_vocab()
    tokens = theirs(TEXT)["input_ids"]
    assert theirs.decode(tokens, skip_special_tokens=True) == ours.decode(tokens, skip_special_tokens=True)
    assert theirs.num_special_tokens_to_add(pair=True) == ours.num_special_tokens_to_add(pair=True)


@pytest.mark.parametrize("name", ["BertTokenizer", "GemmaTokenizer", "LlamaTokenizer", "XLMRobertaTokenizer"])
def test_omitted_tokens_and_sides_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    """An old ``tokenizer_config.json`` states neither special tokens nor the side of the padding."""
    getattr(transformers, name)().save_pretrained(tmp_path)
    config = {"tokenizer_class": name, "model_max_length": 8}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = FileTokenizer(tmp_path / "tokenizer.json", config)
    for token in ("pad_token", "pad_token_id", "mask_token", "mask_token_id"):
        assert getattr(theirs, token) == getattr(ours, token), token
    assert theirs.padding_side == ours._sides["padding"]


@pytest.mark.parametrize("text", ["{", "[]", "\\xff"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_damaged_file_of_a_tokenizer_is_named(name: str, text: str, tmp_path: Path) -> None:
    text_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=name):
        processors._open_file_processor("tokenizer", tmp_path, "--text")


@pytest.mark.parametrize("size", [(80, 100), (61, 40), (20, 20)], ids=str)
@pytest.mark.parametrize(
    "processor",
    [
        transformers.ViTImageProcessorPil(size={"height": 32, "width": 24}),
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": 33, "width": 36}),
        transformers.CLIPImageProcessorPil(do_resize=False, crop_size={"height": 33, "width": 36}),
        transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32}, crop_pct=0.9),
        transformers.ConvNextImageProcessorPil(size={"shortest_edge": 384}),
        transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        transformers.MobileNetV2ImageProcessorPil(),
        transformers.DeiTImageProcessorPil(do_normalize=False),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_pixels_equal_those_of_transformers(processor: Any, size: tuple[int, int], tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "preprocessor_config.json").read_text(encoding="utf-8"))
    pixels = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = processor(images=[image], return_tensors="np")["pixel_values"]
    assert is_readable(config)
    assert np.array_equal(expected, FileImageProcessor(config)(images=[image])["pixel_values"])


@pytest.mark.parametrize(
    "values",
    [
        {"do_pad": True},
        {"size": {"shortest_edge": 40, "longest_edge": 60}},
        {"size": {"max_height": 40, "max_width": 60}},
    ],
)
def test_padding_and_other_sizes_are_left_to_transformers(values: dict[str, Any]) -> None:
    """Without them the pixels would differ silently."""
    assert not is_readable({"image_processor_type": "CLIPImageProcessor", **values})


@pytest.mark.parametrize("name", DEFAULTS)
def test_omitted_values_are_those_of_the_class(name: str) -> None:
    processor = getattr(transformers, f"{name}Pil")()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 50, 3), dtype=np.uint8))
    expected = processor(images=[image], return_tensors="np")["pixel_values"]
    pixels = FileImageProcessor({"image_processor_type": name})(images=[image])["pixel_values"]
    assert np.array_equal(expected, pixels)


def test_chat_template_is_rendered_as_by_transformers() -> None:
    block = (
        "{% generation %}{{ messages[0] | tojson }}\n{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
    )
    values = {"bos_token": "<s>", "add_generation_prompt": True}
    for template in (CHAT_TEMPLATE, block):
        messages: list[dict[str, object]] = [{"role": "user", "content": "é <b>"}]
        expected = template_rendering._render(template, messages, {"bos_token": "<s>"})
        assert expected == {"text": template_rendering._render_with_jinja(template, messages, values)}
