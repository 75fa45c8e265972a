"""A small model of two parts: an encoder, and a decoder that takes the encoder's output."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from winml.modelkit.export.config import first_choice
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.export.records import ExportResult
from winml.modelkit.models.parts import LoadedModel, ModelInfo, ModelPart
from winml.modelkit.onnx.bundle import PartFeed
from winml.modelkit.onnx.specs import InputTensorSpec

WIDTH = 8


class Block(nn.Module):
    """A linear layer and an activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Apply both layers."""
        return torch.tanh(self.linear(states))


class Encoder(nn.Module):
    """Two blocks over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the hidden states of the tokens."""
        states = self.embedding(ids)
        for block in self.blocks:
            states = block(states)
        return {"states": states}


class Decoder(nn.Module):
    """One block over targets that attend to all encoded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, targets: torch.Tensor, encoded: torch.Tensor) -> dict[str, torch.Tensor]:
        """Score the next tokens."""
        return {"logits": self.head(self.block(self.embedding(targets) + encoded.mean(1, keepdim=True)))}


# As in T5, encoder and decoder share a class: their tags differ by the module path.
Encoder.__name__ = Decoder.__name__ = "Stack"


class Body(nn.Module):
    """The module around encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode and decode."""
        return self.decoder(targets, self.encoder(ids)["states"])  # type: ignore[no-any-return]


class Translator(nn.Module):
    """The whole model; its modules are the modules of the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output of the body."""
        return self.body(ids, targets)  # type: ignore[no-any-return]


def translator(seed: int = 0) -> Translator:
    """Return the whole model with seeded weights."""
    torch.manual_seed(seed)
    return Translator().eval()


def two_parts(model: Translator | None = None) -> LoadedModel:
    """Return the model in two parts, as ``load_model`` would."""
    model = translator() if model is None else model
    ids = InputTensorSpec(name="ids", shape=(2, 5), dtype="int64", value_range=(0, 15))
    targets = InputTensorSpec(name="targets", shape=(2, 3), dtype="int64", value_range=(0, 15))
    encoded = InputTensorSpec(name="encoded", shape=(2, 5, WIDTH), dtype="float32")
    return LoadedModel(
        info=ModelInfo("translator", "Translator", "torch", str(torch.__version__)),
        parts=(
            ModelPart(
                model=model,
                inputs=(ids,),
                name="encoder",
                path="body.encoder",
                feeds=(PartFeed("states", "decoder", "encoded"),),
            ),
            ModelPart(model=model, inputs=(targets, encoded), name="decoder", path="body.decoder"),
        ),
    )


def export_loaded(
    exporter: HTPExporter, loaded: LoadedModel, output: Path, *, overwrite: bool = False, with_report: bool = False
) -> ExportResult:
    """Export a model assembled in a test; several parts go to ``<stem>_<part>.onnx``."""
    target = exporter._make_target(output, overwrite=overwrite, with_report=with_report)
    return exporter._export_parts(lambda: (loaded, first_choice(exporter.config)), target)
