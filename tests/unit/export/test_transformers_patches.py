"""transformers' repairs for export are in place for the time of an export, and only for its own models."""

from __future__ import annotations

import torch
from torch import nn

from checkpoints import build_model
from winml.modelkit.export.transformers_patches import library_repairs


def test_patches_are_in_place_for_the_block_and_gone_after_it() -> None:
    """The parts of transformers that are used are where they are looked for."""
    before = torch.where, nn.functional.scaled_dot_product_attention
    holder = nn.Sequential(build_model("bert"))
    with library_repairs(holder) as repairs:
        assert before[0] is not torch.where
        assert before[1] is not nn.functional.scaled_dot_product_attention
        assert torch.ops.aten.index_put.default in repairs.translations
        program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
        repairs.repair_program(program)
    assert before == (torch.where, nn.functional.scaled_dot_product_attention)


def test_models_of_other_libraries_are_exported_as_they_are() -> None:
    """Nothing is patched for a plain torch module."""
    before = torch.where
    with library_repairs(nn.Linear(2, 2)) as repairs:
        assert before is torch.where
        assert {} == repairs.translations
