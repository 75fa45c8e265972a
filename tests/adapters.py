"""LoRA adapters as the package peft saves them, written from the published layout with distinct values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D


def matrices(module: nn.Module, rank: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw the two LoRA matrices of a module; keys are the name endings in the adapter file."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    if isinstance(module, nn.Embedding):
        return {
            "lora_embedding_A": drawn(rank, module.num_embeddings),
            "lora_embedding_B": drawn(module.embedding_dim, rank),
        }
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        output, inputs, *kernel = module.weight.shape
        ones = (1,) * len(kernel)
        return {"lora_A.weight": drawn(rank, inputs, *kernel), "lora_B.weight": drawn(output, rank, *ones)}
    if isinstance(module, nn.MultiheadAttention):
        output, inputs = module.in_proj_weight.shape
    elif isinstance(module, Conv1D):
        inputs, output = module.weight.shape
    else:
        output, inputs = module.weight.shape
    return {"lora_A.weight": drawn(rank, inputs), "lora_B.weight": drawn(output, rank)}


def save_adapter(
    folder: Path,
    model: nn.Module,
    targets: tuple[str, ...],
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    ranks: Mapping[str, int] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of the modules with a last name part in ``targets``.

    Args:
        folder: Folder of the two files.
        model: The base model.
        targets: Last parts of module names.
        seed: Seed of the values.
        rank: Rank of all modules except those in ``ranks``.
        alpha: Numerator of the scaling, ``lora_alpha``.
        ranks: Last part of a module's name → rank; written as ``rank_pattern``.
        extra: Further tensors by their names in the file.
        **config: Further keys of the config.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in targets:
            parts = matrices(module, (ranks or {}).get(last, rank), generator)
            tensors.update({f"base_model.model.{name}.{part}": value for part, value in parts.items()})
    folder.mkdir(parents=True)
    save_file({**tensors, **(extra or {})}, folder / "adapter_model.safetensors", {"format": "pt"})
    record = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [*targets], "bias": "none",
        "rank_pattern": dict(ranks or {}), "lora_dropout": 0.1, "inference_mode": True, **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(record))
    return folder


@torch.no_grad()
def merge_by_formula(model: nn.Module, folder: Path, scaling: float | Mapping[str, float]) -> nn.Module:
    """Add scaling · B · A to the weights of a model in place, by the formula and without our code.

    Args:
        model: The base model; a shared weight that is changed is separated first.
        folder: Folder of the adapter.
        scaling: Scaling of all modules, or last part of a module's name → scaling.
    """
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in model.named_modules():
        parts = {
            key.removeprefix(f"base_model.model.{name}."): value
            for key, value in tensors.items()
            if key.startswith(f"base_model.model.{name}.lora_")
        }
        if not parts:
            continue
        a, b = (next(value for key, value in parts.items() if f"_{letter}" in key) for letter in "AB")
        factor = scaling if isinstance(scaling, (int, float)) else scaling[name.rpartition(".")[2]]
        delta = torch.einsum("or,r...->o...", b.reshape(b.shape[0], b.shape[1]), a) * factor
        attribute = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
        weight = getattr(module, attribute)
        if isinstance(module, (nn.Embedding, Conv1D)):
            delta = delta.t()
        setattr(module, attribute, nn.Parameter((weight + delta).detach()))
    return model
