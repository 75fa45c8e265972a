"""The memory that a process may still use, of the system and the container."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from winml.modelkit.compare.verification.reference_run import refuse_verification_beyond_memory, verification_bytes
from winml.modelkit.errors import ExportError
from winml.modelkit.ort.host import _container_available, available_bytes


def _model(weight_bytes: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a model with weights of this size, which use no memory."""
    return torch.nn.Linear(weight_bytes // dtype.itemsize, 1, bias=False, device="meta", dtype=dtype)


def test_comparison_beyond_memory_is_refused_with_a_remedy() -> None:
    """The error names both sizes and the option; a fitting model or an unknown limit passes."""
    model = _model(14 * 10**9)
    with pytest.raises(ExportError, match=r"17.50 GB .*16.00 GB") as caught:
        refuse_verification_beyond_memory(model, 16 * 10**9)
    assert "--no-verify" in caught.value.hint
    refuse_verification_beyond_memory(model, 18 * 10**9)
    refuse_verification_beyond_memory(model, None)


def test_weights_inside_the_file_count_twice_in_onnx_runtime() -> None:
    """ONNX Runtime reads the whole file, and packs the weights for its kernels; external data is mapped."""
    assert 2.25e9 == verification_bytes(_model(10**9))


def test_bfloat16_is_compared_as_float32() -> None:
    """Its values take twice the memory in float32."""
    assert 17.5e9 == verification_bytes(_model(7 * 10**9, torch.bfloat16))


def test_this_machine_reports_its_memory() -> None:
    """The number of bytes is plausible."""
    assert 10**7 < available_bytes() < 10**15


def test_container_counts_read_files_as_free(tmp_path: Path) -> None:
    """The memory of a container's file cache counts as free; without a limit the result is None."""
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 300\nfile 600\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="ascii")
    assert 700 == _container_available(tmp_path)
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert _container_available(tmp_path) is None
    assert _container_available(tmp_path / "nowhere") is None
