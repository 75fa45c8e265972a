"""Graphs with a cache: names and sizes, outputs at any length, metadata and refusals."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from numpy.typing import NDArray

from checkpoints import build_model, save_checkpoint
from winml.modelkit import ExportResult, HTPExporter, WinMLExportConfig
from winml.modelkit.compare.outputs import GenerationInfo, Rounding
from winml.modelkit.compare.verification.generated_text import GeneratedText, generate_reference
from winml.modelkit.compare.verification.generation import compare_generation
from winml.modelkit.compare.verification.reference_run import prepared_part, run_reference
from winml.modelkit.errors import UsageError, VerificationError
from winml.modelkit.generate.generation.loop import generate_tokens
from winml.modelkit.generate.generation.settings import GenerationSettings
from winml.modelkit.models.caches.layout import loop_cache_name
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.bundle import PartFeed, read_part_description
from winml.modelkit.ort.decoding.decoder import DecoderGraph, rows_of
from winml.modelkit.ort.sessions import Session

Arrays = dict[str, NDArray[Any]]

VOCABULARY = 120
WINDOW = 6
CHECKPOINTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    # Positions of a table.
    "gpt2": ("gpt2", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    # A window shorter than the texts below, in one of two layers.
    "window": (
        "llama",
        {
            "class_name": "Gemma3ForCausalLM",
            "head_dim": 8,
            "num_key_value_heads": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
TOLERANCE = 2e-5
"""Share of the largest score. Chosen ten times above that of correct float32 exports; a wrong mask has 0.1 and more."""


@dataclass(frozen=True)
class Decoder:
    """A checkpoint, its PyTorch model and its exported graph."""

    folder: Path
    model: Any
    result: ExportResult
    session: Session

    def feeds(self, tokens: NDArray[Any], mask: NDArray[Any], states: Arrays) -> Arrays:
        """Return the inputs of the graph for tokens after the cached ones."""
        return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions(mask, tokens.shape[1]), **states}

    def empty(self, rows: int) -> Arrays:
        """Return the cache before the first token."""
        return {
            spec.name: np.zeros((rows, int(spec.shape[1]), 0, int(spec.shape[3])), np.float32)
            for spec in self.result.only_part.inputs
            if spec.cache is not None
        }


def positions(mask: NDArray[Any], tokens: int) -> NDArray[Any]:
    """Return the positions of the last tokens, without padding."""
    places: NDArray[Any] = (mask.cumsum(-1) - 1).clip(0)[:, -tokens:]
    return places


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """One architecture, exported once for this module as a user would."""
    architecture, changes = CHECKPOINTS[request.param]
    folder = save_checkpoint(architecture, tmp_path_factory.mktemp(request.param) / "checkpoint", **changes)
    result = HTPExporter().export_checkpoint(ModelRequest(str(folder)), folder.parent / "model.onnx")
    return Decoder(folder, build_model(architecture, **changes), result, Session(result.only_part.model_path))


def test_graph_has_the_names_and_sizes_that_readers_expect(decoder: Decoder) -> None:
    """Inputs are tokens, mask, positions and cache; outputs are scores and cache. Rows and lengths are dynamic."""
    layers = range(2)
    states = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]
    shapes = {spec.name: spec.shape for spec in decoder.result.only_part.inputs}
    assert ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in states)] == list(
        decoder.session.inputs
    )
    assert {
        "input_ids": ("batch_size", "sequence_length"),
        "attention_mask": ("batch_size", "total_sequence_length"),
    }.items() <= shapes.items()
    heads = shapes["past_key_values.0.key"][1]
    assert ("batch_size", heads, "past_sequence_length", 8) == shapes["past_key_values.0.key"]
    outputs = {spec.name: spec.shape for spec in decoder.result.only_part.outputs}
    assert ["logits", *(f"present.{name}" for name in states)] == list(outputs)
    assert ("batch_size", "sequence_length", VOCABULARY) == outputs["logits"]
    assert ("batch_size", heads, "total_sequence_length", 8) == outputs["present.1.value"]
    assert {"batch_size", "sequence_length", "past_sequence_length"} == {
        item.name for item in decoder.result.only_part.dimensions
    }
    assert 0 == next(item.min for item in decoder.result.only_part.dimensions if item.name == "past_sequence_length")


def test_file_maps_cache_outputs_to_inputs(decoder: Decoder) -> None:
    """The metadata has layer and kind of each state, its feed, and the mask length as a sum."""
    model = onnx.load(decoder.result.only_part.model_path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    told = {record["name"]: record for record in json.loads(metadata["winml.io.inputs"])}
    slot = {"layer": 1, "kind": "value"}
    assert slot == told["past_key_values.1.value"]["cache"]
    assert {"total_sequence_length": ["past_sequence_length", "sequence_length"]} == told["attention_mask"]["sums"]
    assert "cache" not in told["input_ids"]
    description = read_part_description(decoder.result.only_part.model_path)
    assert description is not None
    assert ("model", ("model",)) == (description.name, description.part_names)
    assert PartFeed("present.0.key", "model", "past_key_values.0.key") == description.feeds[0]
    assert len(decoder.session.inputs) - 3 == len(description.feeds)
    assert "model" == decoder.result.only_part.name
    windows = {name: record["cache"].get("window") for name, record in told.items() if "cache" in record}
    is_windowed = "Gemma3" in type(decoder.model).__name__
    assert (WINDOW if is_windowed else None) == windows["past_key_values.0.key"]
    assert windows["past_key_values.1.key"] is None


@pytest.mark.parametrize("past", [0, 5, 9])
def test_graph_equals_pytorch_after_any_text(decoder: Decoder, past: int) -> None:
    """Prompts of 1, 3 and 7 tokens follow 0, 5 and 9 others, in two rows, the first padded on the left."""
    generator = np.random.default_rng(past)
    for count in (1, 3, 7):
        tokens = generator.integers(3, VOCABULARY, (2, past + count))
        mask = np.ones_like(tokens)
        mask[0, : (past + count) // 3] = 0
        states, cache = decoder.empty(2), None
        for start, end in ((0, past), (past, past + count)) if past else ((0, count),):
            given = decoder.feeds(tokens[:, start:end], mask[:, :end], states)
            answer = decoder.session.run(given)
            states = {
                name: answer[name.replace("past_key_values", "present")] for name in given if name.startswith("past")
            }
            tensors = {name: torch.from_numpy(value) for name, value in given.items() if not name.startswith("past")}
            with torch.no_grad():
                expected = decoder.model(**tensors, **{loop_cache_name(): cache}, use_cache=True)
            cache = expected[loop_cache_name()]
            shown = mask[:, start:end].astype(bool)
            scores = expected.logits.numpy()[shown]
            assert np.abs(scores - answer["logits"][shown]).max() <= TOLERANCE * np.abs(scores).max()


def test_graph_generates_the_text_of_generate(decoder: Decoder) -> None:
    """Greedy choice of 20 tokens with the graph's own cache gives the text of transformers."""
    tokens = np.random.default_rng(1).integers(3, VOCABULARY, (1, 6))
    text = torch.from_numpy(tokens)
    expected = decoder.model.generate(
        text, attention_mask=torch.ones_like(text), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    states, read, written = decoder.empty(1), tokens, tokens
    for _ in range(20):
        answer = decoder.session.run(decoder.feeds(read, np.ones_like(written), states))
        states = {name: answer[name.replace("past_key_values", "present")] for name in states}
        read = answer["logits"][:, -1:].argmax(-1)
        written = np.concatenate([written, read], axis=1)
    assert expected.tolist() == written.tolist()


def test_every_node_is_tagged_and_generation_was_compared(decoder: Decoder) -> None:
    """Tags have the paths of the whole model; the record has the number of compared tokens."""
    part = decoder.result.only_part
    assert 100.0 == part.coverage.percent
    paths = {name for name, _ in decoder.model.named_modules()}
    assert {node.module for node in part.nodes} <= paths
    assert part.verification is not None
    assert part.verification.is_verified
    text = part.verification.generation
    assert isinstance(text, GenerationInfo)
    assert (2, 7, 32, 4, None) == (
        text.rows, text.prompt_tokens, text.new_tokens, text.second_prompt_tokens, text.stopped_after
    )  # fmt: skip
    assert text.ties < 32
    assert text.as_record() == part.verification.as_record()["generation"]


@pytest.mark.parametrize("decoder", ["llama"], indirect=True)
def test_scores_of_another_model_are_refused_at_the_step_that_differs(decoder: Decoder) -> None:
    """Different scores at a step are refused with the number of the step, unless rounding explains them."""
    loaded = load_model(ModelRequest(str(decoder.folder)))
    part = loaded.only_part
    with prepared_part(part) as prepared:
        text = generate_reference(prepared, 0)
    assert isinstance(text, GeneratedText)

    read: list[int] = []

    def run(draw: Any) -> Mapping[str, NDArray[Any]]:
        read.append(draw.inputs["input_ids"].shape[1])
        return decoder.session.run({name: value.numpy() for name, value in draw.inputs.items()})

    assert compare_generation(part, text, run, Rounding(), lambda _draw: False).stopped_after is None
    # The prompt, single steps, the text several tokens at a time, single steps again, and the second prompt.
    assert [7, *[1] * 8, 8, 8, 5, 1, 1, 4] == read
    wrong = replace(text.steps[9], scores=text.steps[9].scores[:, :, ::-1])
    spoiled = GeneratedText((*text.steps[:9], wrong, *text.steps[10:]))
    with pytest.raises(VerificationError, match="step 9, with 1 tokens after 15"):
        compare_generation(part, spoiled, run, Rounding(), lambda _draw: False)
    assert 9 == compare_generation(part, spoiled, run, Rounding(), lambda _draw: True).stopped_after

    # Rounding at one token of a run excuses no other token.
    judged = text.steps[11].tokens.tolist()
    with pytest.raises(VerificationError, match="step 9, with 1 tokens after 15"):
        compare_generation(
            part, spoiled, run, Rounding(), lambda draw: judged == draw.inputs["input_ids"][:, -1:].tolist()
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one layer."""
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama") / "checkpoint", num_hidden_layers=1)


def test_graph_without_a_cache_is_plain_with_a_note(llama: Path, tmp_path: Path) -> None:
    """The graph of ``--no-cache`` takes tokens and mask of one size, and returns scores."""
    exporter = HTPExporter(WinMLExportConfig(verify=False))
    result = exporter.export_checkpoint(ModelRequest(str(llama), cache=False), tmp_path / "plain.onnx")
    assert {"input_ids": (1, 64), "attention_mask": (1, 64)} == {
        spec.name: spec.shape for spec in result.only_part.inputs
    }
    assert ["logits"] == [spec.name for spec in result.only_part.outputs]
    assert any("--no-cache" in note for note in result.notes)
    assert read_part_description(result.only_part.model_path) is None


def test_text_is_compared_in_the_type_the_decoder_computes_in(llama: Path, tmp_path: Path) -> None:
    """``generate()`` returns float32 scores of a float16 model, and the graph returns float16 as forward does."""
    result = HTPExporter().export_checkpoint(ModelRequest(str(llama), dtype="fp16"), tmp_path / "half.onnx")
    verification = result.only_part.verification
    assert verification is not None
    assert isinstance(verification.generation, GenerationInfo)
    assert "float16" == {spec.name: spec.dtype for spec in result.only_part.outputs}["logits"]


def test_fixed_sizes_and_scores_of_the_last_token_only(llama: Path, tmp_path: Path) -> None:
    """A graph for two tokens after 30 others, as accelerators need it, cannot generate a text to compare."""
    sizes = ShapeConfig(sequence_length=2, past_sequence_length=30)
    request = ModelRequest(
        str(llama), shape_config=sizes, batch_size=1, logits="last", task="text-generation-with-past"
    )
    result = HTPExporter().export_checkpoint(request, tmp_path / "step.onnx")
    shapes = {spec.name: spec.shape for spec in result.only_part.inputs}
    assert ((1, 2), (1, 32), (1, 2, 30, 8)) == (
        shapes["input_ids"], shapes["attention_mask"], shapes["past_key_values.0.key"]
    )  # fmt: skip
    assert {"logits": (1, 1, VOCABULARY), "present.0.key": (1, 2, 32, 8)}.items() <= {
        spec.name: spec.shape for spec in result.only_part.outputs
    }.items()
    assert any("not compared" in note for note in result.notes), result.notes
    assert not any("sums" in spec.as_record() for spec in result.only_part.inputs)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cache": False, "logits": "last"}, "--logits last: .*cache"),
        ({"task": "feature-extraction", "logits": "last"}, "--logits last: feature-extraction"),
        ({"task": "text-generation-with-past", "cache": False}, "--no-cache"),
    ],
)
def test_options_that_contradict_each_other_are_refused(llama: Path, options: dict[str, Any], told: str) -> None:
    """The refusal comes before any weight is read."""
    with pytest.raises(UsageError, match=told):
        load_model(ModelRequest(str(llama), **options))


def test_provider_that_needs_fixed_sizes_gets_a_step_of_fixed_sizes_that_generates(llama: Path, tmp_path: Path) -> None:
    """Sizes not requested as dynamic are fixed with a note; the file generates the text of generate()."""
    path = tmp_path / "model.onnx"
    shape = ShapeConfig(past_sequence_length=15)
    result = HTPExporter(WinMLExportConfig(ep="QNNExecutionProvider")).export_checkpoint(
        ModelRequest(str(llama), shape_config=shape), path
    )
    shapes = {spec.name: spec.shape for spec in result.only_part.inputs}
    assert ((1, 1), (1, 16)) == (shapes["input_ids"], shapes["attention_mask"])
    verification = result.only_part.verification
    assert verification is not None
    assert verification.generation is not None
    assert any("sequence_length" in note for note in result.notes)
    graph = DecoderGraph(Session(path))
    assert 16 == graph.most_tokens
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    expected = model.generate(torch.tensor([[5, 7, 9]]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    settings = GenerationSettings(max_new_tokens=12)
    assert expected[0, 3:].tolist() == [item.token for item in generate_tokens(graph, [5, 7, 9], settings)]
    with pytest.raises(UsageError, match=r"17 tokens.*16"):
        graph.run(rows_of([5] * 17))


def test_requested_dynamic_sizes_are_refused_by_a_provider_with_fixed_sizes(llama: Path, tmp_path: Path) -> None:
    """A size that the user requested as dynamic is never fixed silently."""
    exporter = HTPExporter(WinMLExportConfig(ep="QNNExecutionProvider", dynamic_batch=True))
    with pytest.raises(UsageError, match="fixed sizes"):
        exporter.export_checkpoint(ModelRequest(str(llama)), tmp_path / "model.onnx")


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    """A table of positions limits the cache and the tokens together."""
    folder = save_checkpoint("gpt2", tmp_path / "gpt2")
    sizes = ShapeConfig(sequence_length=8, past_sequence_length=60)
    with pytest.raises(UsageError, match=r"past_sequence_length 60.*sequence_length 8:.*64 positions"):
        load_model(ModelRequest(str(folder), shape_config=sizes))


def test_cache_dependent_code_is_refused_with_a_remedy(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model changes its output once the cache is filled: the error names the module and --no-cache."""
    own = transformers.LlamaModel.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **arguments: Any) -> Any:
        cache = arguments.get(loop_cache_name())
        is_after_others = cache is not None and cache.get_seq_length() > 0
        outputs = own(self, *args, **arguments)
        if is_after_others:
            outputs.last_hidden_state = outputs.last_hidden_state * torch.linspace(-1, 1, 32)
        return outputs

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))
    with pytest.raises(VerificationError, match=r"froze past_sequence_length[\s\S]*LlamaModel") as caught:
        exporter.export_checkpoint(ModelRequest(str(llama)), tmp_path / "model.onnx")
    assert "--no-cache" in caught.value.hint
    assert not (tmp_path / "model.onnx").exists()


def test_model_that_reads_a_prompt_in_pieces_otherwise_is_compared_in_its_own_runs(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dependence of the model on the tokens in a run is noted, and is no error of the graph."""
    own = transformers.LlamaModel.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        outputs = own(self, *args, **keywords)
        outputs.last_hidden_state *= 1 + 0.1 * outputs.last_hidden_state.shape[1]
        return outputs

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    part = load_model(ModelRequest(str(llama))).only_part
    with prepared_part(part) as prepared, torch.no_grad():
        text = generate_reference(prepared, 0)
        assert isinstance(text, GeneratedText)
        info = compare_generation(
            part, text, lambda draw: run_reference(prepared, draw.inputs), Rounding(), lambda _draw: False
        )
    # The second run has three tokens, in place of one run of seven.
    assert info.differs_in_pieces == pytest.approx(1 - 1.3 / 1.7, rel=1e-3)
    assert "one run" in info.notes[0]
    assert info.differs_in_pieces == info.as_record()["differs_in_pieces"]


HYBRID = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
RECURRENT: Mapping[str, Mapping[str, Any]] = {
    "granitemoehybrid": {
        **HYBRID, **MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "jamba": {
        **HYBRID, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "mamba2": {**HYBRID, "state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8, "expand": 2},
    "qwen3_next": {
        **HYBRID, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
}  # fmt: skip
"""Model type → sizes of a small decoder with states updated from token to token."""


def _recurrent_part(model_type: str, folder: Path) -> Any:
    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": model_type, **RECURRENT[model_type]}), encoding="utf-8")
    part = load_model(ModelRequest(str(config), random_weights=True, task="text-generation")).only_part
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in part.model.parameters():
            # Large enough to distinguish padding in a state from rounding.
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
    return part


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "jamba", "qwen3_next"])
def test_padded_row_of_a_recurrent_model_is_compared(model_type: str, tmp_path: Path) -> None:
    """A row read token by token, with states held at padding, has the logits of PyTorch's padded batch."""
    part = _recurrent_part(model_type, tmp_path)
    with prepared_part(part) as prepared, torch.no_grad():
        text = generate_reference(prepared, 0)
        assert isinstance(text, GeneratedText), text
        info = compare_generation(
            part, text, lambda draw: run_reference(prepared, draw.inputs), Rounding(), lambda _draw: False
        )
    assert (2, 1, None) == (info.rows, info.padded_rows, info.stopped_after)
    assert 1 == info.as_record()["padded_rows"]


def test_padding_that_pytorch_does_not_hide_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record counts no padded row."""
    own = transformers.Mamba2ForCausalLM.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **arguments: Any) -> Any:
        return own(self, *args, **{**arguments, "attention_mask": None})

    monkeypatch.setattr(transformers.Mamba2ForCausalLM, "forward", forward)
    part = _recurrent_part("mamba2", tmp_path)
    with prepared_part(part) as prepared, torch.no_grad():
        text = generate_reference(prepared, 0)
        assert isinstance(text, GeneratedText), text
        info = compare_generation(
            part, text, lambda draw: run_reference(prepared, draw.inputs), Rounding(), lambda _draw: False
        )
    assert (2, 0) == (info.rows, info.padded_rows)


LAYER = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": VOCABULARY}
UNUSUAL: Mapping[str, tuple[Mapping[str, Any], int, Mapping[str, tuple[str | int, ...]]]] = {
    # Rows of tokens for each of four codebooks; other inputs have one row for all codebooks.
    "musicgen": (
        {
            "text_encoder": {"model_type": "t5"},
            "audio_encoder": {"model_type": "encodec"},
            "decoder": {**LAYER, "ffn_dim": 32, "pad_token_id": VOCABULARY, "bos_token_id": VOCABULARY},
        },
        2,
        {"input_ids": (8, "sequence_length"), "attention_mask": (2, "total_sequence_length")},
    ),
    # A window missing in the mask, shorter than the text.
    "moshi": (
        {**LAYER, "ffn_dim": 32, "sliding_window": WINDOW, "pad_token_id": 0},
        2,
        {
            "input_ids": ("batch_size", "sequence_length"),
            "attention_mask": ("batch_size", "total_sequence_length"),
            "position_ids": ("batch_size", "sequence_length"),
        },
    ),
    # A mask widened by an image if there is a cache.
    "git": (
        {**LAYER, "intermediate_size": 32, "vision_config": {"image_size": 32, "patch_size": 16, **LAYER}},
        2,
        {"input_ids": ("batch_size", "sequence_length"), "position_ids": ("batch_size", "sequence_length")},
    ),
}
"""Model type → sizes, rows, and the inputs beside the cache."""
ONE_RUN = {"moshi": 1}
"""Models with outputs that depend on the division of a prompt into runs."""


@pytest.mark.parametrize("model_type", UNUSUAL)
def test_unusual_decoders_generate_the_text_of_generate(model_type: str, tmp_path: Path) -> None:
    """Models with several token streams, windows or unusual masks generate the text of ``generate()``."""
    content, rows, shapes = UNUSUAL[model_type]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": model_type, **content}), encoding="utf-8")
    batch = rows if isinstance(shapes["input_ids"][0], int) else None
    request = ModelRequest(str(config), random_weights=True, task="text-generation", batch_size=batch)
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))
    result = exporter.export_checkpoint(request, tmp_path / "model.onnx")
    assert shapes == {spec.name: spec.shape for spec in result.only_part.inputs if spec.cache is None}
    verification = result.only_part.verification
    assert verification is not None
    text = verification.generation
    assert isinstance(text, GenerationInfo)
    assert (rows, 32, 4, None) == (text.rows, text.new_tokens, text.second_prompt_tokens, text.stopped_after)
    assert ONE_RUN.get(model_type, 0) == sum("one run" in note for note in result.notes)


def test_open_graph_needs_no_other_for_its_prompt(llama: Path) -> None:
    """A note says that the option has no effect."""
    part = load_model(ModelRequest(str(llama), prompt_length=4)).only_part
    assert any("--prompt-length" in note for note in part.notes)
