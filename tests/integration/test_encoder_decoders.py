"""Encoder-decoders as two graphs: names, tags, generated text and refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from e2e.in_process import run_here
from encoder_decoder import save_encoder_decoder
from winml.modelkit import ExportResult, HTPExporter, WinMLExportConfig, compare_models
from winml.modelkit.builds.layouts.genai import genai_texts
from winml.modelkit.builds.layouts.layout import LAYOUTS, refuse_models
from winml.modelkit.compare.verification.parts_together import TextParts
from winml.modelkit.compare.verification.reference_run import prepared_part
from winml.modelkit.errors import UsageError, VerificationError
from winml.modelkit.generate.generation.settings import part_position_limit
from winml.modelkit.generate.generation.transformers_loop import EncoderDecoderModel
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.bundle import ModelBundle, PartFeed
from winml.modelkit.onnx.specs import DynamicDimension, DynamicRequest
from winml.modelkit.ort.decoding.inputs import state_feeds
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.calibration.calibration_data import Calibration
from winml.modelkit.quantize.options import QuantizeOptions

CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}


@dataclass(frozen=True)
class Encoded:
    """A checkpoint, its graphs, and both as generating models."""

    folder: Path
    result: ExportResult
    reference: Any
    model: EncoderDecoderModel

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the encoder inputs: two rows; in texts one is padded."""
        draw = torch.Generator().manual_seed(1)
        if self.model.main_input_name != "input_ids":
            return {self.model.main_input_name: torch.randn((2, 8, 100), generator=draw)}
        tokens = torch.randint(3, 100, (2, 9), generator=draw)
        mask = torch.ones_like(tokens)
        mask[0, 6:] = 0
        return {"input_ids": tokens, "attention_mask": mask}


LAYERS = {"t5": 2, "bart": 1, "whisper": 1}
"""Layers of encoder and decoder; a single layer halves the time of an export."""


def _save(architecture: str, folder: Path) -> Path:
    sizes = {} if LAYERS[architecture] == 2 else {"encoder_layers": 1, "decoder_layers": 1}
    return save_encoder_decoder(folder, architecture, **sizes)


@pytest.fixture(scope="module", params=CLASSES)
def encoded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoded:
    """Each architecture, exported and verified."""
    folder = _save(request.param, tmp_path_factory.mktemp(request.param) / "checkpoint")
    # dynamo suits the encoder of Whisper better, but takes ten seconds more.
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))
    result = exporter.export_checkpoint(ModelRequest(str(folder)), folder / "onnx" / "model.onnx")
    reference = getattr(transformers, CLASSES[request.param]).from_pretrained(folder).eval()
    return Encoded(
        folder,
        result,
        reference,
        EncoderDecoderModel(dict(zip(("encoder", "decoder"), (part.model_path for part in result.parts), strict=True))),
    )


def test_tensor_names_follow_other_tools(encoded: Encoded) -> None:
    """The encoder returns the keys and values that every decoder step takes; each has a layer and a side."""
    encoder, decoder = encoded.result.parts
    layers = LAYERS[encoded.reference.config.model_type]
    cross = [f"{layer}.encoder.{kind}" for layer in range(layers) for kind in ("key", "value")]
    assert ["last_hidden_state", *(f"present.{name}" for name in cross)] == [spec.name for spec in encoder.outputs]
    states = {spec.name: spec for spec in decoder.inputs if spec.cache is not None}
    assert {f"past_key_values.{name}" for name in cross} < set(states)
    slot = states[f"past_key_values.{layers - 1}.decoder.value"].cache
    assert slot is not None
    assert (layers - 1, "value", "decoder") == (slot.layer, slot.kind, slot.side)
    assert ["batch_size", "decoder_sequence_length"] == list(decoder.inputs[0].shape)
    assert "past_sequence_length" == states["past_key_values.0.decoder.key"].shape[2]
    bundle = ModelBundle.read([part.model_path for part in encoded.result.parts])
    feed = PartFeed("present.0.encoder.key", "decoder", "past_key_values.0.encoder.key")
    assert feed in bundle.feeds["encoder"]
    assert {"decoder"} == {feed.part for feed in bundle.feeds["decoder"]}


def test_files_record_their_number_of_positions(encoded: Encoded, tmp_path: Path) -> None:
    """A text that is too long is refused without the checkpoint's config; relative positions have no limit."""
    limits = tuple(part_position_limit(part.model_path, tmp_path, part.name) for part in encoded.result.parts)
    assert {"t5": (None, None), "bart": (64, 64), "whisper": (None, 64)}[encoded.reference.config.model_type] == limits


def test_projections_of_encoder_outputs_are_in_the_encoder(encoded: Encoded) -> None:
    """Tags have the paths of the whole model, and every node has a tag."""
    encoder, decoder = encoded.result.parts
    assert (100.0, 100.0) == (encoder.coverage.percent, decoder.coverage.percent)
    modules = {node.module for node in encoder.nodes}
    cross = {path for path in modules if path.endswith(("EncDecAttention", "encoder_attn"))}
    assert LAYERS[encoded.reference.config.model_type] == len(cross)
    assert all("decoder." in path for path in cross)


def test_text_of_both_files_is_compared(encoded: Encoded) -> None:
    """The text of both files equals PyTorch's generation in every step."""
    verification = encoded.result.parts[1].verification
    assert verification is not None
    text = verification.generation
    assert text is not None
    assert (2, 32, 4) == (text.rows, text.new_tokens, text.second_prompt_tokens)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=str)
def test_transformers_loop_writes_the_same_text(encoded: Encoded, settings: dict[str, Any]) -> None:
    """The text is equal for greedy search, beam search with repeated rows, and sampling."""
    texts = []
    for model in (encoded.model, encoded.reference):
        torch.manual_seed(0)
        # Whisper's own loop cuts recordings into pieces, and calls this one.
        generate: Any = transformers.GenerationMixin.generate
        texts.append(generate(model, **encoded.inputs(), max_new_tokens=12, **settings))
    assert torch.equal(*texts)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=str)
def test_text_begins_with_the_language_and_task_of_the_files(
    encoded: Encoded, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The language and task tokens come first, even if the task token is suppressed elsewhere; a call may set the
    language.

    These tokens do not count as requested tokens, within the limit of positions.
    """
    if "whisper" == encoded.reference.config.model_type:
        pytest.skip("its own loop takes these tokens off: the test below")
    told = {
        "decoder_start_token_id": 2, "lang_to_id": {"<|en|>": 10, "<|de|>": 11}, "task_to_id": {"transcribe": 12},
        "no_timestamps_token_id": 13, "language": "de", "suppress_tokens": [12], "begin_suppress_tokens": [20],
        "max_new_tokens": 9,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(told), encoding="utf-8")
    shutil.copy(encoded.folder / "config.json", tmp_path)
    model = EncoderDecoderModel.of_graph(encoded.model.graph, tmp_path)
    for asked, language in (({}, 11), ({"language": "en"}, 10)):
        written = model.generate(**encoded.inputs(), max_new_tokens=5, **settings, **asked)
        assert [[2, language, 12, 13]] * 2 == written[:, :4].tolist()
        assert 9 == written.shape[1]
    given = transformers.GenerationConfig(max_new_tokens=3)
    assert 7 == model.generate(**encoded.inputs(), generation_config=given, **settings).shape[1]
    assert 3 == given.max_new_tokens
    limit = 64 if encoded.reference.config.model_type != "t5" else 66
    assert limit == model.generate(**encoded.inputs(), max_new_tokens=62, **settings).shape[1]


@pytest.mark.parametrize(
    "settings", [{}, {"max_new_tokens": 5}, {"max_new_tokens": 5, "num_beams": 2}, {"language": "en"}], ids=str
)
def test_loop_of_a_model_type_returns_the_same_tokens(
    encoded: Encoded, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The result omits the start tokens, as in PyTorch, with beams and in another language too."""
    if "whisper" != encoded.reference.config.model_type:
        pytest.skip("the type has no loop of its own")
    told = {
        "decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "no_timestamps_token_id": 60,
        "lang_to_id": {"<|en|>": 10, "<|de|>": 11}, "task_to_id": {"transcribe": 12, "translate": 13},
        "is_multilingual": True, "language": "de", "suppress_tokens": [14], "begin_suppress_tokens": [20],
        "max_length": 20,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(told), encoding="utf-8")
    shutil.copy(encoded.folder / "config.json", tmp_path)
    model = EncoderDecoderModel.of_graph(encoded.model.graph, tmp_path)
    reference = transformers.WhisperForConditionalGeneration(encoded.reference.config).eval()
    reference.load_state_dict(encoded.reference.state_dict())
    reference.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    written, expected = (item.generate(**encoded.inputs(), **settings) for item in (model, reference))
    assert expected.tolist() == written.tolist()


def test_loop_of_a_model_type_writes_long_recordings(encoded: Encoded, tmp_path: Path) -> None:
    """Segments with timestamps, rows of other lengths, languages and previous text equal PyTorch's."""
    if "whisper" != encoded.reference.config.model_type:
        return
    told = {
        "decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "no_timestamps_token_id": 60,
        "lang_to_id": {"<|en|>": 10, "<|de|>": 11}, "task_to_id": {"transcribe": 12, "translate": 13},
        "is_multilingual": True, "prev_sot_token_id": 14, "max_length": 20,
    }  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(told), encoding="utf-8")
    shutil.copy(encoded.folder / "config.json", tmp_path)
    model = EncoderDecoderModel.of_graph(encoded.model.graph, tmp_path)
    reference = transformers.WhisperForConditionalGeneration(encoded.reference.config).eval()
    reference.load_state_dict(encoded.reference.state_dict())
    reference.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    frames = torch.randn((2, 8, 250), generator=torch.Generator().manual_seed(1))
    mask = torch.ones((2, 250), dtype=torch.int64)
    mask[1, 180:] = 0
    asked: list[dict[str, Any]] = [
        {"input_features": frames[:, :, :100]},
        {"input_features": frames, "attention_mask": mask, "language": "de", "task": "translate"},
        {"input_features": frames[:1], "condition_on_prev_tokens": True, "num_beams": 2},
    ]
    for settings in asked:
        answers = [
            item.generate(**settings, return_timestamps=True, return_segments=True) for item in (reference, model)
        ]
        tokens, times = [], []
        for answer in answers:
            tokens.append(answer["sequences"].tolist())
            times.append([[(float(item["start"]), float(item["end"])) for item in row] for row in answer["segments"]])
        assert tokens[0] == tokens[1]
        assert times[0] == times[1]
    with pytest.raises(UsageError, match="require attentions"):
        model.generate(frames[:1, :, :100], return_timestamps=True, output_attentions=True)


@pytest.mark.parametrize("name", ["decoder_attention_mask", "decoder_inputs_embeds", "labels", "attention_mask"])
def test_input_that_no_graph_takes_is_refused(encoded: Encoded, name: str) -> None:
    """The input would have no effect; the encoder of recordings takes no mask."""
    given = encoded.inputs()
    if name in given:
        return
    tokens = torch.tensor([[2, 5], [2, 6]])
    with pytest.raises(UsageError, match=f"input '{name}': the encoder takes"):
        encoded.model(**given, decoder_input_ids=tokens, **{name: torch.tensor([[1, 0], [1, 1]])})


def test_graphs_of_two_models_do_not_write_the_text(encoded: Encoded, tmp_path: Path) -> None:
    """The comparison detects a decoder that reads another encoder's output."""
    loaded = load_model(ModelRequest(str(encoded.folder)))
    decoder = loaded.parts[1]
    paths = dict(zip(["encoder", "decoder"], [part.model_path for part in encoded.result.parts], strict=True))
    other = onnx.load(paths["encoder"])
    for weight in other.graph.initializer:
        if len(weight.dims) == 2 and weight.data_type == onnx.TensorProto.FLOAT:
            weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(other, tmp_path / "encoder.onnx")
    with prepared_part(decoder) as prepared:
        parts = TextParts.of(loaded.parts, prepared, paths)
        mixed = TextParts.of(loaded.parts, prepared, {**paths, "encoder": tmp_path / "encoder.onnx"})
        assert not isinstance(parts.compare(0), str)
        with pytest.raises(VerificationError, match="1 tokens after 0"):
            mixed.compare(0)
        # The measure for quantized files: rounding stays above 80 dB, another encoder below 40 dB.
        same, other = parts.measure(0), mixed.measure(0)
        assert not isinstance(same, str)
        assert not isinstance(other, str)
        assert same.sqnr_db > 80 > 40 > other.sqnr_db


@pytest.mark.parametrize("layout", ["optimum", "transformers.js"])
def test_readers_that_compute_the_keys_in_the_decoder_are_refused(encoded: Encoded, layout: str) -> None:
    """The readers of these layouts could not open the folder."""
    with pytest.raises(UsageError, match=f"--layout {layout}"):
        refuse_models(LAYOUTS[layout], [part.model_path for part in encoded.result.parts])


def test_parts_that_genai_has_no_type_for_are_refused(encoded: Encoded) -> None:
    """onnxruntime-genai knows 30-second recordings only; the message names the obstacle."""
    models = {part.name: (part.model_path, part.model_path.name) for part in encoded.result.parts}
    names = ", ".join(item.name for item in encoded.model.graph.encoder.inputs)
    problem = "100 frames of audio; expected 3000" if names == "input_features" else f"an encoder with inputs {names}"
    with pytest.raises(UsageError, match=f"--layout genai: onnxruntime-genai has no type for {problem}"):
        genai_texts(models, {})


@pytest.mark.parametrize("architecture", CLASSES)
def test_decoder_for_other_readers_computes_the_keys(architecture: str, tmp_path: Path) -> None:
    """The encoder returns its states only; the text of both files equals PyTorch's.

    A module of the decoder becomes a function, a module of the encoder does not. ``winml compare`` finds both files
    beside the checkpoint; this runs once, as loading takes a second.
    """
    folder = _save(architecture, tmp_path / "checkpoint")
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))
    request = ModelRequest(str(folder), cross_keys="decoder")
    result = exporter.export_checkpoint(request, tmp_path / "model.onnx", functions="**.decoder.*.0")
    encoder, decoder = result.parts
    assert (True, False) == (encoder.functions is None, decoder.functions is None)
    assert any("Part encoder" in note for note in encoder.notes)
    assert ["last_hidden_state"] == [spec.name for spec in encoder.outputs]
    assert {"encoder_hidden_states", "past_key_values.0.encoder.key"} < {spec.name for spec in decoder.inputs}
    assert f"present.{LAYERS[architecture] - 1}.encoder.value" in {spec.name for spec in decoder.outputs}
    assert decoder.verification is not None
    assert decoder.verification.generation is not None
    refuse_models(LAYOUTS["optimum"], [part.model_path for part in result.parts])
    if architecture != "bart":
        return
    compared = compare_models(folder, tmp_path, threshold=1e-4)
    assert ["encoder", "decoder"] == list(compared.parts)
    assert compared.is_within
    assert not any("Outputs of " in note for note in compared.parts["decoder"].notes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small T5."""
    return save_encoder_decoder(tmp_path_factory.mktemp("t5") / "checkpoint", "t5")


def test_submodel_limits_the_written_parts(checkpoint: Path, tmp_path: Path) -> None:
    """The file still lists all parts; PyTorch computes the encoder's output for the comparison."""
    request = ModelRequest(str(checkpoint), submodel=("decoder",))
    result = HTPExporter().export_checkpoint(request, tmp_path / "t5.onnx")
    assert ["t5_decoder.onnx"] == [path.name for path in tmp_path.glob("*.onnx")]
    (decoder,) = result.parts
    assert decoder.description is not None
    assert ("encoder", "decoder") == decoder.description.part_names
    assert decoder.verification is not None
    assert decoder.verification.generation is not None


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"submodel": ("decode",)}, "--submodel decode: T5ForConditionalGeneration"),
        ({"submodel": ("decoder",), "cache": False}, "without parts"),
        ({"logits": "last"}, "all tokens"),
    ],
)
def test_unknown_parts_are_refused(checkpoint: Path, wishes: dict[str, Any], message: str) -> None:
    """The refusal comes before any weight is read, and lists the existing parts."""
    with pytest.raises(UsageError, match=message) as raised:
        load_model(ModelRequest(str(checkpoint), **wishes))
    assert "decode" not in wishes.get("submodel", ()) or "encoder, decoder" in raised.value.hint


def test_requested_sizes_are_fixed_in_both_parts(checkpoint: Path) -> None:
    """The encoded length is the same number in both parts; other sizes stay dynamic."""
    request = ModelRequest(str(checkpoint), batch_size=1, shape_config=ShapeConfig(sequence_length=24))
    encoder, decoder = load_model(request).parts
    assert {(1, 24)} == {spec.shape for spec in encoder.inputs}
    shapes = {spec.name: spec.shape for spec in decoder.inputs}
    assert (1, 4, 24, 8) == shapes["past_key_values.0.encoder.key"]
    assert (1, 24) == shapes["encoder_attention_mask"]
    assert (1, "decoder_sequence_length") == shapes["input_ids"]


@pytest.mark.parametrize("architecture", ["t5", "whisper"])
def test_step_of_fixed_sizes_writes_the_same_text(architecture: str, tmp_path: Path) -> None:
    """A mask and, if the forward takes them, positions of the decoder's own tokens are inputs then."""
    folder = _save(architecture, tmp_path / "checkpoint")
    config = WinMLExportConfig(exporter="torchscript", ep="QNNExecutionProvider")
    request = ModelRequest(str(folder), shape_config=ShapeConfig(past_sequence_length=20))
    result = HTPExporter(config).export_checkpoint(request, folder / "onnx" / "model.onnx")
    decoder = result.parts[1]
    shapes = {spec.name: spec.shape for spec in decoder.inputs}
    assert ((1, 1), (1, 21)) == (shapes["input_ids"], shapes["attention_mask"])
    assert ("whisper" == architecture) == ("position_ids" in shapes)
    assert decoder.verification is not None
    assert decoder.verification.generation is not None
    _assert_samples_are_runs_of_a_text(decoder.model_path, folder)
    # Texts without a tokenizer are 24 random tokens, more than the cache holds.
    _assert_samples_are_runs_of_a_text(decoder.model_path, tmp_path)
    if architecture == "t5":
        _assert_encoder_reads_the_texts_of_the_user(decoder.model_path, folder)


def _assert_encoder_reads_the_texts_of_the_user(path: Path, folder: Path) -> None:
    """Check that the steps of a decoder read the encoder's outputs for each text of the user."""
    texts = folder / "texts.txt"
    texts.write_text("the king was\nthe queen had a token\n", encoding="utf-8")
    options = QuantizeOptions(precision="w8a16", ep="qnn", calibration_data=str(texts))
    samples = list(Calibration(options, folder, {}, 0, path).read_samples(graph_inputs(Session(path))))
    encoder = Session(path.with_name(path.name.replace("decoder", "encoder")))
    inputs = list(Calibration(options, folder, {}, 0).read_samples(graph_inputs(encoder)))
    masks = [feeds["encoder_attention_mask"] for feeds in samples]
    first, second = (feeds["attention_mask"] for feeds in inputs)
    assert not np.array_equal(first, second)
    runs = len(masks) // 2
    assert all(np.array_equal(first, mask) for mask in masks[:runs])
    assert all(np.array_equal(second, mask) for mask in masks[runs:])


def _assert_samples_are_runs_of_a_text(path: Path, folder: Path) -> None:
    """Check that each sample is a decoding step: its cache is the output of the previous run."""
    options = QuantizeOptions(precision="w8a16", ep="qnn")
    calibration = Calibration(options, folder, {}, 0, path)
    session = Session(path)
    states = state_feeds(session)
    before: dict[str, Any] = {}
    runs = 0
    for feeds in calibration.read_samples(graph_inputs(session)):
        runs += 1
        held = int(feeds["attention_mask"].sum()) - 1
        outputs = session.run(feeds)
        if held:
            for name, output in states.items():
                assert np.array_equal(before[output][:, :, -feeds[name].shape[2] :], feeds[name]), (runs, name)
        before = outputs
    assert {"data": "decoding", "samples": runs, "method": "minmax"} == calibration.as_record()
    assert 128 == runs


def test_axes_are_named_in_the_part_that_takes_the_input(checkpoint: Path) -> None:
    """The part uses the model's input name; bounds apply wherever the name occurs, and an unknown name is refused."""
    axes = {"input_ids": {1: "text"}, "decoder_input_ids": {1: "written"}}
    bounds = (DynamicDimension(name="written", max=9), DynamicDimension(name="text", max=40))
    request = ModelRequest(str(checkpoint), dynamic=DynamicRequest(axes=axes, dimensions=bounds))
    encoder, decoder = load_model(request).parts
    assert ("batch_size", "text") == encoder.inputs[0].shape
    assert ("batch_size", "written") == decoder.inputs[0].shape
    assert [40] == [item.max for item in encoder.dimensions if item.name == "text"]
    assert [9] == [item.max for item in decoder.dimensions if item.name == "written"]
    odd = DynamicRequest(axes=axes, dimensions=(DynamicDimension(name="writen", max=9),))
    with pytest.raises(UsageError, match="'writen'"):
        load_model(ModelRequest(str(checkpoint), dynamic=odd))


@pytest.mark.parametrize("sizes", [{"past_sequence_length": 5000}, {"decoder_sequence_length": 5000}])
def test_more_tokens_than_positions_are_refused(sizes: dict[str, int], tmp_path: Path) -> None:
    """A table of positions limits the number of tokens."""
    folder = save_encoder_decoder(tmp_path / "bart", "bart")
    request = ModelRequest(str(folder), shape_config=ShapeConfig.model_validate(sizes))
    with pytest.raises(UsageError, match="5000"):
        load_model(request)


def test_size_open_by_default_that_freezes_is_fixed_with_a_note(tmp_path: Path) -> None:
    """An encoder traced at one length is exported with that length; a shorter text is padded under the mask."""
    folder = save_encoder_decoder(tmp_path / "pegasus_x", "pegasus_x")
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))

    result = exporter.export_checkpoint(ModelRequest(model=str(folder)), tmp_path / "model.onnx")

    shapes = {spec.name: spec.shape for spec in result.parts[0].inputs}
    assert shapes == {"input_ids": ("batch_size", 128), "attention_mask": ("batch_size", 128)}
    (note,) = (note for note in result.model_notes if note.startswith("sequence_length"))
    assert "axis 1 of input_ids" in note
    assert '{"sequence_length": 64}' in note
    model = EncoderDecoderModel({part: tmp_path / f"model_{part}.onnx" for part in ("encoder", "decoder")})
    reference = transformers.PegasusXForConditionalGeneration.from_pretrained(folder)
    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    pair: tuple[Any, Any] = (model, reference)
    written, expected = (item.generate(tokens, max_new_tokens=12, do_sample=False) for item in pair)
    assert written.tolist() == expected.tolist()


def test_size_left_open_by_an_option_that_freezes_is_refused(tmp_path: Path) -> None:
    """A size that the request leaves dynamic is never fixed."""
    folder = save_encoder_decoder(tmp_path / "pegasus_x", "pegasus_x")
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))
    request = ModelRequest(model=str(folder), shape_config=ShapeConfig(sequence_length={"min": 2}))

    with pytest.raises(VerificationError, match="froze sequence_length") as caught:
        exporter.export_checkpoint(request, tmp_path / "model.onnx")

    assert caught.value.frozen == ("sequence_length",)
    assert not list(tmp_path.glob("*.onnx"))


def test_decoder_reads_the_mask_of_the_encoder(tmp_path: Path) -> None:
    """Recordings, one of them padded, give PyTorch's text; TorchScript fixes the length."""
    folder = save_encoder_decoder(tmp_path / "moonshine", "moonshine")
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))

    result = exporter.export_checkpoint(ModelRequest(model=str(folder)), tmp_path / "model.onnx")

    encoder, decoder = result.parts
    assert {spec.name: spec.shape for spec in encoder.inputs}["input_values"] == ("batch_size", 16000)
    assert "encoder_attention_mask" in {spec.name for spec in decoder.inputs}
    model = EncoderDecoderModel({part: tmp_path / f"model_{part}.onnx" for part in ("encoder", "decoder")})
    reference = transformers.MoonshineForConditionalGeneration.from_pretrained(folder)
    mask = torch.ones((2, 16000), dtype=torch.int64)
    mask[0, 9000:] = 0
    sound = torch.randn((2, 16000), generator=torch.Generator().manual_seed(1)) * mask
    given = {"input_values": sound, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    pair: tuple[Any, Any] = (model, reference)
    written, expected = (item.generate(**given) for item in pair)
    assert written.tolist() == expected.tolist()

    # Its group norm includes the padding: the output of transformers for a padded row differs.
    with torch.no_grad():
        whole, alone = (
            reference.get_encoder()(sound[:1, :end], mask[:1, :end]).last_hidden_state for end in (None, 9000)
        )
    assert (whole[:, : alone.shape[1]] - alone).abs().max() > 1e-2 * alone.abs().max()
    soundfile = pytest.importorskip("soundfile")
    transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True).save_pretrained(tmp_path)
    for count in (9000, 20000):
        soundfile.write(tmp_path / "a.wav", sound[1].repeat(2)[:count].numpy(), 16_000)
        outcome = run_here("generate", tmp_path, "--audio", tmp_path / "a.wav")
        assert 2 == outcome.code
        assert "exactly 16000" in outcome.err
        assert f'{{"audio_length": {count}}}' in outcome.err


def test_recording_of_another_length_is_refused_without_a_mask(tmp_path: Path) -> None:
    """A recording is neither cut nor padded silently; at the exact length the text equals PyTorch's."""
    soundfile = pytest.importorskip("soundfile")
    folder = save_encoder_decoder(tmp_path / "checkpoint", "moonshine", has_mask=False)
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))
    request = ModelRequest(model=str(folder), shape_config=ShapeConfig(audio_length=9000))
    exporter.export_checkpoint(request, tmp_path / "model.onnx")
    reference = transformers.MoonshineForConditionalGeneration.from_pretrained(folder)
    sound = torch.rand((1, 9001), generator=torch.Generator().manual_seed(1)) - 0.5

    outcomes = {}
    for count in (8000, 9000, 9001):
        soundfile.write(tmp_path / "a.wav", sound[0, :count].numpy(), 16_000, subtype="FLOAT")
        arguments = ("--audio", tmp_path / "a.wav", "--max-new-tokens", "8", "--format", "json")
        outcomes[count] = run_here("generate", tmp_path, *arguments)

    assert {8000: 2, 9000: 0, 9001: 2} == {count: outcome.code for count, outcome in outcomes.items()}
    assert all("exactly 9000" in outcomes[count].err for count in (8000, 9001))
    expected: Any = reference.generate(input_values=sound[:, :9000], max_new_tokens=8, do_sample=False)
    assert expected[0, 1:].tolist() == json.loads(outcomes[9000].out)["tokens"]


def test_decoder_changing_encoder_outputs_in_place_is_exported(tmp_path: Path) -> None:
    """The decoder adds positions to its argument in place; the text equals PyTorch's."""
    folder = save_encoder_decoder(tmp_path / "checkpoint", "moonshine_streaming")
    request = ModelRequest(model=str(folder), submodel=("decoder",))

    result = HTPExporter().export_checkpoint(request, tmp_path / "model.onnx")

    (decoder,) = result.parts
    assert decoder.verification is not None
    assert decoder.verification.generation is not None
