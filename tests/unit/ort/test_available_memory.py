"""The memory a process may still take is read from the system and the container."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from winml.modelkit.compare.verification.reference_run import refuse_verification_beyond_memory, verification_bytes
from winml.modelkit.errors import ExportError
from winml.modelkit.ort.host import _container_available, available_bytes


def _model(weight_bytes: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A model with so many bytes of weights, which take no memory."""
    return torch.nn.Linear(weight_bytes // dtype.itemsize, 1, bias=False, device="meta", dtype=dtype)


def test_comparison_that_does_not_fit_is_refused_with_the_way_around_it() -> None:
    """Both sizes and the option are told; what fits, or is not known, passes."""
    model = _model(14 * 10**9)
    with pytest.raises(ExportError, match=r"17.50 GB .*16.00 GB") as caught:
        refuse_verification_beyond_memory(model, 16 * 10**9)
    assert "--no-verify" in caught.value.hint
    refuse_verification_beyond_memory(model, 18 * 10**9)
    refuse_verification_beyond_memory(model, None)


def test_weights_inside_the_file_count_twice_in_onnx_runtime() -> None:
    """It reads the whole file, and packs the weights for its kernels; outside they are mapped."""
    assert 2.25e9 == verification_bytes(_model(10**9))


def test_bfloat16_is_compared_as_float32() -> None:
    """Its values take twice as much then."""
    assert 17.5e9 == verification_bytes(_model(7 * 10**9, torch.bfloat16))


def test_this_machine_has_memory() -> None:
    """The system says something plausible."""
    assert 10**7 < available_bytes() < 10**15


def test_container_counts_read_files_as_free(tmp_path: Path) -> None:
    """A limit of a container counts, without what it only caches; without a limit nothing is known."""
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
