"""Calls and outputs of a built model, compared with its source model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import winml.modelkit
from checkpoints import build_model, save_checkpoint
from winml.modelkit import HTPExporter, WinMLAutoModel, WinMLExportConfig, export_pytorch
from winml.modelkit.errors import TaskError, UsageError
from winml.modelkit.generate.built_model import WinMLModel
from winml.modelkit.models.checkpoints.task import TASKS, inference_class
from winml.modelkit.models.request import ModelRequest

LENGTH = 12
PLAIN = {"quant": None, "compile": None}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a cache for these tests."""
    monkeypatch.setenv("WINML_CACHE", str(tmp_path_factory.getbasetemp() / "inference-cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small BERT for text classification."""
    folder = tmp_path_factory.mktemp("bert")
    return save_checkpoint("bert", folder, class_name="BertForSequenceClassification", num_labels=3, pad_token_id=7)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> WinMLModel:
    """The base model, built for one row of 12 tokens."""
    model = build_model("bert")
    ids = torch.randint(0, 100, (1, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    result = export_pytorch(model, tmp_path_factory.mktemp("encoder") / "model.onnx", inputs)
    return WinMLModel(result.only_part.model_path, pad_token_id=0)


def tokens(length: int, rows: int = 1) -> torch.Tensor:
    """Return token ids."""
    return torch.arange(rows * length).reshape(rows, length) % 90 + 5


def reference(model: Any, **inputs: torch.Tensor) -> Any:
    """Run PyTorch."""
    with torch.no_grad():
        return model(**inputs)


def test_model_returns_the_record_of_its_class(encoder: WinMLModel) -> None:
    """Type, fields and numbers are those of transformers."""
    expected = reference(build_model("bert"), input_ids=tokens(LENGTH))
    actual = encoder(input_ids=tokens(LENGTH))
    assert type(expected) is type(actual)
    assert set(expected) == set(actual)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)


def test_short_rows_are_filled_up_and_cut_again(encoder: WinMLModel) -> None:
    """A static graph gives the outputs of PyTorch for a shorter text, in the text's length."""
    expected = reference(build_model("bert"), input_ids=tokens(5))
    actual = encoder(tokens(5))
    assert (1, 5, 32) == tuple(actual.last_hidden_state.shape)
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.pooler_output, expected.pooler_output, rtol=1e-4, atol=1e-5)


def test_inputs_come_by_name_in_order_or_as_a_mapping(encoder: WinMLModel) -> None:
    """A tokenizer's encoding, keywords, positions, int32 and numpy arrays are accepted."""
    ids, ones = tokens(LENGTH), torch.ones(1, LENGTH, dtype=torch.int64)
    encoding = transformers.BatchEncoding({"input_ids": ids, "attention_mask": ones})
    answers = [encoder(encoding), encoder(**encoding), encoder(ids, ones), encoder(ids.int()), encoder(ids.numpy())]
    assert all(torch.equal(answers[0].pooler_output, answer.pooler_output) for answer in answers)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"input_ids": tokens(LENGTH + 1)}, r"int64\[1, 13\], .* int64\[1, 12\]"),
        ({"input_ids": tokens(LENGTH, rows=2)}, r"int64\[2, 12\]"),
        ({"input_ids": tokens(LENGTH).float()}, r"float32\[1, 12\], .* int64"),
        ({"attention_mask": tokens(LENGTH)}, "'input_ids'"),
        ({"input_ids": tokens(LENGTH), "pixels": tokens(3)}, "'pixels'"),
    ],
)
def test_inputs_the_graph_does_not_take_are_refused(
    encoder: WinMLModel, inputs: dict[str, torch.Tensor], words: str
) -> None:
    """The message names the input and the expected inputs."""
    with pytest.raises(UsageError, match=words):
        encoder(**inputs)


def test_short_rows_without_a_filler_are_refused_with_a_hint(encoder: WinMLModel) -> None:
    """The hint for short rows names the option; rows that are too long have another hint."""
    plain = WinMLModel(encoder.path)
    with pytest.raises(UsageError, match="pad_token_id="):
        plain(tokens(5))
    with pytest.raises(UsageError, match=r"\(tokenizers"):
        plain(tokens(LENGTH + 1))


def exported(model: Any, path: Path, **options: Any) -> WinMLModel:
    """Export for one row of 12 tokens and load."""
    ids = torch.randint(1, 100, (1, LENGTH))
    result = export_pytorch(model.eval(), path, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return WinMLModel(result.only_part.model_path, **options)


def test_model_that_sees_its_padding_is_refused(tmp_path: Path) -> None:
    """A convolution over the tokens ignores the mask, so PyTorch gives a short row other outputs."""
    config = transformers.ConvBertConfig(
        vocab_size=120, hidden_size=32, embedding_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=37, max_position_embeddings=64, conv_kernel_size=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = exported(transformers.ConvBertModel(config), tmp_path / "model.onnx", pad_token_id=0)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"5 tokens, .* 12, .* last_hidden_state"):
            model(tokens(5))
    assert (1, LENGTH, 32) == tuple(model(tokens(LENGTH)).last_hidden_state.shape)


def test_quantized_model_takes_short_rows(encoder: WinMLModel, tmp_path: Path) -> None:
    """The scale of the activations includes the padding, so another pad token changes the rounding of all tokens."""
    model = WinMLAutoModel.from_onnx(encoder.path, precision="int8", pad_token_id=0)
    expected = reference(build_model("bert"), input_ids=tokens(5))
    # Rounding to 8 bits: about 20 dB here, a tenth of the values.
    difference = model(tokens(5)).last_hidden_state - expected.last_hidden_state
    assert difference.norm() < 0.3 * expected.last_hidden_state.norm()


def test_model_searching_its_filler_runs_short_rows(tmp_path: Path) -> None:
    """GPT-2 finds the last token by the pad token: another pad token would give other outputs."""
    options = {"num_labels": 3, "pad_token_id": 0}
    model = build_model("gpt2", class_name="GPT2ForSequenceClassification", **options)
    expected = reference(model, input_ids=tokens(5), attention_mask=torch.ones_like(tokens(5)))
    built = exported(model, tmp_path / "model.onnx", pad_token_id=0)
    torch.testing.assert_close(built(tokens(5))["logits"], expected.logits, rtol=1e-4, atol=1e-5)


def test_model_of_another_task_is_refused(encoder: WinMLModel, tmp_path: Path, checkpoint: Path) -> None:
    """The metadata of a file has its task."""
    model = WinMLAutoModel.from_pretrained(str(checkpoint), config=PLAIN)
    other = winml.modelkit.WinMLModelForQuestionAnswering
    with pytest.raises(TaskError, match=r"for question-answering.* text-class"):
        other.from_onnx(model.path)
    winml.modelkit.WinMLModelForSequenceClassification.from_onnx(model.path)


def test_from_pretrained_builds_loads_and_names_the_class_inspect_prints(checkpoint: Path) -> None:
    """The pad token is read from the config of the checkpoint."""
    model = WinMLAutoModel.from_pretrained(str(checkpoint), config=PLAIN)
    assert "WinMLModelForSequenceClassification" == type(model).__name__
    assert isinstance(model, winml.modelkit.WinMLModelForSequenceClassification)  # type: ignore[arg-type]
    assert ("text-classification", 7) == (model.task, model.pad_token_id)
    expected = reference(
        transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint), input_ids=tokens(6)
    )
    actual = model(tokens(6))
    assert type(expected) is type(actual)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_folder_of_an_export_is_loaded_like_its_file(tmp_path: Path, checkpoint: Path) -> None:
    """Config and pad token are in the folder; an option for loading a checkpoint is refused."""
    export_checkpoint = HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint
    export_checkpoint(ModelRequest(str(checkpoint)), tmp_path / "exported" / "small.onnx")
    model = WinMLAutoModel.from_pretrained(tmp_path / "exported", config=PLAIN)
    assert ("text-classification", 7) == (model.task, model.pad_token_id)
    expected = WinMLAutoModel.from_onnx(tmp_path / "exported" / "small.onnx", config=PLAIN)
    torch.testing.assert_close(model(tokens(6)).logits, expected(tokens(6)).logits, rtol=0, atol=0)
    with pytest.raises(UsageError, match="random_weights"):
        WinMLAutoModel.from_pretrained(str(tmp_path / "exported"), random_weights=True)


def write_tokenizer(folder: Path, **special: str) -> transformers.PreTrainedTokenizerFast:
    """Write a tokenizer of whole words beside a model."""
    words = ["[UNK]", "[PAD]", "a", "short", "row", "of", "words", "and", "one", "more"]
    core = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_pipeline_takes_rows_of_any_length(tmp_path: Path) -> None:
    """Without requested sizes, batch and sequence are dynamic, and labels come from the config in the folder."""
    checkpoint = save_checkpoint("bert", tmp_path / "c", class_name="BertForSequenceClassification", num_labels=3)
    tokenizer = write_tokenizer(checkpoint, pad_token="[PAD]")
    model = WinMLAutoModel.from_pretrained(str(checkpoint), config=PLAIN)
    assert {("batch_size", "sequence_length")} == {item.shape for item in model.inputs}
    rows = ["a short row", "one more row of words and words", "words"]
    classes = transformers.AutoModelForSequenceClassification
    asked = transformers.pipeline("text-classification", model=classes.from_pretrained(checkpoint), tokenizer=tokenizer)
    messages: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = messages.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.pipelines.base")
    logger.addHandler(handler)
    told = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)  # type: ignore[call-overload]
    logger.removeHandler(handler)
    assert [] == [record.getMessage() for record in messages]
    expected, actual = asked(rows), told(rows, batch_size=2)
    assert [row["label"] for row in expected] == [row["label"] for row in actual]
    assert [row["score"] for row in expected] == pytest.approx([row["score"] for row in actual], abs=1e-5)


def test_filler_of_the_tokenizer_is_used_if_the_config_has_no_filler(tmp_path: Path) -> None:
    """The built folder holds the checkpoint's tokenizer."""
    checkpoint = save_checkpoint("bert", tmp_path / "checkpoint", pad_token_id=None)
    write_tokenizer(checkpoint, pad_token="[PAD]")
    model = WinMLAutoModel.from_pretrained(str(checkpoint), config={**PLAIN, "export": {"dynamic_batch": False}})
    assert {(1, 64)} == {item.shape for item in model.inputs}
    assert 1 == model.pad_token_id
    assert (1, 6) == tuple(model(tokens(6)).last_hidden_state.shape[:2])


def test_model_that_takes_no_open_sequence_gets_an_open_batch(tmp_path: Path) -> None:
    """The choice of sizes is stored, so the second call builds nothing."""
    checkpoint = save_checkpoint("vit", tmp_path)
    model = WinMLAutoModel.from_pretrained(str(checkpoint), config=PLAIN)
    assert ["batch_size"] == [size for item in model.inputs for size in item.shape if isinstance(size, str)]
    built = Path(model.path).stat().st_mtime_ns
    again = WinMLAutoModel.from_pretrained(str(checkpoint), config=PLAIN)
    assert (model.path, built) == (again.path, Path(again.path).stat().st_mtime_ns)


def test_class_of_a_task_builds_for_that_task(checkpoint: Path) -> None:
    """The class refuses another task."""
    name = "WinMLModelForFeatureExtraction"
    model = getattr(winml.modelkit, name).from_pretrained(str(checkpoint), config=PLAIN)
    assert {"last_hidden_state", "pooler_output"} == set(model(tokens(4)))
    with pytest.raises(TaskError, match="feature-extraction, not fill-mask"):
        getattr(winml.modelkit, name).from_pretrained(str(checkpoint), task="fill-mask")


def test_from_onnx_of_a_plain_module_returns_names(tmp_path: Path) -> None:
    """Outputs of a file without a transformers class have the names of the file."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    x = torch.randn(2, 4)
    path = export_pytorch(module, tmp_path / "net.onnx", x, config=WinMLExportConfig(dynamic_axes={"input": {0: "n"}}))
    answer = WinMLAutoModel.from_onnx(path.only_part.model_path)(torch.randn(5, 4))
    assert {"output": (5, 3)} == {name: tuple(value.shape) for name, value in answer.items()}


def test_every_task_has_a_class_and_unknown_tasks_are_refused() -> None:
    """The classes are made from the table of tasks, so each task has one."""
    for task in TASKS:
        assert task == getattr(winml.modelkit, inference_class(task)).main_task
    with pytest.raises(AttributeError, match="WinMLModelForNothing"):
        winml.modelkit.WinMLModelForNothing  # noqa: B018 -- the access is what is tested
