"""Choice of the exporter, and its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from installed_versions import OPSET_24
from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.errors import ExportError, VerificationError
from winml.modelkit.export.config import ExporterUse, first_choice, second_choice
from winml.modelkit.export.loading import parameter_bytes
from winml.modelkit.tags.tagging import read_tag


class Normalization(nn.Module):
    """A model with an operator that TorchScript lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Divide by the root of the mean square."""
        return nn.functional.rms_norm(self.linear(values), (4,))


class Outer(nn.Module):
    """A model that holds the normalization."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the inner module."""
        return self.inner(values) * 2


class Halves(nn.Module):
    """A model that writes into a part of a tensor, which TorchScript loses silently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Double the first half."""
        whole = self.linear(values)
        whole.chunk(2, -1)[0].mul_(2)
        return whole


class Settling(nn.Module):
    """A model that replaces the inner module at the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = Outer(nn.Linear(4, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Replace the module and call the new one."""
        if isinstance(self.inner, Outer):
            self.inner = Halves()
        return self.inner(values).tanh()


class Bessel(nn.Module):
    """A model with an operator that both exporters lack."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the operator."""
        return torch.special.bessel_j0(values)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("auto", ExporterUse("torchscript")),
        ("torchscript", ExporterUse("torchscript", "asked for")),
        ("dynamo", ExporterUse("dynamo", "asked for")),
    ],
)
def test_first_choice_follows_the_request(
    wanted: Literal["auto", "torchscript", "dynamo"], expected: ExporterUse
) -> None:
    """The choice does not depend on the size of the weights; a reason is given unless the choice is the usual one."""
    assert expected == first_choice(WinMLExportConfig(exporter=wanted))


def test_parameter_bytes_counts_tied_parameters_once_and_needs_no_storage() -> None:
    """The size is known before weights are loaded."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert 8 * 8 * 4 == parameter_bytes(model)


def test_dynamo_has_its_default_opset_without_a_request() -> None:
    """The opset 17 is TorchScript's; a requested opset applies to both exporters."""
    config = WinMLExportConfig()
    assert (17, 18) == (config.opset_for("torchscript"), config.opset_for("dynamo"))
    assert 17 == WinMLExportConfig(opset_version=17).opset_for("dynamo")


def export(model: nn.Module, folder: Path, **options: Any) -> Any:
    """Export with an input of three rows."""
    exporter = HTPExporter(WinMLExportConfig(**options))
    return exporter.export(model, folder / "model.onnx", {"values": torch.randn(3, 4)})


@OPSET_24
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_opset_beyond_the_exporter_is_converted_with_its_tags(tmp_path: Path, exporter: str) -> None:
    """Opset 24 is newer than either exporter writes; the file equals PyTorch, and each node has its module."""
    part = export(Outer(nn.Linear(4, 4)), tmp_path, exporter=exporter, opset_version=24).only_part
    assert (24, 24) == (part.opset_requested, part.opset_produced)
    assert part.verification.is_verified
    model = ir.load(tmp_path / "model.onnx")
    assert 24 == model.opset_imports[""]
    assert {"", "inner"} == {tag.module for node in model.graph if (tag := read_tag(node))}
    assert 100.0 == part.coverage.percent


def test_auto_uses_the_other_exporter_with_a_reason(tmp_path: Path) -> None:
    """Result, sidecar and file have the module and the operator; the graph is verified as any other."""
    result = export(Outer(Normalization()), tmp_path)
    assert (
        "dynamo, opset 18 (aten::rms_norm in module inner has no TorchScript form)" == result.only_part.exporter_words
    )
    assert result.only_part.verification.is_verified
    sidecar = json.loads((tmp_path / "model_htp_metadata.json").read_text(encoding="utf-8"))
    assert result.only_part.exporter_reason == sidecar["export_context"]["exporter_reason"]
    properties = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
    record = json.loads(properties["winml.export"])
    assert ("dynamo", result.only_part.exporter_reason) == (record["exporter"], record["exporter_reason"])
    assert (18, 18) == (record["opset_requested"], record["opset_produced"])


def test_exporter_with_a_moved_private_name_is_replaced_by_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer torch may lack the name: the error is no AttributeError, and its hint names the other exporter."""
    monkeypatch.delattr(torch.jit, "_get_trace_graph")
    moved = f"torch {torch.__version__} has no torch.jit._get_trace_graph, which the exporter TorchScript needs"
    with pytest.raises(ExportError) as caught:
        export(Outer(nn.Linear(4, 4)), tmp_path, exporter="torchscript")
    assert moved == caught.value.message
    assert "Use a different version of torch. " in caught.value.hint
    assert "Without exporter='torchscript', the dynamo exporter is tried too. " in caught.value.hint
    result = export(Outer(nn.Linear(4, 4)), tmp_path)
    assert f"dynamo, opset 18 (TorchScript: {moved})" == result.only_part.exporter_words


def test_forced_exporter_does_not_change_and_both_reasons_are_reported(tmp_path: Path) -> None:
    """A requested exporter is used or fails; if both exporters fail, the error names both reasons."""
    with pytest.raises(ExportError, match=r"TorchScript.*ONNX.*aten::rms_norm") as caught:
        export(Outer(Normalization()), tmp_path, exporter="torchscript")
    assert caught.value.hint.startswith("Without exporter='torchscript', the dynamo exporter is tried too. ")
    with pytest.raises(ExportError) as caught:
        export(Outer(Bessel()), tmp_path, exporter="dynamo")
    assert caught.value.hint.startswith("Without exporter='dynamo', the TorchScript exporter is tried too. ")
    with pytest.raises(ExportError) as caught:
        export(Outer(Bessel()), tmp_path)
    assert "neither exporter" in caught.value.message
    assert "is tried" not in caught.value.hint
    assert "aten::special_bessel_j0" in caught.value.message
    assert "prims::bessel_j0" in caught.value.message
    assert "inner" == caught.value.module
    assert [] == list(tmp_path.iterdir())


def test_auto_makes_a_wrong_graph_anew_with_the_other_exporter(tmp_path: Path) -> None:
    """TorchScript writes some wrong graphs silently; if it is requested, the export fails without a file."""
    result = export(Outer(Halves()), tmp_path)
    assert "dynamo" == result.only_part.exporter
    assert result.only_part.exporter_reason.startswith(
        "the graph TorchScript made is wrong: not equal: output 'output'"
    )
    assert result.only_part.verification.is_verified
    (tmp_path / "forced").mkdir()
    with pytest.raises(VerificationError, match="not equal"):
        export(Outer(Halves()), tmp_path / "forced", exporter="torchscript")
    assert [] == list((tmp_path / "forced").iterdir())


@pytest.mark.parametrize(
    ("wanted", "used", "is_graph_wrong", "expected"),
    [
        ("auto", "torchscript", True, "dynamo"),
        ("auto", "torchscript", False, None),
        ("auto", "dynamo", True, None),
        ("torchscript", "torchscript", True, None),
    ],
)
def test_second_choice_is_tried_only_for_errors_of_the_graph(
    wanted: Literal["auto", "torchscript"],
    used: Literal["torchscript", "dynamo"],
    is_graph_wrong: bool,
    expected: str | None,
) -> None:
    """A model with random outputs would fail with any exporter."""
    error = VerificationError("cannot verify: no", is_graph_wrong=is_graph_wrong)
    choice = second_choice(WinMLExportConfig(exporter=wanted), ExporterUse(used), error)
    assert expected == (choice.name if choice else None)


def test_modules_exchanged_at_run_time_are_those_in_the_file(tmp_path: Path) -> None:
    """The tree has the modules that run from the second call on."""
    result = export(Settling(), tmp_path)
    tags = ["/Settling", "/Settling/Halves", "/Settling/Halves/Linear"]
    assert tags == [node.tag for node in result.only_part.tree]
    assert set(tags) == {node.tag for node in result.only_part.nodes}


def test_second_choice_after_a_wrong_normalization_does_not_blame_the_exporter() -> None:
    """The reason is that of the error, which names the normalization."""
    error = VerificationError("normalization made the graph wrong", is_graph_wrong=True)
    error.is_normalization_wrong = True
    choice = second_choice(WinMLExportConfig(), ExporterUse("torchscript"), error)
    assert choice is not None
    assert "normalization made the graph wrong" == choice.reason
