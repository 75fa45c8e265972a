"""Dynamic sizes of a build: the default, trials, the remembered choice, and the error if no choice builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import save_checkpoint
from winml.modelkit import build_model
from winml.modelkit.builds.build import BuildListener
from winml.modelkit.builds.build_model import build_in_cache, build_plan, build_with_open_sizes, to_build_config
from winml.modelkit.builds.manifest_records import BuildResult, StageRecord
from winml.modelkit.builds.open_sizes import is_free_to_open, make_most_open
from winml.modelkit.builds.plan import BuildPlan, plan_build
from winml.modelkit.errors import ModelPathError, UsageError, VerificationError, WinMLError
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.progress import StepEvent

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


def _build(plan: BuildPlan) -> BuildResult:
    return build_plan(plan, None, rebuild=False, listener=BuildListener())


def _exported(result: BuildResult) -> StageRecord:
    stage = result.manifest.stage("export")
    assert stage is not None
    return stage


def test_build_without_sizes_has_dynamic_batch_and_sequence(place: Path, tmp_path: Path) -> None:
    """The config records them, a build from that config runs nothing, and an option fixes them."""
    checkpoint = str(save_checkpoint("bert", tmp_path / "bert"))
    result = build_model(checkpoint, place / "built", level="none")
    assert ("batch_size", "sequence_length") == _exported(result).dynamic
    config = json.loads((place / "built" / "winml_build_config.json").read_text(encoding="utf-8"))
    assert (True, True) == (config["export"]["dynamic_batch"], config["export"]["dynamic_sequence"])
    again = build_model(checkpoint, place / "built", config=config)
    assert ["reused", "reused"] == [stage.status for stage in again.manifest.stages[:2]]
    fixed = _exported(build_model(checkpoint, place / "fixed", level="none", fixed_sizes=True))
    assert () == fixed.dynamic
    assert {"dynamic_batch", "dynamic_seq_len"} == set(fixed.openable_sizes)
    with pytest.raises(UsageError, match="fixed_sizes"):
        build_model(checkpoint, place / "fixed", fixed_sizes=True, dynamic_batch=True)


@pytest.mark.parametrize(
    ("config", "is_free"),
    [
        ({}, True),
        ({"compile": {"ep": "cpu"}}, True),
        ({"compile": {"ep": "qnn"}}, False),
        ({"quant": {"precision": "auto", "device": "npu"}}, False),
        ({"export": {"dynamic_batch": False}}, False),
    ],
)
def test_target_and_config_decide_on_dynamic_sizes(place: Path, config: dict[str, object], is_free: bool) -> None:
    """A provider that requires fixed sizes gets them, and sizes in the config are used as stated."""
    (place / "nets.py").write_text(_LINEAR, encoding="utf-8")
    assert is_free == is_free_to_open(plan_build(to_build_config(config), ModelRequest(f"{place / 'nets.py'}:net")))


def test_stages_that_are_skipped_in_several_attempts_are_told_once(place: Path) -> None:
    """The first attempt has a dynamic sequence, which the model does not have."""
    pytest.importorskip("torch")
    (place / "nets.py").write_text(_LINEAR, encoding="utf-8")
    told: list[str] = []

    def on_stage(event: StepEvent) -> None:
        if event.finished is not None:
            told.append(event.name)

    with pytest.raises(UsageError, match="nothing to quantize"):
        build_model(
            f"{place / 'nets.py'}:net", place / "built", max_size="100MB", listener=BuildListener(on_stage=on_stage)
        )
    assert ["export", "optimize"] == told


def test_size_that_the_model_fixes_is_fixed_with_a_note(place: Path) -> None:
    """The build succeeds; a repeated build makes one attempt and has the same note."""
    (place / "nets.py").write_text(_NET.format(broken=False), encoding="utf-8")
    plan = plan_build(to_build_config(_CONFIG), ModelRequest(f"{place / 'nets.py'}:net"))
    result = _build(plan)
    assert () == _exported(result).dynamic
    (note,) = [line for line in result.notes if "batch_size" in line]
    assert note in _build(plan).notes


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_error_after_the_trace_is_raised_by_the_first_attempt(place: Path, precision: str) -> None:
    """A selector without a module has nothing to do with sizes; int4 is quantized in the memory of the export."""
    (place / "nets.py").write_text(_LINEAR, encoding="utf-8")
    config = {"optim": None, "quant": {"precision": precision, "exclude": ["Conv2d"]}}
    tried: list[BuildPlan] = []

    def build(plan: BuildPlan) -> BuildResult:
        tried.append(plan)
        return build_in_cache(plan)

    with pytest.raises(UsageError, match="Conv2d"):
        make_most_open(plan_build(to_build_config(config), ModelRequest(f"{place / 'nets.py'}:net")), build)
    exports = [plan.config.export for plan in tried]
    # The model has no sequence, so the first choice was refused by name.
    assert [True, False] == [export.dynamic_sequence for export in exports if export is not None]


def test_failing_remembered_choice_is_dropped(place: Path) -> None:
    """The note may be outdated: the other choices are tried, and the choice that works is stored."""
    (place / "nets.py").write_text(_NET.format(broken=False), encoding="utf-8")
    request = ModelRequest(f"{place / 'nets.py'}:net")
    build_with_open_sizes(request, _CONFIG)
    (note,) = (place / "cache" / "open_sizes").iterdir()
    taken = json.loads(note.read_text(encoding="utf-8"))
    assert {} == taken["choice"]  # the model takes two rows only
    note.write_text(json.dumps({**taken, "choice": {"dynamic_batch": True}}), encoding="utf-8")
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
        make_most_open(plan, build)
    assert (True, False) == (caught.value.is_quality, caught.value.is_graph_wrong)
    # The model has no sequence, so the first choice was refused by name.
    exports = [plan.config.export for plan in tried]
    asked = [(export.dynamic_batch, export.dynamic_sequence) for export in exports if export is not None]
    assert [(True, True), (True, False)] == asked


def test_missing_model_is_reported_at_once(place: Path) -> None:
    """A missing model is no reason to try other sizes."""
    with pytest.raises(ModelPathError, match="missing"):
        build_with_open_sizes(ModelRequest(str(place / "missing" / "config.json")), _CONFIG)
