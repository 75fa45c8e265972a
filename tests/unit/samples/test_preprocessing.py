"""Input arrays made by the tokenizer, image processor or feature extractor beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from checkpoints import save_image_processor
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.onnx.specs import InputTensorSpec, graph_input
from winml.modelkit.samples.media import Recording, open_image
from winml.modelkit.samples.preprocessing import Batch, Preprocessor

WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "the", "dog", "saw", "a", "red", "ball", "who", "##s"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files beside a model of texts, images and recordings."""
    from transformers import BertTokenizerFast, Wav2Vec2FeatureExtractor

    root = tmp_path_factory.mktemp("model")
    BertTokenizerFast(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(root)
    save_image_processor(root, 16)
    (root / "config.json").write_text(json.dumps({"max_position_embeddings": 6}))
    Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(root / "sound")
    return root


def text_inputs(*sizes: int | str) -> list[InputTensorSpec]:
    """Return the inputs of a BERT."""
    return [graph_input(name, "int64", sizes) for name in ("input_ids", "attention_mask", "token_type_ids")]


def texts_of(
    folder: Path, inputs: list[InputTensorSpec], samples: list[dict[str, Any]], size: int | None = None
) -> list[Batch]:
    """All batches of some samples."""
    return list(Preprocessor.of(folder, inputs).batches(samples, size))


def test_texts_of_a_batch_have_the_length_of_the_longest(folder: Path) -> None:
    """The config's number of positions limits the length; each row has its token information."""
    samples = [{"text": "the dogs"}, {"text": "a"}, {"text": "the dog saw a red ball"}]
    first, second = texts_of(folder, text_inputs("batch", "length"), samples, 2)
    assert [[2, 4, 5, 11, 3], [2, 7, 3, 1, 1]] == first.feeds["input_ids"].tolist()
    assert [[1] * 5, [1, 1, 1, 0, 0]] == first.feeds["attention_mask"].tolist()
    assert [[2, 4, 5, 6, 7, 3]] == second.feeds["input_ids"].tolist(), "cut to six positions"
    assert (None, 0, 1, 1, None) == first.rows[0].word_ids
    assert first.rows[0].offsets is not None
    assert [[0, 0], [0, 3], [4, 7], [7, 8], [0, 0]] == first.rows[0].offsets.tolist()
    assert [0, 1, 2] == [row.number for batch in (first, second) for row in batch.rows]


def test_last_batch_of_a_fixed_size_is_filled_up(folder: Path) -> None:
    """Copies of the last row fill the batch and are dropped from outputs; element types are those of the graph."""
    inputs = [graph_input("input_ids", "int32", (2, 8))]
    _, last = texts_of(folder, inputs, [{"text": text} for text in ("the", "a", "red ball")])
    assert [[2, 8, 9, 3, 1, 1, 1, 1]] * 2 == last.feeds["input_ids"].tolist()
    assert np.int32 == last.feeds["input_ids"].dtype
    assert (1, 1) == (len(last.rows), len(last.trimmed(np.zeros((2, 3)))))
    with pytest.raises(UsageError, match="batch size of 2"):
        texts_of(folder, inputs, [{"text": "the"}], 3)


def test_decoder_begins_each_text_with_an_empty_cache(folder: Path) -> None:
    """Positions count the tokens of the text; keys and values have no tokens, other states are zeros."""
    rest = [
        graph_input("position_ids", "int64", ("b", "s")),
        graph_input("past_key_values.0.key", "float16", ("b", 2, "past", 4), {"cache": {"kind": "key"}}),
        graph_input("past_conv.1", "float32", ("b", 3), {"cache": {"kind": "conv"}}),
    ]
    tokens = [graph_input("input_ids", "int64", ("b", "s")), graph_input("attention_mask", "int64", ("b", "past + s"))]
    (batch,) = texts_of(folder, [*tokens, *rest], [{"text": "the dog"}, {"text": "a"}], 2)
    assert [[0, 1, 2, 3], [0, 1, 2, 2]] == batch.feeds["position_ids"].tolist()
    key = batch.feeds["past_key_values.0.key"]
    assert ((2, 2, 0, 4), np.float16) == (key.shape, key.dtype)
    assert [[0.0] * 3] * 2 == batch.feeds["past_conv.1"].tolist()
    with pytest.raises(UsageError, match="one token"):
        texts_of(folder, [graph_input("input_ids", "int64", ("b", 1)), rest[2]], [{"text": "the dog"}])
    kept = graph_input("past_key_values.0.key", "float32", ("b", 2, 7, 4), {"cache": {"kind": "key"}})
    with pytest.raises(UsageError, match=r"past_key_values.0.key float32\[b, 2, 7, 4\]"):
        texts_of(folder, [*tokens, kept], [{"text": "the dog"}])


def test_long_context_is_read_in_windows(folder: Path) -> None:
    """Each window is a row of the sample, with a mask of the context's tokens."""
    samples = [{"question": "who", "context": "the dog saw a red ball"}, {"question": "who", "context": "a dog"}]
    batches = texts_of(folder, text_inputs(1, 8), samples)
    assert [0, 0, 1] == [row.number for batch in batches for row in batch.rows]
    rows = [batch.feeds["input_ids"][0].tolist() for batch in batches]
    assert [[2, 10, 3, 4, 5, 6, 7, 3], [2, 10, 3, 6, 7, 8, 9, 3]] == rows[:2], "two tokens are in both"
    assert (None, 0, None, 1, 1, 1, 1, None) == batches[0].rows[0].sequence_ids


def test_pairs_and_words_are_distinguished(folder: Path) -> None:
    """A pair has two types of tokens; every token of a word has the number of the word."""
    (pair,) = texts_of(folder, text_inputs("b", "s"), [{"text": "the dog", "text_pair": "a"}])
    assert [[0, 0, 0, 0, 1, 1]] == pair.feeds["token_type_ids"].tolist()
    (words,) = texts_of(folder, text_inputs("b", "s"), [{"tokens": ["dogs", "saw"]}])
    assert (None, 0, 0, 1, None) == words.rows[0].word_ids


def test_images_are_converted_to_the_input_of_the_graph(folder: Path) -> None:
    """Grey images get three channels; the original size is kept; a note reports resizing for another graph size."""
    samples = [{"image": Image.fromarray(np.full((20, 40), 255, np.uint8))}]
    (batch,) = Preprocessor.of(folder, [graph_input("pixel_values", "float16", ("b", 3, "h", "w"))]).batches(samples)
    assert ((1, 3, 16, 16), np.float16) == (batch.feeds["pixel_values"].shape, batch.feeds["pixel_values"].dtype)
    assert (1.0, (20, 40)) == (float(batch.feeds["pixel_values"].max()), batch.rows[0].image_size)
    other = Preprocessor.of(folder, [graph_input("pixel_values", "float32", (1, 3, 8, 8))])
    assert (1, 3, 8, 8) == next(other.batches(samples)).feeds["pixel_values"].shape
    assert "8 x 8" in other.notes[0]


def test_recordings_have_the_rate_of_the_model(folder: Path) -> None:
    """The shorter recording is padded; recordings are cut for a graph of fixed length."""
    samples = [{"audio": Recording(np.ones(length, np.float32), 8000)} for length in (100, 50)]
    inputs = [graph_input("input_values", "float32", ("b", "s")), graph_input("attention_mask", "int64", ("b", "s"))]
    (batch,) = Preprocessor.of(folder / "sound", inputs).batches(samples, 2)
    assert (2, 200) == batch.feeds["input_values"].shape
    assert [200, 100] == batch.feeds["attention_mask"].sum(axis=1).tolist()
    fixed = Preprocessor.of(folder / "sound", [graph_input("input_values", "float32", (1, 120))])
    assert [(1, 120)] * 2 == [batch.feeds["input_values"].shape for batch in fixed.batches(samples)]


def test_unknown_graph_inputs_are_named(folder: Path) -> None:
    """An unknown input, a graph without known inputs, and a value other than text are refused."""
    with pytest.raises(UsageError, match=r"head_mask int64\[1, s\]"):
        texts_of(folder, [*text_inputs(1, "s"), graph_input("head_mask", "int64", (1, "s"))], [{"text": "a"}])
    with pytest.raises(UsageError, match=r"x float32\[4\]"):
        Preprocessor.of(folder, [graph_input("x", "float32", (4,))])
    with pytest.raises(UsageError, match="has int"):
        texts_of(folder, text_inputs(1, "s"), [{"text": 3}])
    pixels = graph_input("pixel_values", "float32", (1, 1, 16, 16))
    with pytest.raises(UsageError, match=r"pixel_values float32\[1, 1, 16, 16\]"):
        texts_of(folder, [pixels], [{"image": Image.new("RGB", (4, 4))}])


def test_missing_or_damaged_files_beside_the_model_are_named(folder: Path, tmp_path: Path) -> None:
    """The message names the folder, or the damaged file's role."""
    with pytest.raises(
        UsageError, match=f"texts require a tokenizer, but there is none beside the model in {tmp_path}"
    ):
        Preprocessor.of(tmp_path, text_inputs(1, 8))
    (tmp_path / "tokenizer.json").write_text("{ nothing")
    with pytest.raises(InputError, match="the tokenizer"):
        Preprocessor.of(tmp_path, text_inputs(1, 8))
    with pytest.raises(UsageError, match="image processor"):
        Preprocessor.of(folder / "sound" / "no", [graph_input("pixel_values", "float32", (1, 3, 8, 8))])


def test_cut_texts_and_recordings_are_counted(folder: Path) -> None:
    samples = [{"text": "the dog saw a red ball"}, {"text": "a"}, {"text": "a red ball saw the dog"}]
    texts = Preprocessor.of(folder, text_inputs("b", "s"))
    list(texts.batches(samples, 2))
    sounds = Preprocessor.of(folder / "sound", [graph_input("input_values", "float32", ("b", 80))])
    list(sounds.batches([{"audio": Recording(np.ones(length, np.float32), 16_000)} for length in (81, 80)], 2))
    assert ("2 texts are longer than 6 tokens and truncated",) == texts.notes
    assert ("1 recording is longer than the model takes and truncated",) == sounds.notes


def test_length_of_sentence_transformers_counts(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 4}))
    (batch,) = texts_of(tmp_path, text_inputs("b", "s"), [{"text": "the dog saw a red ball"}])
    assert (1, 4) == batch.feeds["input_ids"].shape


def test_long_question_is_refused_if_no_context_fits(folder: Path) -> None:
    """A stride as long as the room would make the tokenizer panic."""
    samples = [{"question": "who saw a", "context": "the dog saw"}, {"question": "who", "context": "the dog saw a"}]
    batches = texts_of(folder, text_inputs(1, 7), samples)
    assert [0, 0, 0, 1, 1] == [row.number for batch in batches for row in batch.rows]
    with pytest.raises(InputError, match=r"sample 1, .* 4 tokens, .* 7"):
        texts_of(folder, text_inputs("b", 7), [samples[1], {"question": "who saw a ball", "context": "the"}], 2)


def test_images_are_rotated_by_their_orientation(tmp_path: Path) -> None:
    """Files and pictures that are open already."""
    image, exif = Image.fromarray(np.zeros((4, 8, 3), np.uint8)), Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    for cell in (str(tmp_path / "a.jpg"), Image.open(tmp_path / "a.jpg")):
        opened = open_image(cell, None, "row 0")
        assert isinstance(opened, Image.Image)
        assert (4, 8) == opened.size
