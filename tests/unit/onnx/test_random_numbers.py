"""Random numbers of a graph, and of PyTorch, that are fixed for a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch

from graphs import parse
from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.compare.verification.fixed_numbers import FixedNumbers
from winml.modelkit.onnx.random_numbers import FIXED
from winml.modelkit.ort.graph_sessions import fixed_random_numbers, open_session


def test_fixed_numbers_have_the_scale_of_their_distribution(tmp_path: Path) -> None:
    """They are the same in each run, also of a graph whose output is drawn."""
    body = """m (float[2, 3] x) => (float[2, 3] a, float[4] b, float[2, 3] c, double[4] d) {
        a = RandomNormalLike <mean = 2.0, scale = 4.0> (x) b = RandomNormal <shape = [4]> ()
        c = RandomUniformLike <low = 1.0, high = 3.0> (x) d = RandomUniform <shape = [4], dtype = 11> () }"""
    path = tmp_path / "m.onnx"
    onnx.save(ir.to_proto(parse(body)), path)
    with fixed_random_numbers():
        outputs = open_session(path, as_written=False).run({"x": np.zeros((2, 3), np.float32)})
    expected = {"a": 2 + 4 * FIXED, "b": FIXED, "c": 1 + 2 * FIXED, "d": FIXED}
    assert expected == {name: float(values.flat[0]) for name, values in outputs.items()}
    assert [(2, 3), (4,), (2, 3), (4,)] == [values.shape for values in outputs.values()]
    assert np.float64 == outputs["d"].dtype
    with FixedNumbers():
        assert torch.equal(torch.randn(2), torch.rand_like(torch.zeros(2)))
        generator = torch.Generator().manual_seed(0)
        assert not torch.equal(torch.randn(2, generator=generator), torch.full((2,), FIXED))


class Noisy(torch.nn.Module):
    """A layer with noise, whose scale the trace contains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add noise."""
        return self.linear(x) + torch.randn_like(x) * 0.5


def test_model_with_noise_is_verified_with_fixed_numbers(tmp_path: Path) -> None:
    """The file draws its own."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 4)}
    part = HTPExporter(WinMLExportConfig()).export(Noisy().eval(), tmp_path / "m.onnx", inputs).only_part
    assert part.verification is not None
    assert (True, True) == (part.verification.is_verified, part.verification.fixes_numbers)
    session = open_session(tmp_path / "m.onnx", as_written=False)
    first, second = (session.run({"x": np.zeros((2, 4), np.float32)}) for _ in range(2))
    assert not np.array_equal(*[next(iter(outputs.values())) for outputs in (first, second)])
