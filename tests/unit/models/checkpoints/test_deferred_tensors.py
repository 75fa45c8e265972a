"""Operations on deferred tensors, compared with the same operations on values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file

from winml.modelkit.models.checkpoints.deferred_tensors import DeferredTensor, NotDeferrableError, deferred_entries
from winml.modelkit.models.checkpoints.weight_files import StoredEntry, stored_entries
from winml.modelkit.onnx.files.stored_tensors import StoredTensor

Tensors = dict[str, Any]

VALUES = {
    "a": torch.linspace(-3, 3, 24).view(4, 6),
    "b": torch.linspace(1, 2, 24).view(4, 6),
    "half": torch.linspace(-1, 1, 12).bfloat16().view(3, 4),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def deferred(tmp_path: Path) -> Tensors:
    """The tensors of VALUES, in a file."""
    save_file(VALUES, tmp_path / "model.safetensors")
    return dict(deferred_entries(stored_entries([tmp_path / "model.safetensors"])))


def test_deferred_tensors_have_shape_type_device_and_values(deferred: Tensors) -> None:
    """All of the file, each as it was saved."""
    assert set(VALUES) == set(deferred)
    for name, values in VALUES.items():
        tensor = deferred[name]
        assert (values.shape, values.dtype, values.device) == (tensor.shape, tensor.dtype, tensor.device)
        assert torch.equal(values, tensor.realized())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["a"][...],
        lambda t: torch.nn.Parameter(t["a"], requires_grad=False),
        lambda t: t["a"].to(torch.float16),
        lambda t: t["half"].to(device="cpu", dtype=torch.float32),
        lambda t: t["a"].detach().clone(),
    ],
)
def test_deferred_tensor_merely_cast_stays_a_reference(deferred: Tensors, change: Callable[[Tensors], Any]) -> None:
    """The tensor operations of from_pretrained keep a reference to the file."""
    after, expected = change(deferred), change(VALUES)
    tensor = after.by_reference("name")
    assert isinstance(tensor, StoredTensor)
    assert "name" == tensor.name
    assert (expected.dtype, expected.shape) == (after.dtype, after.shape)
    assert torch.equal(expected, after.realized())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.cat([t["a"], t["b"]], dim=1),
        lambda t: torch.stack([t["a"], t["b"]]).to(torch.bfloat16),
        lambda t: t["a"].chunk(2, dim=0)[1],
        lambda t: t["a"].split([1, 3])[1].t().contiguous(),
        lambda t: t["a"].transpose(0, 1),
        lambda t: t["a"].half().float(),
        lambda t: t["a"] * 2 + t["b"],
        lambda t: t["a"].view(2, 2, 6).permute(2, 0, 1).reshape(6, 4),
        lambda t: t["a"] + torch.ones(6),
        lambda t: torch.nn.functional.pad(t["a"], (0, 2)),
        lambda t: t["count"].to(torch.float32),
    ],
)
def test_deferred_tensor_is_computed_on_read(deferred: Tensors, change: Callable[[Tensors], Any]) -> None:
    """Merged, split, transposed, rounded twice: the same values, shape and type."""
    after, expected = change(deferred), change(VALUES)
    assert isinstance(after, DeferredTensor)
    assert (expected.dtype, expected.shape) == (after.dtype, after.shape)
    assert torch.equal(expected, after.realized())
    tensor = after.by_reference("name")
    assert isinstance(tensor, ir.LazyTensor)
    assert tuple(expected.shape) == tensor.shape.numpy()
    if expected.dtype == torch.float32:
        assert expected.tolist() == tensor.numpy().tolist()


def test_deferred_tensors_are_compared_by_their_values(deferred: Tensors) -> None:
    """The decision whether weights are tied is the same as with values."""
    assert torch.equal(deferred["a"], deferred["a"].detach())
    assert not torch.equal(deferred["a"], deferred["b"])
    assert 7 == deferred["count"].item()


@pytest.mark.parametrize("write", [lambda t: t.zero_(), lambda t: t[0].fill_(1), lambda t: t.view(24).add_(1)])
def test_writing_into_a_tensor_of_the_checkpoint_is_refused(deferred: Tensors, write: Callable[[Any], Any]) -> None:
    """A change of a tensor that is read later would be lost."""
    with pytest.raises(NotDeferrableError):
        write(deferred["a"])


def test_writing_into_a_computed_tensor_is_written_down(deferred: Tensors) -> None:
    """The memory is not shared, so the change applies to this tensor alone."""
    computed = deferred["a"] * 2
    computed.add_(deferred["b"])
    assert torch.equal(VALUES["a"] * 2 + VALUES["b"], computed.realized())
    with pytest.raises(NotDeferrableError):
        (deferred["a"] * 2)[0].zero_()


def test_element_type_missing_in_torch_is_reported(tmp_path: Path) -> None:
    """The error lets the caller load the tensor differently."""
    with pytest.raises(NotDeferrableError, match="w is f6_e2m3"):
        deferred_entries({"w": StoredEntry(tmp_path, 0, "f6_e2m3", (2,))})
