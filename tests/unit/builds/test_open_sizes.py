"""Choice of dynamic sizes: trials, the remembered choice, and the error if no choice builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winml.modelkit.builds.build_model import build_in_cache, to_build_config
from winml.modelkit.builds.manifest_records import BuildResult
from winml.modelkit.builds.open_sizes import build_most_open, build_with_open_sizes
from winml.modelkit.builds.plan import BuildPlan, plan_build
from winml.modelkit.errors import ModelPathError, VerificationError, WinMLError
from winml.modelkit.models.request import ModelRequest

_NET = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        if {broken}:
            raise RuntimeError("no answer today")
        return torch.relu(x.reshape(2, 4))

def net():
    return Net()

def example_inputs():
    return torch.ones(2, 4)
"""
_LINEAR = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())

def example_inputs():
    return torch.ones(2, 64)
"""
_CONFIG = {"optim": None, "quant": None, "compile": None}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cache."""
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_failing_remembered_choice_is_dropped(place: Path) -> None:
    """The note may be outdated: the other choices are tried, and the choice that works is stored."""
    (place / "nets.py").write_text(_NET.format(broken=False), encoding="utf-8")
    request = ModelRequest(f"{place / 'nets.py'}:net")
    build_with_open_sizes(request, _CONFIG)
    (note,) = (place / "cache" / "open_sizes").iterdir()
    taken = json.loads(note.read_text(encoding="utf-8"))
    refused = {"dynamic_batch": True, "dynamic_sequence": True}
    assert refused != taken  # the model takes two rows only
    note.write_text(json.dumps(refused), encoding="utf-8")
    build_with_open_sizes(request, _CONFIG)
    assert taken == json.loads(note.read_text(encoding="utf-8"))


def test_error_of_the_model_is_raised_if_no_choice_builds(place: Path) -> None:
    """The error is that of the model, whichever choice was remembered."""
    (place / "nets.py").write_text(_NET.format(broken=True), encoding="utf-8")
    with pytest.raises(WinMLError, match="no answer today"):
        build_with_open_sizes(ModelRequest(f"{place / 'nets.py'}:net"), _CONFIG)


def test_result_below_its_minimum_sqnr_is_not_exported_at_other_sizes(place: Path) -> None:
    """Fewer dynamic sizes do not improve the SQNR."""
    (place / "nets.py").write_text(_LINEAR, encoding="utf-8")
    config = {"optim": None, "quant": {"precision": "int4", "min_sqnr_db": 150}, "compile": None}
    tried: list[BuildPlan] = []

    def build(plan: BuildPlan) -> BuildResult:
        tried.append(plan)
        return build_in_cache(plan)

    plan = plan_build(to_build_config(config), ModelRequest(f"{place / 'nets.py'}:net"))
    with pytest.raises(VerificationError, match="150 dB") as caught:
        build_most_open(plan, build)
    assert (True, False) == (caught.value.is_quality, caught.value.is_graph_wrong)
    # The model has no sequence, so the first choice was refused by name.
    exports = [plan.config.export for plan in tried]
    asked = [(export.dynamic_batch, export.dynamic_sequence) for export in exports if export is not None]
    assert [(True, True), (True, False)] == asked


def test_missing_model_is_reported_at_once(place: Path) -> None:
    """A missing model is no reason to try other sizes."""
    with pytest.raises(ModelPathError, match="missing"):
        build_with_open_sizes(ModelRequest(str(place / "missing" / "config.json")), _CONFIG)
