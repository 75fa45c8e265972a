"""Fusion of attentions over a cache, as both exporters write them, and near misses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from checkpoints import build_model
from installed_versions import OPSET_24
from winml.modelkit import HTPExporter, optimize_onnx
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.metadata_keys import INPUTS_KEY
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.optimize.capabilities import ATTENTION_VARIANT
from winml.modelkit.optimize.decoders.packed_projections import PackedProjectionPass
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize
from winml.modelkit.ort.sessions import Session, is_onnxruntime_at_least
from winml.modelkit.tags.tagging import listed_modules, measure_coverage, read_tag, write_tag

HEAD_SIZE, WINDOW = 16, 4
SIZES = ((2, 5, 0), (2, 12, 0), (2, 1, 7), (1, 4, 6))
"""Rows, tokens and cached tokens: a prompt, one longer than two windows, a step, and several tokens after a cache."""
FUSED = OptimizeOptions().with_decoder_fusions()
WINDOWED = {"gemma3", "mistral"}
"""Decoders with a window of attention."""
VARIANT = ("rotary_attention_fusion", "packed_projection_fusion")
_KINDS = {"qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}
TOLERANCE = 2e-5
"""Share of the largest value. Chosen ten times above the rounding of float32 in another order."""


def _export(folder: Path, model: Any, exporter: str = "torchscript") -> Path:
    model.save_pretrained(folder / "checkpoint")
    config = WinMLExportConfig(exporter=exporter, verify=False)  # type: ignore[arg-type]  # a name of one
    request = ModelRequest(str(folder / "checkpoint"))
    return HTPExporter(config).export_checkpoint(request, folder / "model.onnx").only_part.model_path


def _build(kind: str) -> Any:
    """Return a decoder with one layer."""
    if kind == "gpt2":
        return build_model("gpt2", n_layer=1, n_head=2, n_embd=2 * HEAD_SIZE)
    if kind == "llama":
        return build_model("llama", num_hidden_layers=1, head_dim=HEAD_SIZE)
    import torch
    import transformers

    from checkpoints import make_distinct

    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    grouped = {**sizes, "num_key_value_heads": 1, "head_dim": HEAD_SIZE}
    if kind == "phi":
        config: Any = transformers.PhiConfig(**sizes, partial_rotary_factor=0.5)
        model: Any = transformers.PhiForCausalLM(config)
    elif kind == "gemma3":
        config = transformers.Gemma3TextConfig(**grouped, sliding_window=WINDOW, layer_types=["sliding_attention"])
        model = transformers.Gemma3ForCausalLM(config)
    elif kind in _KINDS:
        config = getattr(transformers, f"{_KINDS[kind]}Config")(**grouped, pad_token_id=0)
        model = getattr(transformers, f"{_KINDS[kind]}ForCausalLM")(config)
    else:
        config = transformers.MistralConfig(**grouped, sliding_window=WINDOW)
        model = transformers.MistralForCausalLM(config)
    make_distinct(model)
    return model.eval()


def _fuse(path: Path) -> OptimizeResult:
    return optimize(ir.load(path), FUSED)


def _count(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def _feeds(session: Session, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Draw values for a decoder; the first row is padded on the left, other rows for longer than a window."""
    rows, tokens, past = sizes
    generator = np.random.default_rng(0)
    mask = np.ones((rows, past + tokens), np.int64)
    mask[0, :3] = 0
    mask[1:, 2 : 2 + WINDOW + 1] = 0
    feeds = {
        "input_ids": generator.integers(3, 100, (rows, tokens)),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clip(0)[:, past:],
    }
    for name, shape in session.input_shapes.items():
        if name not in feeds:
            feeds[name] = generator.standard_normal((rows, shape[1], past, shape[3])).astype(np.float32)  # type: ignore[arg-type]
    return feeds


def _assert_same_answers(before: Path, after: ir.Model) -> None:
    plain, fused = Session(before), Session(ir.to_proto(after).SerializeToString())
    for sizes in SIZES:
        feeds = _feeds(plain, sizes)
        expected, found = plain.run(feeds), fused.run(feeds)
        for name, value in expected.items():
            largest = np.abs(value).max()
            np.testing.assert_allclose(found[name], value, atol=TOLERANCE * largest, rtol=0, err_msg=f"{name} {sizes}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama with grouped heads, exported with its cache."""
    return _export(tmp_path_factory.mktemp("llama"), _build("llama"))


def test_attention_over_a_cache_becomes_one_operator_with_the_same_numbers(llama: Path) -> None:
    """The inputs are a prompt, a step and several tokens, with padding on the left.

    No node of the old attention stays.
    """
    result = _fuse(llama)
    counts = _count(result.model)
    assert (counts["GroupQueryAttention"], counts["RotaryEmbedding"], counts["Softmax"], counts["Cos"]) == (1, 2, 0, 0)
    assert result.fired["group_query_attention_fusion"] == 1
    _assert_same_answers(llama, result.model)


def _run_text(path: Path | ir.Model, *, is_padded: bool) -> Any:
    """Return the logits of the last token of a prompt and of two steps, for two rows."""
    session = Session(path if isinstance(path, Path) else ir.to_proto(path).SerializeToString())
    generator = np.random.default_rng(1)
    tokens, mask = generator.integers(3, 100, (2, 6)), np.ones((2, 6), np.int64)
    mask[0, : 3 if is_padded else 0] = 0
    shapes = {name: shape for name, shape in session.input_shapes.items() if "past" in name}
    past = {name: np.zeros((2, shape[1], 0, shape[3]), np.float32) for name, shape in shapes.items()}  # type: ignore[arg-type]
    logits = []
    for _ in range(3):
        positions = (mask.cumsum(-1) - 1).clip(0)[:, -tokens.shape[1] :]
        feeds = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        outputs = session.run({**{name: feeds[name] for name in feeds if name in session.input_shapes}, **past})
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
        logits.append(outputs["logits"][:, -1])
        tokens, mask = generator.integers(3, 100, (2, 1)), np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
    return np.stack(logits)


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        ("llama", {"MatMul": 6, "RotaryEmbedding": 0, "Split": 0, "Transpose": 0}),
        ("qwen3", {"MatMul": 6, "RotaryEmbedding": 0, "Split": 1, "SimplifiedLayerNormalization": 3}),
        ("phi3", {"MatMul": 5, "RotaryEmbedding": 0, "Slice": 2}),
        ("qwen2", {"MatMul": 6, "Add": 1, "RotaryEmbedding": 0}),
        ("gemma3", {"MatMul": 6, "Transpose": 1, "Split": 1, "FastGelu": 1}),
        ("mistral", {"MatMul": 6, "RotaryEmbedding": 0}),
    ],
)
def test_attention_rotates_and_reads_packed_projections(tmp_path: Path, kind: str, nodes: dict[str, int]) -> None:
    """Padding comes before the tokens, or after them if lengths hide it. Normalizations of heads stay outside."""
    path = _export(tmp_path, _build(kind))
    for variant in (VARIANT, ATTENTION_VARIANT):
        model = optimize(ir.load(path), OptimizeOptions().with_decoder_fusions(variant)).model
        counts = _count(model)
        assert nodes == {name: counts[name] for name in nodes}
        assert measure_coverage(model).is_complete
        (attention,) = (node for node in model.graph if node.op_type == "GroupQueryAttention")
        assert 1 == attention.attributes.get_int("do_rotary", 0)
        has_lengths = variant is ATTENTION_VARIANT and (kind not in WINDOWED or is_onnxruntime_at_least("1.24"))
        assert has_lengths == (len(attention.inputs) == 9)
        for is_padded in (False, not has_lengths):
            expected, found = (_run_text(file, is_padded=is_padded) for file in (path, model))
            np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max(), rtol=0)


def test_slices_of_an_undivided_product_are_removed(tmp_path: Path) -> None:
    """A build merges projections after their weights are quantized, and optimizes no more."""
    model = ir.load(_export(tmp_path, _build("phi3")))
    model = optimize(model, OptimizeOptions().with_decoder_fusions(VARIANT[:1])).model
    before = _count(model)["Slice"]
    PackedProjectionPass()(model)
    assert (5, 2) == (before, _count(model)["Slice"])


def test_packed_projection_names_the_modules_of_its_weights(llama: Path) -> None:
    """Its columns are those of queries, keys and values; a weight that another node reads is not merged."""
    model = ir.load(llama)
    products = {role: _product_of(model, role) for role in ("q_proj", "k_proj", "v_proj")}
    for role, node in products.items():
        tag = read_tag(node)
        assert tag is not None
        write_tag(node, replace(tag, module=f"{tag.module}.{role}"))
    weights = [node.inputs[1].const_value.numpy() for node in products.values()]  # type: ignore[union-attr]
    result = optimize(model, OptimizeOptions().with_decoder_fusions(VARIANT))
    assert 1 == result.fired["packed_projection_fusion"]
    (packed,) = (node for node in result.model.graph if "packed_qkv" in (node.name or ""))
    assert listed_modules(packed) == [f"model.layers.0.self_attn.{name}" for name in ("k_proj", "q_proj", "v_proj")]
    assert "model.layers.0.self_attn" == read_tag(packed).module  # type: ignore[union-attr]
    np.testing.assert_array_equal(packed.inputs[1].const_value.numpy(), np.concatenate(weights, axis=1))  # type: ignore[union-attr]
    shared = ir.load(llama)
    _product_of(shared, "k_proj").replace_input_with(1, _product_of(shared, "v_proj").inputs[1])
    assert 0 == optimize(shared, OptimizeOptions().with_decoder_fusions(VARIANT)).fired["packed_projection_fusion"]


def _product_of(model: ir.Model, role: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "MatMul" and role in (node.name or ""))


@OPSET_24
@pytest.mark.parametrize(("opset", "swish"), [(None, 1), (23, 0)])
def test_decoder_is_fused_into_operators_of_onnx_with_the_same_numbers(
    llama: Path, opset: int | None, swish: int
) -> None:
    """Attention has the cache and the grouped heads; Swish is in opset 24. Every node has a module."""
    result = optimize(ir.load(llama), OptimizeOptions(level="full", operators="standard", opset=opset))
    counts = _count(result.model)
    operators = ("Attention", "RotaryEmbedding", "RMSNormalization", "Swish", "Softmax", "Cos")
    assert [1, 2, 3, swish, 0, 0] == [counts[name] for name in operators]
    assert {"": opset or 24} == result.model.opset_imports
    assert measure_coverage(result.model).is_complete
    onnx.checker.check_model(ir.to_proto(result.model))
    attention = next(node for node in result.model.graph if node.op_type == "Attention")
    assert (2, 3) == (attention.attributes.get_int("kv_num_heads", 0), len(attention.outputs)), attention
    assert "model.layers.0.self_attn" == read_tag(attention).module  # type: ignore[union-attr]
    _assert_same_answers(llama, result.model)


def test_replacement_of_an_attention_has_its_module(llama: Path) -> None:
    """All nodes have a tag: nodes of the attention that of the attention, nodes of the mask that of their producer."""
    model = _fuse(llama).model
    found = {node.op_type: tag.module for node in model.graph if (tag := read_tag(node))}
    assert measure_coverage(model).is_complete
    assert found["GroupQueryAttention"] == found["RotaryEmbedding"] == "model.layers.0.self_attn"
    assert found["SkipSimplifiedLayerNormalization"] == "model.norm"
    assert found["CumSum"] == "model"


def test_length_of_the_cache_is_not_read(llama: Path) -> None:
    """Lengths come from the mask, so a cache in a longer buffer gives the same outputs."""
    model = _fuse(llama).model
    readers = {node.op_type for value in model.graph.inputs if "past" in str(value.name) for node in value.consumers()}
    assert readers == {"GroupQueryAttention"}


def test_attention_of_the_dynamo_exporter_is_fused_too(tmp_path: Path) -> None:
    """The dynamo exporter writes masks, keys and sizes differently."""
    path = _export(tmp_path, _build("llama"), "dynamo")
    model = _fuse(path).model
    counts = _count(model)
    assert (counts["GroupQueryAttention"], counts["RotaryEmbedding"], counts["SkipSimplifiedLayerNormalization"]) == (
        1, 2, 2,
    )  # fmt: skip
    _assert_same_answers(path, model)


def test_optimized_file_is_compared_on_a_prompt_and_a_step(llama: Path, tmp_path: Path) -> None:
    """The mask is as long as cache and tokens together, or the file would not run."""
    result = optimize_onnx(llama, tmp_path / "fused.onnx", level="full", ep="cpu")
    assert result.fired["group_query_attention_fusion"] == 1
    assert result.verification is not None
    assert all(item.is_equal for item in result.verification.comparisons)


@pytest.mark.parametrize(("kind", "rotations"), [("gpt2", 0), ("phi", 2), ("mistral", 2)])
def test_decoders_of_other_families_are_fused(tmp_path: Path, kind: str, rotations: int) -> None:
    """The families have no rotation, a rotation of half a head, and a window shorter than the cache."""
    path = _export(tmp_path, _build(kind))
    model = _fuse(path).model
    assert (_count(model)["GroupQueryAttention"], _count(model)["RotaryEmbedding"]) == (1, rotations)
    _assert_same_answers(path, model)


def test_window_counts_padding_inside_a_row(tmp_path: Path) -> None:
    """Padding before the tokens of a row changes no output; padding between them takes places of the window."""
    path = _export(tmp_path, _build("mistral"))
    result = optimize(ir.load(path), FUSED)
    assert _count(result.model)["GroupQueryAttention"] == 1
    assert measure_coverage(result.model).is_complete
    alone, fused = Session(path), Session(ir.to_proto(result.model).SerializeToString())
    generator = np.random.default_rng(0)
    tokens, padding, held = 8, 3, 5
    feeds = {
        "input_ids": generator.integers(3, 100, (1, 1)),
        "attention_mask": np.ones((1, tokens), np.int64),
        "position_ids": np.array([[tokens - 1]]),
    }
    past = {name: shape for name, shape in alone.input_shapes.items() if name not in feeds}
    cache = {
        name: generator.standard_normal((1, shape[1], tokens - 1, shape[3])).astype(np.float32)  # type: ignore[arg-type]
        for name, shape in past.items()
    }
    expected = alone.run({**feeds, **cache})["logits"]
    for place, is_equal in ((0, True), (held, False)):
        padded = {name: np.insert(value, [place] * padding, 7.0, axis=2) for name, value in cache.items()}
        mask = np.insert(feeds["attention_mask"], [place] * padding, 0, axis=1)
        found = fused.run({**feeds, **padded, "attention_mask": mask})["logits"]
        assert np.allclose(found, expected, atol=TOLERANCE * np.abs(expected).max(), rtol=0) == is_equal


@pytest.mark.parametrize("change", ["later_tokens_seen", "scores_limited", "no_description"])
def test_near_miss_is_left_alone(llama: Path, change: str) -> None:
    """The near misses are an attention to later tokens, one with limited scores, and a graph with no declared cache."""
    model = ir.load(llama)
    if change == "no_description":
        del model.metadata_props[INPUTS_KEY]
    elif change == "later_tokens_seen":
        node = next(node for node in model.graph if node.op_type == "LessOrEqual")
        node.op_type = "GreaterOrEqual"
    else:
        softmax = next(node for node in model.graph if node.op_type == "Softmax")
        limit = ir.node("Tanh", [softmax.inputs[0]], name="limit")
        limit.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        limit.outputs[0].shape = softmax.inputs[0].shape  # type: ignore[union-attr]
        model.graph.insert_before(softmax, limit)
        softmax.replace_input_with(0, limit.outputs[0])
        limit.metadata_props.update(softmax.metadata_props)
    result = _fuse_model(model)
    assert _count(result.model)["GroupQueryAttention"] == 0
    assert _count(result.model)["Softmax"] == 1


def test_inconsistent_rotation_stays_before_the_attention(llama: Path) -> None:
    """A rotation that differs between queries and keys stays, and the attention after it is fused."""
    model = ir.load(llama)
    turned = next(node for node in model.graph if node.op_type == "Neg")
    turned.op_type = "Identity"
    result = _fuse_model(model)
    counts = _count(result.model)
    assert (counts["GroupQueryAttention"], counts["RotaryEmbedding"], counts["Cos"]) == (1, 0, 1)


def _fuse_model(model: ir.Model) -> OptimizeResult:
    return optimize(model, FUSED)


def test_requested_level_decides_alone() -> None:
    """A requested level decides alone, and a provider without the operators gets no fusion."""
    assert OptimizeOptions(level="none").with_decoder_fusions().is_empty
    assert OptimizeOptions(ep="qnn").with_decoder_fusions().is_empty
    assert OptimizeOptions(ep="qnn").with_decoder_fusions(ATTENTION_VARIANT).is_empty
    assert OptimizeOptions(level="none").with_attention_variant(ATTENTION_VARIANT).is_empty
    assert FUSED.model_copy(update={"right_padding": False}).with_attention_variant(VARIANT).right_padding is False
    assert [entry.name for entry in FUSED.enabled()] == [
        "tanh_gelu_fusion", "simplified_layer_norm_fusion", "skip_simplified_layer_norm_fusion",
        "group_query_attention_fusion", "mixture_of_experts_fusion",
    ]  # fmt: skip
