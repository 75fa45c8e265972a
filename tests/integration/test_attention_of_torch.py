"""Attention and transformers of torch.nn, exported with both exporters: verification and tags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphs import run_onnx
from tag_checks import load_nodes
from winml.modelkit import WinMLExportConfig, export_pytorch
from winml.modelkit.errors import VerificationError

VALUES = torch.linspace(-1, 1, 2 * 5 * 16).reshape(2, 5, 16).sin()
HIDDEN = torch.tensor([[False, False, False, False, True], [False, False, True, True, True]])


class Encoder(nn.Module):
    """Hides padding, but never the first token, so that each token has something to attend to."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, values: torch.Tensor, hidden: torch.Tensor) -> Any:
        """Encode."""
        is_later = torch.arange(5) > 0
        return self.encoder(values, src_key_padding_mask=hidden & is_later)


class SelfAttention(nn.Module):
    """Attention with unused weights in its result."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, values: torch.Tensor) -> Any:
        """Attend."""
        return self.attention(values, values, values, need_weights=False)[0]


class Translator(nn.Module):
    """Encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> Any:
        """Translate."""
        return self.transformer(values, target)


CASES = {
    "encoder": (Encoder, (VALUES, HIDDEN), [f"encoder.layers.{layer}.self_attn" for layer in range(2)]),
    "attention": (SelfAttention, (VALUES,), ["attention"]),
    "transformer": (
        Translator,
        (VALUES, VALUES.flip(1)),
        [
            "transformer.encoder.layers.0.self_attn",
            "transformer.decoder.layers.0.self_attn",
            "transformer.decoder.layers.0.multihead_attn",
        ],
    ),
}
"""Case → class, inputs, and the attention modules in order."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", CASES)
def test_attention_of_torch_is_exported(name: str, exporter: Any, tmp_path: Path) -> None:
    """The outputs equal PyTorch's, each attention is tagged with its module, and the PyTorch model is unchanged."""
    make, inputs, attending = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    config = WinMLExportConfig(exporter=exporter, torch_module=("all",))
    result = export_pytorch(model, tmp_path / "model.onnx", inputs, config=config)
    assert was_enabled is torch.backends.mha.get_fastpath_enabled()
    part = result.only_part
    assert part.verification is not None
    assert part.verification.is_verified
    feeds = {spec.name: tensor.numpy() for spec, tensor in zip(part.inputs, inputs, strict=True)}
    (answer,) = run_onnx(result.only_part.model_path, feeds).values()
    with torch.no_grad():
        expected = model(*inputs).numpy()
    # The fast path gives zeros for fully masked tokens; other tokens are equal.
    seen = ~HIDDEN.numpy() if name == "encoder" else np.ones((2, 5), bool)
    np.testing.assert_allclose(answer[seen], expected[seen], atol=1e-5)
    softmaxes = [node for node in load_nodes(result) if node.op_type == "Softmax"]
    assert attending == [node.metadata_props["winml.hierarchy.module"] for node in softmaxes]


class PaddedEncoder(nn.Module):
    """Passes the padding mask to the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)

    def forward(self, values: torch.Tensor, padding_mask: torch.Tensor) -> Any:
        """Encode."""
        return self.encoder(values, src_key_padding_mask=padding_mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_mask_of_dynamic_length_is_exported_by_torchscript(tmp_path: Path) -> None:
    """Torch's conversion of unflatten freezes the length of the keys."""
    torch.manual_seed(0)
    model = PaddedEncoder().eval()
    axes = {name: {0: "rows", 1: "tokens"} for name in ("values", "padding_mask")}
    config = WinMLExportConfig(exporter="torchscript", dynamic_axes=axes)
    mask = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    result = export_pytorch(model, tmp_path / "model.onnx", (torch.randn(2, 7, 16), mask), config=config)
    for rows, tokens in ((1, 1), (3, 12)):
        values = torch.randn(rows, tokens, 16)
        hidden = (torch.arange(tokens)[None] >= tokens - torch.arange(rows)[:, None]).bool()
        feeds = {"values": values.numpy(), "padding_mask": hidden.numpy()}
        (answer,) = run_onnx(result.only_part.model_path, feeds).values()
        seen = ~hidden.numpy()
        np.testing.assert_allclose(answer[seen], model(values, hidden).detach().numpy()[seen], atol=1e-5)


class IntegerMaskEncoder(PaddedEncoder):
    """Takes a mask of integers that is 0 at padding."""

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> Any:
        """Encode."""
        return super().forward(values, mask == 0)


class FullRowEncoder(IntegerMaskEncoder):
    """Omits the mask if it hides nothing."""

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> Any:
        """Encode."""
        return self.encoder(values) if bool((mask == 1).all()) else super().forward(values, mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("ends", [(7, 7), (7, 4)])
def test_mask_of_integers_is_verified(ends: tuple[int, ...], tmp_path: Path) -> None:
    """A fully padded row is NaN in a graph, and zero in PyTorch's fast path."""
    torch.manual_seed(0)
    mask = (torch.arange(7) < torch.tensor(ends)[:, None]).long()
    inputs = (torch.randn(2, 7, 16), mask)
    part = export_pytorch(IntegerMaskEncoder().eval(), tmp_path / "model.onnx", inputs).only_part
    assert part.verification is not None
    assert (part.verification.is_verified, part.verification.assumed) == (True, ())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_mask_of_integers_that_decides_a_branch_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(2, 7, 16), torch.ones(2, 7, dtype=torch.int64))
    with pytest.raises(VerificationError, match="mask"):
        export_pytorch(FullRowEncoder().eval(), tmp_path / "model.onnx", inputs)
