"""Choice of task and model class, and the rule that explains the choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from winml.modelkit.errors import TaskError, UsageError
from winml.modelkit.models.checkpoints.task import (
    TASK_ALIASES,
    TASK_VARIANTS,
    TASKS,
    canonical_task,
    resolve_custom_task,
    resolve_task,
    tasks_for,
)


def _config(model_type: str, *architectures: str) -> Any:
    return SimpleNamespace(model_type=model_type, architectures=list(architectures) or None)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("sentence-similarity", "feature-extraction"),
        ("Sentiment_Analysis", "text-classification"),
        ("ner", "token-classification"),
        ("causal-lm", "text-generation"),
        ("summarization", "text2text-generation"),
        ("fill-mask", "fill-mask"),
        ("default", "feature-extraction"),
    ],
)
def test_task_alias_is_understood(name: str, task: str) -> None:
    """Other names, cases and separators mean the same task."""
    assert task == canonical_task(name)


def test_task_aliases_lead_to_tasks_and_shadow_no_task() -> None:
    """Every alias leads to a task and is not the name of a task."""
    assert set(TASK_ALIASES.values()) <= set(TASKS)
    assert not set(TASK_ALIASES) & set(TASKS)


def test_task_names_cover_the_pipelines_of_transformers() -> None:
    """Every pipeline name is known, except pipelines that drive a chat or need another model."""
    from transformers.pipelines import SUPPORTED_TASKS

    known = {*TASKS, *TASK_ALIASES, *TASK_VARIANTS}
    assert {"any-to-any", "decision", "zero-shot-audio-classification"} >= set(SUPPORTED_TASKS) - known


def test_task_unknown_names_nearest_and_lists_candidates() -> None:
    """A typo is met with the word that was meant."""
    with pytest.raises(TaskError, match="'fill-mask'") as caught:
        canonical_task("fill-maks")
    assert "text-generation" in caught.value.candidates


@pytest.mark.parametrize(
    ("config", "task", "class_name"),
    [
        (_config("bert", "BertForMaskedLM"), "fill-mask", "BertForMaskedLM"),
        (_config("bert", "BertModel"), "feature-extraction", "BertModel"),
        (_config("bert"), "feature-extraction", "BertModel"),
        (_config("gpt2", "GPT2LMHeadModel"), "text-generation", "GPT2LMHeadModel"),
        (_config("bart", "BartForConditionalGeneration"), "text2text-generation", "BartForConditionalGeneration"),
        (_config("t5", "T5EncoderModel"), "feature-extraction", "T5EncoderModel"),
        (_config("clip", "CLIPModel"), "zero-shot-image-classification", "CLIPModel"),
        (_config("wav2vec2", "Wav2Vec2ForCTC"), "automatic-speech-recognition", "Wav2Vec2ForCTC"),
        (_config("segformer", "SegformerForSemanticSegmentation"), "image-segmentation",
         "SegformerForSemanticSegmentation"),
        (_config("electra", "ElectraForPreTraining"), "pretraining", "ElectraForPreTraining"),
        (_config("clip_vision_model", "CLIPVisionModelWithProjection"), "feature-extraction",
         "CLIPVisionModelWithProjection"),
    ],
)  # fmt: skip
def test_task_without_request_follows_the_config(config: Any, task: str, class_name: str) -> None:
    """The architecture decides, else the model type; the rule names the one used."""
    decision = resolve_task(config)
    assert (task, class_name) == (decision.task, decision.model_class_name)
    assert (config.architectures or [config.model_type])[0] in decision.rule


@pytest.mark.parametrize(
    ("asked", "class_name"),
    [
        ("feature-extraction", "BertModel"),
        ("masked-lm", "BertForMaskedLM"),
        ("ner", "BertForTokenClassification"),
    ],
)
def test_requested_task_decides_the_class(asked: str, class_name: str) -> None:
    """The class follows the task, not the architecture of the checkpoint."""
    decision = resolve_task(_config("bert", "BertForMaskedLM"), asked)
    assert class_name == decision.model_class_name
    assert "--task" in decision.rule


@pytest.mark.parametrize(
    ("config", "model_class", "task", "expected"),
    [
        (_config("bert", "BertModel"), "BertForMaskedLM", None, ("fill-mask", "BertForMaskedLM")),
        (_config("bert", "BertModel"), "AutoModelForMaskedLM", None, ("fill-mask", "BertForMaskedLM")),
        (_config("t5", "T5EncoderModel"), "AutoModelForSeq2SeqLM", "summarization",
         ("summarization", "T5ForConditionalGeneration")),
        (_config("clip_vision_model"), "CLIPVisionModelWithProjection", None,
         ("feature-extraction", "CLIPVisionModelWithProjection")),
        (_config("clip_vision_model"), "CLIPVisionModelWithProjection", "image-classification",
         ("image-classification", "CLIPVisionModelWithProjection")),
    ],
)  # fmt: skip
def test_requested_class_decides_the_task(
    config: Any, model_class: str, task: str | None, expected: tuple[str, str]
) -> None:
    """A task beside the class must be one of the class's tasks; a class in no table accepts any task."""
    decision = resolve_task(config, task, model_class=model_class)
    assert expected == (decision.task, decision.model_class_name)


def test_class_of_checkpoint_code_is_imported_by_its_name() -> None:
    """The class of the checkpoint's code may be named by its auto class too."""
    references = {"AutoModel": "modeling.Own", "AutoModelForMaskedLM": "modeling.OwnForMaskedLM"}
    for name in ("OwnForMaskedLM", "AutoModelForMaskedLM"):
        assert "modeling.OwnForMaskedLM" == resolve_custom_task(references, (), model_class=name).model_class_name
    with pytest.raises(UsageError, match="such class"):
        resolve_custom_task(references, (), model_class="BertModel")


def test_requested_task_keeps_the_class_of_the_checkpoint() -> None:
    """The class that saved the weights is preferred if a task has several classes."""
    assert "T5EncoderModel" == resolve_task(_config("t5", "T5EncoderModel"), "embeddings").model_class_name
    teacher = _config("deit", "DeiTForImageClassificationWithTeacher")
    assert "DeiTForImageClassificationWithTeacher" == resolve_task(teacher, "image-classification").model_class_name


def test_unsupported_task_is_refused_with_the_supported_tasks() -> None:
    """The candidates are the tasks of this model type."""
    with pytest.raises(TaskError, match="image-classification") as caught:
        resolve_task(_config("bert", "BertModel"), "image-classification")
    assert tuple(tasks_for("bert")) == caught.value.candidates
    assert "fill-mask" in caught.value.hint


def test_task_of_several_architectures_is_ambiguous() -> None:
    """Two architectures that do different things are a question to the user."""
    with pytest.raises(TaskError, match="2 architectures") as caught:
        resolve_task(_config("bert", "BertForMaskedLM", "BertForTokenClassification"))
    assert ("fill-mask", "token-classification") == caught.value.candidates


def test_task_of_unknown_architecture_lists_candidates() -> None:
    """An unknown class is not replaced by a known one without a request."""
    with pytest.raises(TaskError, match="'MyBert'"):
        resolve_task(_config("bert", "MyBert"))


def test_task_of_type_without_base_model_is_ambiguous() -> None:
    """A model type without tasks is refused."""
    with pytest.raises(TaskError, match="no tasks"):
        resolve_task(_config("nothing"))


def test_task_of_custom_code_follows_its_auto_map() -> None:
    """Custom classes are found by the auto class they are registered under."""
    references = {"AutoModel": "my.Base", "AutoModelForMaskedLM": "my.Mlm"}
    assert "my.Mlm" == resolve_custom_task(references, ("Mlm",)).model_class_name
    assert "my.Base" == resolve_custom_task(references, ()).model_class_name
    assert "fill-mask" == resolve_custom_task(references, (), "masked-lm").task
    with pytest.raises(TaskError, match="text-generation"):
        resolve_custom_task(references, (), "text-generation")
    with pytest.raises(TaskError, match="2 tasks"):
        resolve_custom_task({"AutoModelForCTC": "a.B", "AutoModelForMaskedLM": "a.C"}, ())


def test_task_is_known_by_its_name_of_before() -> None:
    """Models that write a text about a picture alone moved to the tables of pictures and text."""
    model_class = "VisionEncoderDecoderModel"
    decision = resolve_task(_config("vision-encoder-decoder", model_class), "image-to-text")
    assert ("image-text-to-text", model_class) == (decision.task, decision.model_class_name)


@pytest.mark.parametrize(
    ("model_type", "model_class", "task"),
    [
        ("got_ocr2", "GotOcr2ForConditionalGeneration", "image-text-to-text"),
        ("gemma3", "Gemma3ForConditionalGeneration", "image-text-to-text"),
        ("gemma3_text", "Gemma3ForCausalLM", "text-generation"),
    ],
)
def test_task_of_a_vision_language_model_is_the_task_of_the_whole(model_type: str, model_class: str, task: str) -> None:
    """Transformers lists such a class as a causal language model as well."""
    assert task == resolve_task(_config(model_type, model_class)).task


def test_task_tables_of_transformers_all_exist() -> None:
    """Every named table exists in the installed transformers, except VISION_2_SEQ, which was removed."""
    from transformers.models.auto import modeling_auto

    parts = {part for tables in TASKS.values() for part in tables if part}
    missing = {part for part in parts if not hasattr(modeling_auto, f"MODEL_FOR_{part}_MAPPING_NAMES")}
    assert {"VISION_2_SEQ"} >= missing
