"""Summary of a quantization, with unfulfilled requests first."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from rich.console import Console

from graphs import parse
from weighted_graphs import weight
from winml.modelkit import quantize_onnx
from winml.modelkit.quantize.records import QuantizedFile
from winml.modelkit.quantize.table import quantization_document
from winml.modelkit.report.terminal import print_document
from winml.modelkit.tags.tagging import NodeTag, write_tag

LAYERS = 16


def quantized(folder: Path, **options: Any) -> QuantizedFile:
    """Quantize a chain of modules with long names."""
    weights = ", ".join(weight(f"w{index}", 8, 8) for index in range(LAYERS))
    nodes = " ".join(f"h{index + 1} = MatMul (h{index}, w{index})" for index in range(LAYERS))
    model = parse(f"m (float[2, 8] h0) => (float[2, 8] h{LAYERS}) <{weights}> {{ {nodes} }}")
    for index, node in enumerate(model.graph):
        tag = f"/TransformerForSequenceClassification/TransformerEncoder/TransformerLayer.{index}"
        write_tag(node, NodeTag(tag, f"encoder.layer.{index}", "direct"))
    ir.save(model, folder / "in.onnx")
    return quantize_onnx(folder / "in.onnx", folder / "out.onnx", overwrite=True, verify=False, **options)


def lines(result: QuantizedFile, *, width: int = 200, verbose: bool = False) -> list[str]:
    """Return the printed lines."""
    text = io.StringIO()
    print_document(quantization_document(result), Console(file=text, width=width), verbose=verbose)
    return text.getvalue().splitlines()


def test_modules_that_keep_their_bits_come_first(tmp_path: Path) -> None:
    """Requested and actual precision stand beside each other, with the reason; the rest follows in order."""
    result = quantized(tmp_path, exclude=("encoder.layer.15",), per_module={"encoder.layer.3": "uint8"})
    printed = lines(result)
    assert "15 of 16 nodes with weights (int8 14, uint8 1)" in printed[1]
    assert ["left", "1", "excluded", "by", "encoder.layer.15"] == printed[2].split()
    table = printed[printed.index("") + 2 :]
    assert ["fp32", "fp32", "0", "1"] == table[0].split()[1:5]
    assert table[0].startswith("/TransformerForSequenceClassification/TransformerEncoder/TransformerLayer.15")
    equal = [line.split()[0].rpartition("/")[2] for line in table[1:]]
    assert ["TransformerLayer.*", "TransformerLayer.3"] == equal, "equal layers are one row"
    assert LAYERS == len(lines(result, verbose=True)) - printed.index("") - 2


@pytest.mark.parametrize("width", [40, 80])
def test_narrow_terminal_loses_no_name(width: int, tmp_path: Path) -> None:
    """Long tags are folded within their column."""
    printed = lines(quantized(tmp_path), width=width)
    heading = next(line for line in printed if line.startswith("module"))
    column = "".join(line[: heading.index("requested")].strip() for line in printed[printed.index(heading) + 1 :])
    assert "/TransformerForSequenceClassification/TransformerEncoder/TransformerLayer.*" in column


def test_skipped_comparison_is_noted(tmp_path: Path) -> None:
    """A file without a comparison must not look verified."""
    (verified,) = (line for line in lines(quantized(tmp_path)) if line.startswith("verified"))
    assert "skipped" in verified
