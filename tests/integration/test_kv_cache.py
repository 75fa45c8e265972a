"""KV caches in 8 bits: rounding of the states, and generated scores near those of float caches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import coded_checkpoints
from e2e.in_process import run_here
from generating import PROMPT, build_decoder, save_decoder
from installed_versions import QUANTIZED_CACHE
from winml.modelkit import build_hf_model
from winml.modelkit.builds.config import QuantSection, WinMLBuildConfig
from winml.modelkit.errors import UsageError
from winml.modelkit.metadata_keys import INPUTS_KEY
from winml.modelkit.ort.decoding.decoder import DecoderGraph, rows_of
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.verb import quantize_onnx

pytestmark = QUANTIZED_CACHE

CONFIG = WinMLBuildConfig(quant=QuantSection(kv_cache="int8"))
TOKENS = [5, 9, 33, 60, 71, 8, 14]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build with an 8-bit cache, with the files of its stages."""
    folder = tmp_path_factory.mktemp("kv")
    checkpoint = save_decoder(folder / "checkpoint", "llama", **{**coded_checkpoints.SIZES, "num_hidden_layers": 2})
    return build_decoder(checkpoint, folder / "built", config=CONFIG)


def _scores(path: Path, pieces: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """Return the logits of tokens read in several runs."""
    decoder = DecoderGraph(Session(path))
    cache = decoder.empty_cache(1)
    return np.concatenate([decoder.run(rows_of(TOKENS[piece]), cache=cache) for piece in pieces], axis=1)


def _decibels(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10((expected**2).sum() / ((expected - found) ** 2).sum()))


def test_states_are_codes_of_the_float_states(built: Path) -> None:
    """The first layer reads no rounded value: its codes are round(x / scale), clipped, with scales from samples."""
    feeds = {
        "input_ids": rows_of(TOKENS),
        "attention_mask": np.ones((1, len(TOKENS)), np.int64),
        "position_ids": np.arange(len(TOKENS))[None],
    }
    states = {f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")}
    plain = {**feeds, **dict.fromkeys(states, np.zeros((1, 2, 0, 16), np.float32))}
    coded = {**feeds, **dict.fromkeys(states, np.zeros((1, 2, 0, 16), np.int8))}
    floats = open_session(built / "optimized.onnx", as_written=True).run(plain)
    codes = open_session(built / "model.onnx", as_written=True).run(coded)
    model = onnx.load(built / "model.onnx")
    held = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    node = next(item for item in model.graph.node if item.op_type == "GroupQueryAttention")
    for name, scale in zip(("present.0.key", "present.0.value"), node.input[12:14], strict=True):
        assert held[scale].shape == (2, 1, 16)
        assert codes[name].dtype == np.int8
        exact = np.clip(floats[name] / held[scale], -128, 127)
        assert np.abs(codes[name] - exact).max() < 0.501
        assert np.abs(codes[name]).max() > 60
    assert _decibels(floats["logits"], codes["logits"]) > 25


def test_steps_attend_to_rounded_states(built: Path) -> None:
    """A prompt and later steps give the output of a single run, near that of the float model."""
    steps = (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7))
    whole = _scores(built / "model.onnx", (slice(0, 7),))
    np.testing.assert_allclose(_scores(built / "model.onnx", steps), whole, atol=1e-4)
    assert _decibels(_scores(built / "optimized.onnx", steps), whole) > 25


def test_file_describes_its_states(built: Path) -> None:
    """Input types equal those of the graph, the cache takes a quarter of the memory, and commands run the file."""
    metadata = {item.key: item.value for item in onnx.load(built / "model.onnx").metadata_props}
    types = {record["name"]: record["dtype"] for record in json.loads(metadata[INPUTS_KEY])}
    assert {name: "int8" for name in types if name.startswith("past")} == {
        name: dtype for name, dtype in types.items() if dtype == "int8"
    }
    assert json.loads(metadata["winml.quantization"])["kv_cache"] == {"precision": "int8", "attentions": 2}
    sizes = []
    for name in ("optimized.onnx", "model.onnx"):
        decoder = DecoderGraph(Session(built / name))
        cache = decoder.empty_cache(1)
        decoder.run(rows_of(TOKENS), cache=cache)
        sizes.append(cache.size_bytes())
    assert sizes[0] == 4 * sizes[1]
    assert run_here("generate", built, "-p", PROMPT, "--max-new-tokens", "3").code == 0
    compared = run_here("compare", built / "model.onnx", built / "optimized.onnx", "--format", "json")
    quality = json.loads(compared.out)["quality"]["outputs"]
    assert quality["present.0.key"]["sqnr_db"]["all"] > 30
    assert quality["logits"]["sqnr_db"]["all"] > 25


def test_weights_and_cache_are_quantized_together(built: Path, tmp_path: Path) -> None:
    """One call quantizes weights and cache, and the comparison covers both."""
    result = quantize_onnx(built / "optimized.onnx", tmp_path / "q.onnx", precision="int8", kv_cache="int8", samples=8)
    assert (result.precision, result.kv_cache) == ("int8", "int8")
    assert result.quantized > 0
    assert result.fidelity is not None
    assert result.fidelity.worst.sqnr_db > 10


def test_size_is_a_limit_of_the_file_with_the_scales_of_its_cache(built: Path, tmp_path: Path) -> None:
    """The search counts the scales, so that the smallest size in its message can be reached."""
    asked = {"kv_cache": "int8", "samples": 2, "min_sqnr_db": -100.0}
    with pytest.raises(UsageError) as refused:
        quantize_onnx(built / "optimized.onnx", tmp_path / "q.onnx", max_size="1kB", **asked)
    smallest = re.findall(r"[\d.]+kB", refused.value.hint)[0]
    result = quantize_onnx(built / "optimized.onnx", tmp_path / "q.onnx", max_size=smallest, **asked)
    assert "int8" == result.kv_cache
    assert sum(file.size_bytes for file in result.files) <= 1000 * float(smallest.removesuffix("kB"))


def test_codes_of_a_checkpoint_stay_beside_such_a_cache(tmp_path: Path) -> None:
    """A build accepts the option for a quantized checkpoint, and leaves its packed weights unchanged."""
    saved = coded_checkpoints.save_awq(tmp_path)
    folder = build_hf_model(saved.folder, tmp_path / "built", config=CONFIG, verify=False).folder
    nodes = onnx.load(folder / "model.onnx").graph.node
    assert sum(node.op_type == "MatMulNBits" for node in nodes) == 7
    assert {item.name for node in nodes for item in node.attribute if node.op_type == "GroupQueryAttention"} >= {
        "k_quant_type", "v_quant_type", "kv_cache_bit_width",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "options", "words"),
    [
        ("export.onnx", {}, "GroupQueryAttention"),
        ("model.onnx", {}, "floating"),
        ("optimized.onnx", {"block_size": 32}, "^block_size 32"),
    ],
)
def test_ineffective_options_are_refused(
    built: Path, tmp_path: Path, file: str, options: dict[str, Any], words: str
) -> None:
    """An unfused attention, a cache already in 8 bits, and options for unchanged weights are refused."""
    with pytest.raises(UsageError, match=words):
        quantize_onnx(built / file, tmp_path / "q.onnx", kv_cache="int8", **options)
    assert not any(tmp_path.iterdir())


def test_state_with_another_reader_stays_float(built: Path, tmp_path: Path) -> None:
    """Another reader could not use the codes as numbers."""
    model = onnx.load(built / "optimized.onnx")
    model.graph.node.append(onnx.helper.make_node("Neg", ["past_key_values.0.key"], ["negated"], name="negation"))
    shape = ["batch_size", 2, "past_sequence_length", 16]
    model.graph.output.append(onnx.helper.make_tensor_value_info("negated", onnx.TensorProto.FLOAT, shape))
    onnx.save(model, tmp_path / "m.onnx")
    result = quantize_onnx(tmp_path / "m.onnx", tmp_path / "q.onnx", kv_cache="int8", samples=4, min_sqnr_db=-50)
    types = {item.name: item.type.tensor_type.elem_type for item in onnx.load(tmp_path / "q.onnx").graph.input}
    assert types["past_key_values.0.key"] == onnx.TensorProto.FLOAT
    assert types["past_key_values.1.key"] == onnx.TensorProto.INT8
    assert [note for note in result.notes if "1 attention with a KV cache" in note]
