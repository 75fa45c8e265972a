"""Exports of quantized checkpoints: equal codes and equal generated text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper

import coded_checkpoints
from checkpoints import make_distinct
from coded_checkpoints import SavedCheckpoint
from installed_versions import TWO_BITS
from winml.modelkit import build_hf_model
from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.sessions import Session

PROMPT = [3, 7, 5]
NEW_TOKENS = 16
END = 1

# float32 activations, so that nothing but the weights is in few bits.
EXACT = WinMLExportConfig(activations="float32")
# Codes and text are compared by the tests themselves; a verification takes a third of an export.
UNVERIFIED = WinMLExportConfig(activations="float32", verify=False)

FORMATS: dict[str, Callable[[Path], SavedCheckpoint]] = {
    "gptq": coded_checkpoints.save_gptq,
    "gptq act-order": lambda folder: coded_checkpoints.save_gptq(folder, act_order=True),
    "gptq v2": lambda folder: coded_checkpoints.save_gptq(folder, version="gptq_v2"),
    "gptq 8 bits act-order": lambda folder: coded_checkpoints.save_gptq(folder, 8, act_order=True),
    "gptq 2 bits": lambda folder: coded_checkpoints.save_gptq(folder, 2),
    "gptq one group": lambda folder: coded_checkpoints.save_gptq(folder, group_size=-1),
    "awq": coded_checkpoints.save_awq,
    "compressed int4": coded_checkpoints.save_compressed,
    "compressed int4 symmetric": lambda folder: coded_checkpoints.save_compressed(folder, symmetric=True),
    "compressed int8": lambda folder: coded_checkpoints.save_compressed(folder, 8),
    "bitsandbytes int8": coded_checkpoints.save_bnb8,
    "bitsandbytes nf4": coded_checkpoints.save_bnb,
    "bitsandbytes fp4": lambda folder: coded_checkpoints.save_bnb(folder, "fp4", nested=False),
    "nvfp4": coded_checkpoints.save_nvfp4,
    "nvfp4 of modelopt": lambda folder: coded_checkpoints.save_nvfp4(folder, "modelopt"),
    "auto-round as gptq": lambda folder: coded_checkpoints.save_auto_round(folder, "auto_gptq"),
    "auto-round as awq": lambda folder: coded_checkpoints.save_auto_round(folder, "auto_awq"),
}
"""Formats with their codes, or the exact values of the codes, in the exported file."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=TWO_BITS if name == "gptq 2 bits" else ()) for name in FORMATS],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of each format and its exported file."""
    folder = tmp_path_factory.mktemp("coded")
    saved = FORMATS[request.param](folder)
    return request.param, saved, export(saved, folder / "out" / "model.onnx")


def export(saved: SavedCheckpoint, path: Path, config: WinMLExportConfig = UNVERIFIED) -> onnx.ModelProto:
    """Export a checkpoint and load the written model."""
    path.parent.mkdir(exist_ok=True)
    HTPExporter(config).export_checkpoint(ModelRequest(model=str(saved.folder)), path)
    return onnx.load(path)


def generated(path: Path) -> list[int]:
    """Return the greedy tokens of a file."""
    session = Session(path)
    text, now = list(PROMPT), list(PROMPT)
    held = {
        name: np.zeros((1, int(shape[1] or 0), 0, int(shape[3] or 0)), np.float32)
        for name, shape in session.input_shapes.items()
        if name.startswith("past")
    }
    for _ in range(NEW_TOKENS):
        feeds: dict[str, Any] = {
            "input_ids": np.array([now]),
            "attention_mask": np.ones((1, len(text)), np.int64),
            "position_ids": np.arange(len(text) - len(now), len(text))[None],
        }
        answer = session.run({**{name: feeds[name] for name in feeds if name in session.inputs}, **held})
        held = {name: answer[name.replace("past_key_values", "present")] for name in held}
        scores = answer["logits"][0, -1]
        scores[END] = -np.inf  # as in PyTorch below: no text ends early
        now = [int(scores.argmax())]
        text += now
    return text[len(PROMPT) :]


def reference_tokens(saved: SavedCheckpoint) -> list[int]:
    """Return the tokens that PyTorch generates with the dequantized weights."""
    return tokens_of(transformers.AutoModelForCausalLM.from_pretrained(saved.reference, dtype=torch.float32))


def tokens_of(model: Any) -> list[int]:
    """Return the tokens that a PyTorch model generates."""
    with torch.no_grad():
        text = model.eval().generate(
            torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    tokens: list[int] = text[0, len(PROMPT) :].tolist()
    return tokens


def unpacked(packed: Array, bits: int) -> Array:
    """Unpack the codes of a row; the first code is in the lowest bits of a byte."""
    rows = packed.reshape(len(packed), -1)
    places = np.arange(0, 8, bits)
    return ((rows[..., None] >> places) & (2**bits - 1)).reshape(len(rows), -1)


def written_codes(model: onnx.ModelProto) -> dict[str, tuple[onnx.NodeProto, dict[int, Array]]]:
    """Return module → (node with its codes, constant inputs by position)."""
    held = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type in ("MatMulNBits", "MatMulBnb4"):
            scope = next(item.value for item in node.metadata_props if item.key == "namespace")
            module = scope.rpartition("/")[2].partition(":")[0]
            found[module] = (node, {place: held[name] for place, name in enumerate(node.input) if name in held})
    return found


def attribute(node: onnx.NodeProto, name: str) -> int:
    """Return an integer attribute of a node."""
    return next(item.i for item in node.attribute if item.name == name)


def test_codes_equal_the_checkpoint_bit_by_bit(exported: Any) -> None:
    """Codes, scales and zero points of each layer equal the packed ones."""
    name, saved, model = exported
    found = written_codes(model)
    assert found.keys() == saved.linears.keys()
    for module, linear in saved.linears.items():
        node, inputs = found[module]
        codes = linear.codes
        if node.op_type == "MatMulBnb4":
            pairs = inputs[1].reshape(-1)
            assert np.array_equal(np.stack([pairs >> 4, pairs & 15], -1).reshape(codes.shape), codes)
            assert np.array_equal(inputs[2].reshape(linear.scales.shape), linear.scales)
            continue
        bits, depth = attribute(node, "bits"), attribute(node, "K")
        written = unpacked(inputs[1], bits)[:, :depth]
        if name.startswith("nvfp4"):  # twice the values, in 8 bits
            values = np.array(coded_checkpoints.E2M1)[codes] * 2 + 128
            assert np.array_equal(written, values)
            continue
        if "act-order" in name:
            codes = codes[:, np.argsort(linear.tensors[".g_idx"].numpy(), kind="stable")]
        assert np.array_equal(written, codes)
        scales = linear.scales.reshape(len(codes), -1)
        repeats = inputs[2].shape[1] // scales.shape[1]
        assert np.array_equal(inputs[2], np.repeat(scales.astype(np.float32), repeats, axis=1))
        if linear.zero_points is not None and 3 in inputs:
            points = unpacked(inputs[3], bits)[:, : inputs[2].shape[1]]
            assert np.array_equal(points, np.repeat(linear.zero_points, repeats, axis=1))


def test_text_equals_the_dequantized_model(exported: Any) -> None:
    """Every token with float32 activations equals PyTorch's."""
    _, saved, _ = exported
    assert generated(saved.folder.parent / "out" / "model.onnx") == reference_tokens(saved)


def test_nodes_record_the_source_format_of_their_codes(exported: Any) -> None:
    """Each node records the source format; 16-bit layers stay in 16 bits, and no weight is a float matrix."""
    name, saved, model = exported
    layouts = {"nvfp4 of modelopt": "nvfp4", "auto-round as gptq": "gptq", "auto-round as awq": "awq"}
    for node, _ in written_codes(model).values():
        record = json.loads(next(item.value for item in node.metadata_props if item.key == "winml.quantization"))
        method = json.loads((saved.folder / "config.json").read_text())["quantization_config"]["quant_method"]
        assert layouts.get(name, method) == record["source_format"]
    matrices = [item for item in model.graph.initializer if len(item.dims) == 2 and item.data_type == 1]
    stored = Counter(tuple(item.dims) for item in matrices if min(item.dims) > 64)
    assert not stored
    halves = {tuple(item.dims) for item in model.graph.initializer if item.data_type == onnx.TensorProto.FLOAT16}
    assert halves <= {(120, 64), (64, 120)}


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "fbgemm_fp8"])
def test_small_floats_are_in_the_nearest_form_and_their_loss_is_stated(tmp_path: Path, method: str) -> None:
    """No operator of the CPU provider takes 8-bit floats."""
    saved = coded_checkpoints.save_fp8(tmp_path, method=method)
    path = tmp_path / "out.onnx"
    result = HTPExporter(EXACT).export_checkpoint(ModelRequest(model=str(saved.folder)), path)
    (note,) = [note for note in result.notes if "requantized" in note]
    stated = float(note.partition("SQNR ")[2].partition(" dB")[0])
    found = written_codes(onnx.load(path))
    lost = signal = 0.0
    for module, linear in saved.linears.items():
        _, inputs = found[module]
        steps = (inputs[1].astype(np.float64) - 128) * inputs[2][..., None]
        values = linear.values.astype(np.float64)
        lost += float(((steps.reshape(values.shape) - values) ** 2).sum())
        signal += float((values**2).sum())
    assert stated == pytest.approx(10 * np.log10(signal / lost), abs=0.1)
    assert stated > 40
    fidelity = result.only_part.fidelity
    assert fidelity is not None
    assert fidelity.worst.sqnr_db > 25


def test_experts_of_mxfp4_keep_their_numbers(tmp_path: Path) -> None:
    """8-bit integers hold twice the values of E2M1 exactly."""
    saved = coded_checkpoints.save_mxfp4(tmp_path)
    model = export(saved, tmp_path / "out.onnx")
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * 4
    held = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    numbers = {}
    for node in products:
        codes, scales = held[node.input[1]], held[node.input[2]]
        numbers[node.input[1].removesuffix("_Q8")] = (codes - np.float32(128)) * scales[..., None]
    for name, linear in saved.linears.items():
        for expert, values in enumerate(linear.values):
            assert np.array_equal(numbers[f"{name}.{expert}"].reshape(values.T.shape), values.T)
    assert generated(tmp_path / "out.onnx") == reference_tokens(saved)


def test_merged_experts_keep_their_codes(tmp_path: Path) -> None:
    """Transformers stacks the experts of Mixtral, and concatenates two matrices of each."""
    config = transformers.MixtralConfig(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        sliding_window=None, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    mixtral = transformers.MixtralForCausalLM(config)
    make_distinct(mixtral)
    saved = coded_checkpoints.save_awq(tmp_path, model=mixtral, experts=("w1.weight", "w2.weight", "w3.weight"))
    model = export(saved, tmp_path / "out.onnx")
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["MatMulNBits"] == 4 + 2 * 4
    assert generated(tmp_path / "out.onnx") == reference_tokens(saved)


def test_gguf_file_alone_becomes_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    """Q8_0, Q4_0, Q4_K and Q6_K have equal values in the file, with the row order of transformers."""
    pytest.importorskip("gguf")
    saved = coded_checkpoints.save_gguf(tmp_path)
    model = export(saved, tmp_path / "out" / "model.onnx", EXACT)
    for module, (node, inputs) in written_codes(model).items():
        bits, size, depth = attribute(node, "bits"), attribute(node, "block_size"), attribute(node, "K")
        codes = unpacked(inputs[1], bits)[:, :depth].astype(np.float32)
        points = inputs.get(3, np.full((len(codes), 1), 2 ** (bits - 1), np.float32))
        numbers = codes - np.repeat(points, depth // points.shape[1], axis=1)
        numbers *= np.repeat(inputs[2], size, axis=1)
        tied = {"lm_head": "model.embed_tokens"}
        values = saved.linears[tied.get(module, module)].values
        assert np.abs(numbers - values).max() <= 1e-5 * np.abs(values).max()
    assert generated(tmp_path / "out" / "model.onnx") == reference_tokens(saved)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_gguf_of_other_architectures_writes_the_text_of_transformers(tmp_path: Path, architecture: str) -> None:
    """Names, row orders and norms equal those of the model that transformers loads from the file."""
    pytest.importorskip("gguf")
    file = coded_checkpoints.save_gguf_of(tmp_path, architecture)
    HTPExporter(UNVERIFIED).export_checkpoint(ModelRequest(model=str(file)), tmp_path / "out" / "model.onnx")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert any(node.op_type in ("MatMulNBits", "GatherBlockQuantized") for node in model.graph.node)
    if architecture == "mistral":  # missing in the name map of transformers
        file = coded_checkpoints.save_gguf_of(tmp_path, "llama")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert tokens_of(reference) == generated(tmp_path / "out" / "model.onnx")


def test_gguf_types_without_an_exact_form_are_in_the_nearest(tmp_path: Path) -> None:
    """Six-bit offsets of five-bit codes are no integers, and 8-bit products take integers only."""
    pytest.importorskip("gguf")
    saved = coded_checkpoints.save_gguf(tmp_path, {"ffn_gate": "Q5_K"})
    result = HTPExporter(EXACT).export_checkpoint(ModelRequest(model=str(saved.folder)), tmp_path / "model.onnx")
    (note,) = [note for note in result.notes if "requantized" in note]
    assert float(note.partition("SQNR ")[2].partition(" dB")[0]) > 40


@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (4, True), (8, False)])
def test_packing_equals_compressed_tensors(tmp_path: Path, bits: int, symmetric: bool) -> None:
    """The compressed-tensors library unpacks the tensors of the helper to the same codes and zero points."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    saved = coded_checkpoints.save_compressed(tmp_path, bits, symmetric=symmetric)
    linear = saved.linears["model.layers.0.self_attn.q_proj"]
    shape = torch.Size(linear.codes.shape)
    middle = 2 ** (bits - 1)
    codes = unpack_from_int32(linear.tensors[".weight_packed"], bits, shape)
    assert np.array_equal(codes.numpy().astype(int) + middle, linear.codes)
    if not symmetric:
        points = linear.tensors[".weight_zero_point"]
        assert linear.zero_points is not None
        whole = unpack_from_int32(points, bits, torch.Size(linear.zero_points.shape), packed_dim=0)
        assert np.array_equal(whole.numpy().astype(int) + middle, linear.zero_points)


def test_build_fuses_the_decoder_and_carries_the_codes(tmp_path: Path) -> None:
    """The file is for ONNX Runtime only, so the attention is fused as well; the text stays equal."""
    saved = coded_checkpoints.save_awq(tmp_path)
    folder = build_hf_model(saved.folder, tmp_path / "built").folder
    counts = Counter(node.op_type for node in onnx.load(folder / "model.onnx").graph.node)
    assert (counts["MatMulNBits"], counts["GroupQueryAttention"]) == (7, 1)
    assert generated(folder / "model.onnx") == reference_tokens(saved)
    # The optimizer works on the graph in memory, and the deployed file is a link to its output.
    assert sorted(path.name for path in folder.glob("*.onnx*")) == ["model.onnx", "optimized.onnx"]
    assert (folder / "model.onnx").samefile(folder / "optimized.onnx")
    again = build_hf_model(saved.folder, folder)
    assert [stage.status for stage in again.manifest.parts[0].stages][:2] == ["skipped", "reused"]


def test_activations_in_8_bits_are_near(tmp_path: Path) -> None:
    """The option also rounds activations of 4-bit layers."""
    saved = coded_checkpoints.save_awq(tmp_path)
    path = tmp_path / "out.onnx"
    config = WinMLExportConfig(activations="int8")
    result = HTPExporter(config).export_checkpoint(ModelRequest(model=str(saved.folder)), path)
    levels = {attribute(node, "accuracy_level") for node, _ in written_codes(onnx.load(path)).values()}
    assert levels == {4}
    fidelity = result.only_part.fidelity
    assert fidelity is not None
    assert 25 < fidelity.worst.sqnr_db < 60


def test_activations_of_a_float_checkpoint_are_refused(tmp_path: Path) -> None:
    """The option would have no effect."""
    saved = coded_checkpoints.save_awq(tmp_path)
    with pytest.raises(UsageError, match="no quantized weights"):
        HTPExporter(EXACT).export_checkpoint(ModelRequest(model=str(saved.reference)), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_input_order_is_shared_by_layers_of_one_order(tmp_path: Path) -> None:
    """Query, key and value read one reordered input, which is computed once."""
    saved = coded_checkpoints.save_gptq(tmp_path, act_order=True, shares_order=True)
    model = export(saved, tmp_path / "out.onnx", EXACT)
    orders = [node for node in model.graph.node if node.op_type == "Gather" and "input_order" in "".join(node.input)]
    assert len(orders) == 4  # attention, attention output, first two layers of the MLP, last layer
    assert generated(tmp_path / "out.onnx") == reference_tokens(saved)
