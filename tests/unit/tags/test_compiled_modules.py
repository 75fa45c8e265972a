"""Replacement of compiled modules by the wrapped modules."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from winml.modelkit.tags.torch_modules import suspend_compilation, unwrap_compiled


def compiled(module: nn.Module) -> nn.Module:
    """Return a compiled module; compilation happens in the first call."""
    return cast("nn.Module", torch.compile(module, backend="eager"))


def test_compiled_module_represents_its_original() -> None:
    """A module that was not compiled is returned unchanged, even with a child of the same name."""
    plain = nn.Linear(2, 2)
    assert plain is unwrap_compiled(compiled(plain))
    assert plain is unwrap_compiled(plain)
    holder = nn.Module()
    holder.add_module("_orig_mod", plain)
    assert holder is unwrap_compiled(holder)


def test_compiled_parts_are_put_back_after_an_error() -> None:
    """Names are the user's inside the block, with no compiled module; afterwards the model is unchanged."""
    part, called = compiled(nn.Linear(2, 2)), nn.Linear(2, 2)
    called.compile(backend="eager")
    model = nn.ModuleDict({"part": part, "called": called})
    before = called._compiled_call_impl

    def fail_inside() -> None:
        with suspend_compilation(model):
            assert ["", "part", "called"] == [name for name, _ in model.named_modules()]
            assert [None, None, None] == [cast("Any", module)._compiled_call_impl for module in model.modules()]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert model["part"] is part
    assert called._compiled_call_impl is before is not None
    assert "_compiled_call_impl" not in vars(model)
