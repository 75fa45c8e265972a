"""Metadata that no tool writes: ignored, or refused in words by every command."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from e2e.in_process import run_here
from graphs import parse
from weighted_graphs import weight
from winml.modelkit import metadata_keys
from winml.modelkit.tags.tagging import NodeTag, write_tag

NET = f"""m (float[N, 64] x) => (float[N, 64] y) <{weight("w_1", 64, 64)}, {weight("w_2", 64, 64)}> {{
    a = MatMul (x, w_1)
    r = Relu (a)
    y = MatMul (r, w_2) }}"""
KEYS = sorted(text for name, text in vars(metadata_keys).items() if name.endswith("_KEY") and text.startswith("winml."))
VALUES = {
    "levels": "[" * 100_000 + "]" * 100_000,
    "large integer": str(10**308),
    "larger integer": "9" * 5000,
    "large float": "1e308",
    "infinity": "1e400",
    "inputs": f'[{{"name": "x", "value_range": [0, {10**308}], "first_values": [[{10**308}, {2**62}]], '
    f'"sums": {{"N": [{10**308}]}}, "shape": [{10**308}, 64], "dtype": "float32"}}]',
    "bounds": f'[{{"name": "N", "min": {2**62}, "max": {2**63 - 1}}}]',
    "model": f'{{"name_or_path": {10**308}, "class": [], "task": [[]], "model_type": {{}}, "random_weights": 1e308}}',
    "model fields": '{"name_or_path": {}, "class": [], "task": [[]], "model_type": [1], "adapters": [[1]]}',
    "modules": f'[{{"tag": "/M", "path": "", "calls": {10**308}, "depth": 1e308}}]',
    "record": f'{{"name": {10**308}, "names": [1e308], "modules": [{10**308}], "of": [1, 2], "opset": {10**308}, '
    f'"feeds": [{{"output": 1, "part": {10**308}, "input": []}}], "positions": {10**308}, "provider": 1e308, '
    f'"requested": {10**308}, "version": {10**308}, "changes": {{"0": {10**308}}}, "order": [[0, {10**308}]]}}',
}
COMMANDS = (
    ("inspect", "damaged.onnx"),
    ("inspect", "damaged.onnx", "-H", "--format", "json"),
    ("perf", "damaged.onnx", "--by-module", "--iterations", "1", "--warmup", "0"),
    ("diff", "damaged.onnx", "whole.onnx"),
    ("compare", "damaged.onnx", "whole.onnx"),
    ("extract", "damaged.onnx", "--module", "first", "-o", "cut"),
    ("quantize", "-m", "damaged.onnx", "-o", "quantized.onnx", "-p", "int8", "--mode", "weight-only"),
    ("optimize", "-m", "damaged.onnx", "-o", "optimized.onnx", "--level", "basic"),
    ("run", "damaged.onnx", "--schema"),
    ("run", "damaged.onnx", "--input", f"x={[[1] * 64]}"),
    ("eval", "damaged.onnx"),
    ("retag", "damaged.onnx", "whole.onnx", "-o", "tagged.onnx"),
    ("retag", "whole.onnx", "damaged.onnx", "-o", "retagged.onnx"),
    ("generate", "damaged.onnx", "-p", "a"),
)


@pytest.fixture(name="whole", scope="module")
def save_whole(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """A tagged model without further metadata."""
    model = parse(NET)
    for node, name in zip(model.graph, ("first", "act", "last"), strict=True):
        write_tag(node, NodeTag(f"/M/{name.title()}", name, "direct"))
    return ir.to_proto(model)


@pytest.mark.parametrize("value", VALUES)
def test_commands_end_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: onnx.ModelProto, value: str
) -> None:
    """The value is set for every key, on the model and on its nodes."""
    monkeypatch.chdir(tmp_path)
    onnx.save(whole, "whole.onnx")
    damaged = onnx.ModelProto.FromString(whole.SerializeToString())
    for holder in (damaged, *damaged.graph.node):
        present = {entry.key for entry in holder.metadata_props}
        for key in KEYS:
            if key not in present:
                holder.metadata_props.add(key=key, value=VALUES[value])
    onnx.save(damaged, "damaged.onnx")
    for command in COMMANDS:
        outcome = run_here(*command)
        assert outcome.code in (0, 1, 2, 3), (command, outcome.err)
        assert "internal error" not in outcome.err, (command, outcome.err)
        assert "No such option" not in outcome.err, (command, outcome.err)


def test_number_in_a_record_that_no_graph_has_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: onnx.ModelProto
) -> None:
    """The quantization is that of a file without the record."""
    monkeypatch.chdir(tmp_path)
    onnx.save(whole, "damaged.onnx")
    model = onnx.load("damaged.onnx")
    model.metadata_props.add(key=metadata_keys.DIMENSIONS_KEY, value=f'[{{"name": "N", "min": {10**308}}}]')
    model.graph.node[0].metadata_props.add(key=metadata_keys.QUANTIZATION_KEY, value="[" * 100_000)
    onnx.save(model, "damaged.onnx")
    outcome = run_here("quantize", "-m", "damaged.onnx", "-o", "quantized.onnx", "-p", "int8", "--mode", "weight-only")
    assert 0 == outcome.code, outcome.err
    assert 2 == [node.op_type for node in onnx.load("quantized.onnx").graph.node].count("MatMulNBits")
