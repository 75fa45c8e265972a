"""Patches of transformers, applied during an export of its models only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoints import build_model
from unit.export.dynamo.test_capturing import capture
from unit.export.dynamo.test_example_values import answer
from winml.modelkit.export.dynamo.transformers_patches import library_repairs


def test_patches_are_active_inside_the_block_only() -> None:
    """The patched functions of transformers exist."""
    before = torch.where, nn.functional.scaled_dot_product_attention
    holder = nn.Sequential(build_model("bert"))
    with library_repairs(holder) as repairs:
        assert before[0] is not torch.where
        assert before[1] is not nn.functional.scaled_dot_product_attention
        assert torch.ops.aten.index_put.default in repairs.translations
        program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
        repairs.repair_program(program)
    assert before == (torch.where, nn.functional.scaled_dot_product_attention)


def test_imported_model_files_are_patched_and_others_stay_unimported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The module of an architecture that was not imported is in no model, so it is not imported."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention

    before, absent = VisionAttention.forward, "transformers.models.mra.modeling_mra"
    monkeypatch.delitem(sys.modules, absent, raising=False)
    with library_repairs(nn.Sequential(build_model("bert"))):
        assert before is not VisionAttention.forward
        assert absent not in sys.modules
    assert before is VisionAttention.forward


class Writer(nn.Module):
    """A module that writes into a tensor by index, and along the diagonal."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the changed tensor."""
        result = values.clone()
        result.index_put_((torch.tensor([0, 2]),), values[:2] * 2)
        result.fill_diagonal_(0.5)
        return result


def test_replacing_nodes_keep_the_modules_of_the_replaced_nodes() -> None:
    """The operators that replace in-place operators keep the module of the replaced ones."""
    before = torch.fx.Graph.create_node, torch.fx.Graph.inserting_before
    with library_repairs(nn.Sequential(build_model("bert"))) as repairs:
        program = torch.export.export(nn.Sequential(nn.Identity(), Writer()), (torch.ones(3, 3),), strict=False)
        repairs.repair_program(program)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.index_put.default in {node.target for node in nodes}
    assert torch.ops.aten.where.self in {node.target for node in nodes}
    innermost = {str(node.target): list(node.meta["nn_module_stack"].values())[-1][0] for node in nodes}
    assert {"1"} == set(innermost.values()), innermost
    assert before == (torch.fx.Graph.create_node, torch.fx.Graph.inserting_before)


def test_models_of_other_libraries_are_exported_unpatched() -> None:
    """Nothing is patched for a plain torch module."""
    before = torch.where
    with library_repairs(nn.Linear(2, 2)) as repairs:
        assert before is torch.where
        assert {} == repairs.translations


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("hidden", [False, LOWEST, -torch.inf], ids=["booleans", "lowest", "infinity"])
def test_attention_of_a_fully_masked_row_equals_torch(hidden: float) -> None:
    """A fully masked row gives zeros; a row of equally low scores gives the average of all values."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 3, 4, generator=generator) for _ in range(3))
    seen = torch.tensor([[True, False, False], [False, False, False], [True, True, False]])
    mask = seen if hidden is False else torch.where(seen, 0.5, hidden)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    with library_repairs(build_model("bert")):
        actual = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(actual, expected)
    row = value.mean(2) if hidden == LOWEST else torch.zeros(1, 2, 4)
    torch.testing.assert_close(actual[:, :, 1], row)


class Masked(nn.Module):
    """A module that writes rows selected by a mask, in two forms, beside a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = build_model("bert", num_hidden_layers=1)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the changed values."""
        rows = values[mask]
        result = values.masked_scatter(mask[:, None], rows * 2)
        result[mask] += rows
        return result


@pytest.mark.parametrize("mask", [[True, False, True, False], [False] * 4], ids=["two", "none"])
def test_rows_are_written_at_the_mask_only(mask: list[bool], tmp_path: Path) -> None:
    """A graph traced with three masked rows writes two, and none."""
    model = Masked()
    captured = capture(model, {"values": torch.randn(4, 3), "mask": torch.tensor([True, True, False, True])})
    inputs = {"values": torch.randn(4, 3), "mask": torch.tensor(mask)}
    assert torch.equal(model(**inputs), answer(captured, inputs, tmp_path))


def test_attention_of_a_vision_encoder_keeps_its_norms() -> None:
    """The patch of transformers for this forward omits the norms of queries and keys."""
    from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrVisionAttention, GlmOcrVisionConfig

    attention = GlmOcrVisionAttention(GlmOcrVisionConfig(hidden_size=16, num_heads=2)).eval()
    generator = torch.Generator().manual_seed(0)
    states, angles = torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)
    inputs = states, torch.tensor([0, 4, 8]), (angles.cos(), angles.sin())
    with torch.no_grad():
        expected = attention(*inputs)
        with library_repairs(nn.Sequential(build_model("bert", num_hidden_layers=1), attention)):
            actual = attention(*inputs)
    torch.testing.assert_close(actual, expected)
