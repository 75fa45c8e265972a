"""Classes that prepare inputs, from a checkpoint's files or from transformers' tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winml.modelkit.errors import CheckpointError
from winml.modelkit.models.checkpoints.processor_files import ProcessorClass, find_processor_classes
from winml.modelkit.models.checkpoints.task import inference_class


def test_processor_classes_of_files_win_over_the_tables(tmp_path: Path) -> None:
    """Classes named in files come first; the other classes are looked up for the existing inputs."""
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "OwnImages", "processor_class": "OwnProcessor"}), encoding="utf-8"
    )
    found = find_processor_classes(tmp_path, "clip", ["input_ids", "pixel_values"])
    assert (
        ProcessorClass("processor", "OwnProcessor", "preprocessor_config.json"),
        ProcessorClass("image processor", "OwnImages", "preprocessor_config.json"),
    ) == found[:2]
    assert ("tokenizer", "transformers' table") == (found[2].role, found[2].origin)


@pytest.mark.parametrize(
    ("model_type", "inputs", "expected"),
    [
        ("bert", ["input_ids"], {"tokenizer": "BertTokenizer"}),
        ("vit", ["pixel_values"], {"image processor": "ViTImageProcessor"}),
        ("wav2vec2", ["input_values"], {"feature extractor": "Wav2Vec2FeatureExtractor"}),
        ("no-such-type", ["input_ids"], {}),
        ("bert", ["something_else"], {}),
    ],
)
def test_processor_classes_without_files_come_from_the_tables(
    model_type: str, inputs: list[str], expected: dict[str, str]
) -> None:
    """The inputs decide which roles are needed."""
    assert expected == {item.role: item.class_name for item in find_processor_classes(None, model_type, inputs)}


def test_processor_classes_malformed_file_is_reported(tmp_path: Path) -> None:
    """A broken file is named with its line."""
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*line 1"):
        find_processor_classes(tmp_path, "bert", ["input_ids"])


@pytest.mark.parametrize(
    ("task", "class_name", "model_type", "expected"),
    [
        ("feature-extraction", "BertModel", "bert", "WinMLModelForFeatureExtraction"),
        ("fill-mask", "BertForMaskedLM", "bert", "WinMLModelForMaskedLM"),
        ("text-generation", "LlamaForCausalLM", "llama", "WinMLModelForCausalLM"),
        ("text2text-generation", "T5ForConditionalGeneration", "t5", "WinMLModelForSeq2SeqLM"),
        ("automatic-speech-recognition", "Wav2Vec2ForCTC", "wav2vec2", "WinMLModelForCTC"),
        ("automatic-speech-recognition", "WhisperForConditionalGeneration", "whisper", "WinMLModelForSpeechSeq2Seq"),
        ("image-segmentation", "SegformerForSemanticSegmentation", "segformer", "WinMLModelForSemanticSegmentation"),
        ("backbone", "", "", "WinMLModelForBackbone"),
    ],
)
def test_inference_class_is_the_auto_class_of_the_task(
    task: str, class_name: str, model_type: str, expected: str
) -> None:
    """The class of the model decides if a task has several auto classes."""
    assert expected == inference_class(task, class_name, model_type)
