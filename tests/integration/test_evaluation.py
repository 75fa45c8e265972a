"""Models of every task are judged as the pipelines of transformers answer.

The labels of a data set are the answers of the pipeline on the same samples, so that the share of equal answers is the
metric itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from judged_checkpoints import WORDS, export_open, pipeline_of, save_judged, sentences, text_tokenizer
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.flows.evaluate.evaluate import evaluate
from winml.modelkit.flows.evaluate.judged_models import Subject
from winml.modelkit.results.evaluation import Evaluation
from winml.modelkit.runtime.opened_model import RunOptions

EQUAL = 0.99
"""Share of samples with the pipeline's answer. Specified."""


def judged(model: Path, data: Path, **options: Any) -> Evaluation:
    """Judge an ONNX file beside its checkpoint."""
    return evaluate(Subject(model, RunOptions(str(model))), EvaluationOptions(dataset=str(data), **options))


def test_classes_of_texts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """Texts of other lengths in one batch get the classes that the pipeline gives each of them alone."""
    labels = ["one", "two", "three"]
    folder = save_judged(tmp_path / "m", "bert", "BertForSequenceClassification", text_tokenizer(), labels=labels)
    texts = sentences(120)
    answers = [item["label"] for item in pipeline_of(folder, "text-classification")(texts)]
    datasets.Dataset.from_dict({"text": texts, "label": answers}).to_parquet(tmp_path / "d.parquet")

    result = judged(export_open(folder, "text-classification"), tmp_path / "d.parquet")

    assert len(set(answers)) > 1
    assert result.metric("accuracy").value >= EQUAL
    assert result.metric("accuracy").baseline == 1
    assert result.agreement is not None
    assert result.agreement >= EQUAL


def test_tags_of_words_are_those_of_the_pipeline(tmp_path: Path) -> None:
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    folder = save_judged(tmp_path / "m", "bert", "BertForTokenClassification", text_tokenizer(), labels=labels)
    words = [text.split() for text in sentences(80, seed=1)]
    tagger = pipeline_of(folder, "token-classification", ignore_labels=[])
    tags = [[token["entity"] for token in tagger(" ".join(row))] for row in words]
    datasets.Dataset.from_dict({"tokens": words, "ner_tags": tags}).to_json(tmp_path / "d.jsonl")

    result = judged(export_open(folder, "token-classification"), tmp_path / "d.jsonl")

    assert len({tag for row in tags for tag in row}) >= 4
    assert result.metric("accuracy").value >= EQUAL
    assert result.metric("f1").value >= EQUAL


def test_hidden_words_are_those_of_the_pipeline(tmp_path: Path) -> None:
    folder = save_judged(tmp_path / "m", "bert", "BertForMaskedLM", text_tokenizer())
    texts = [text.replace(text.split()[2], "[MASK]", 1) for text in sentences(60, seed=2)]
    filler = pipeline_of(folder, "fill-mask")
    answers = [filler(text)[0]["token_str"] for text in texts]
    texts, answers = zip(*[pair for pair in zip(texts, answers, strict=True) if pair[1] in WORDS], strict=True)
    datasets.Dataset.from_dict({"text": texts, "label": answers}).to_csv(tmp_path / "d.csv")

    result = judged(export_open(folder, "fill-mask"), tmp_path / "d.csv")

    assert len(set(answers)) > 5
    assert result.metric("accuracy").value >= EQUAL
    assert result.metric("top_5_accuracy").value >= EQUAL
