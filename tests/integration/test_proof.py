"""Proof of a model: recorded with PyTorch, replayed on variants of the file, with errors planted by module."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import yaml
from onnx import numpy_helper
from safetensors.numpy import load_file
from torch import nn

from architecture.sources import REPOSITORY
from checkpoints import save_checkpoint
from e2e.in_process import run_here
from evaluation_checkpoints import save_task_checkpoint, text_tokenizer
from two_parts import export_loaded, two_parts
from winml.modelkit import build_model, export_model, optimize_model, quantize_model, verify_model
from winml.modelkit.builds import proofs
from winml.modelkit.builds.config import CompileSection
from winml.modelkit.compare.proof import upgrade
from winml.modelkit.compare.proof.excerpts import choose_excerpt, take_excerpt
from winml.modelkit.compare.proof.execution import ExecutedModule, RunTimes
from winml.modelkit.compare.proof.records import ProofOutput, ProofRequest, read_proof
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compare.records import ProofReplay
from winml.modelkit.errors import InputError, UsageError, VerificationError
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.metadata_keys import MODULE_KEY
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.execution_providers import find_execution_provider
from winml.modelkit.words import size_words

LAYERS = 6
WIDTH = 16


class Mix(nn.Module):
    """Mixes channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Gate(nn.Module):
    """Scales channels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + x.mean(-1, keepdim=True)


class Layer(nn.Module):
    """Two modules, and a sum with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = Mix(), Gate()
        self.share = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(self.mix(x)) * self.share


class Net(nn.Module):
    """A model of 20 modules with weights of their own, except the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Mix(), Mix()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLACES = [
    "embed", "head",
    *(f"layers.{number}{inner}" for number in range(LAYERS) for inner in ("", ".mix", ".gate")),
]  # fmt: skip


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an export and its proof."""
    folder: Path = tmp_path_factory.mktemp("proven")
    export_model(_net(), folder / "net.onnx", torch.randn(2, 5, WIDTH), proof=True)
    return folder


def _planted(source: Path, target: Path, place: str, factor: float = 1.3) -> Path:
    """Write a copy of a model with one wrong weight of a module."""
    model = onnx.load(source)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [
        node
        for node in model.graph.node
        if {entry.key: entry.value for entry in node.metadata_props}.get(MODULE_KEY) == place
    ]
    weight = next(weights[name] for node in nodes for name in node.input if name in weights)
    values = numpy_helper.to_array(weight) * np.float32(factor)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, target)
    return target


def test_untouched_file_is_within_its_limits(proven: Path) -> None:
    result = verify_model(proven, by_module=True)
    assert result.is_within
    assert result.first_divergence is None
    assert result.worst.fidelity.sqnr_db > 100
    assert {*PLACES} <= {module.identity.module for module in result.modules or () if module.fidelity is not None}


@pytest.mark.parametrize("place", PLACES)
def test_planted_error_is_named_by_module(proven: Path, tmp_path: Path, place: str) -> None:
    result = verify_model(proven, against=_planted(proven / "net.onnx", tmp_path / "wrong.onnx", place))
    assert not result.is_within
    assert result.first_divergence is not None
    assert place == result.first_divergence.identity.module


def _optimize(source: Path, target: Path) -> None:
    optimize_model(source, target, level="full")


def _quantize(source: Path, target: Path) -> None:
    quantize_model(source, target, precision="int8", verify=False)


def _slim(source: Path, target: Path) -> None:
    import onnxslim

    onnxslim.slim(str(source), str(target))


def _simplify(source: Path, target: Path) -> None:
    onnxsim = pytest.importorskip("onnxsim", reason="onnxsim needs Python 3.11")
    onnx.save(onnxsim.simplify(onnx.load(source))[0], target)


@pytest.mark.parametrize("transform", [_optimize, _quantize, _slim, _simplify])
def test_transformed_file_is_within_its_limits_and_a_planted_error_is_named(
    proven: Path, tmp_path: Path, transform: Callable[[Path, Path], None]
) -> None:
    place = "layers.3.mix"
    transform(proven / "net.onnx", tmp_path / "right.onnx")
    assert verify_model(proven, against=tmp_path / "right.onnx").is_within
    transform(_planted(proven / "net.onnx", tmp_path / "wrong.onnx", place), tmp_path / "result.onnx")
    result = verify_model(proven, against=tmp_path / "result.onnx", min_sqnr_db=30)
    assert not result.is_within
    assert result.first_divergence is not None
    assert place == result.first_divergence.identity.module


def test_proof_is_deterministic_apart_from_the_time_and_names_no_path(proven: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(2, 5, WIDTH)
    records = []
    for name in ("first", "second"):
        export_model(_net(), tmp_path / name / "net.onnx", inputs, proof=True)
        records.append(json.loads((tmp_path / name / "proof/proof.json").read_text(encoding="utf-8")))
    for record in records:
        assert record["parts"][0].pop("run_ms") > 0
    assert records[0] == records[1]
    first, second = ((tmp_path / name / "proof/proof.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    assert str(tmp_path) not in json.dumps(records[0])
    assert not records[0]["user_data"]


def test_proof_of_a_damaged_tokenizer_names_no_path(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("bert", tmp_path / "bert")
    (checkpoint / "tokenizer.json").write_text("{", encoding="utf-8")
    done = run_here("export", "-m", checkpoint, "-o", tmp_path / "out/model.onnx", "--proof", "--no-verify")
    assert 0 == done.code, done.err
    text = (tmp_path / "out/proof/proof.json").read_text(encoding="utf-8")
    assert "random" == json.loads(text)["parts"][0]["samples"]["source"]
    assert tmp_path.name not in text


def test_scores_of_pixels_are_not_judged_by_their_last_axis(tmp_path: Path) -> None:
    """The recorded excerpt of a large output of rank 4 is compared as the whole output is."""

    class Segmenter(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": super().forward(input)}

    export_model(Segmenter(1, 32, 1), tmp_path / "net.onnx", torch.randn(1, 1, 96, 96), proof=True)
    (output,) = verify_model(tmp_path).outputs
    assert output.fidelity.sqnr_db > 100
    assert output.fidelity.top1_agreement is None


def test_every_key_of_a_proof_is_documented(proven: Path) -> None:
    record = json.loads((proven / "proof/proof.json").read_text(encoding="utf-8"))
    part = record["parts"][0]
    boundaries = [module["boundary"] for module in part["modules"]]
    identities = [boundary["identity"] for boundary in boundaries]
    nested = [*part["outputs"], *part["modules"], *boundaries, *identities, *part["tensors"].values(), part["samples"]]
    keys = {*record, *part, *(key for entry in nested for key in entry)}
    section = (REPOSITORY / "docs/reference/formats.md").read_text(encoding="utf-8").partition("\n## Proof\n")[2]
    documented = set(re.findall(r"`(\w+)`", section.partition("\n## ")[0]))
    assert set() == keys - documented


def test_inputs_of_the_user_are_stored_only_if_named(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=array)
    export_model(
        _net(), tmp_path / "net.onnx", torch.randn(2, 5, WIDTH), proof=True, proof_inputs=tmp_path / "mine.npz"
    )
    record = json.loads((tmp_path / "proof/proof.json").read_text(encoding="utf-8"))
    assert record["user_data"]
    assert "mine.npz" == record["parts"][0]["samples"]["data"]
    assert np.array_equal(array, load_file(tmp_path / "proof/proof.safetensors")["model/inputs/0/x"])


def test_difference_in_other_samples_is_not_blamed_on_a_module(tmp_path: Path) -> None:
    """Values of modules are recorded of the first sample, which does not read the wrong row of the table."""
    torch.manual_seed(0)
    (tmp_path / "mine").mkdir()
    for number, ids in enumerate(([[0, 1]], [[2, 3]])):
        np.savez(tmp_path / "mine" / f"{number}.npz", input=np.array(ids))
    net, ids = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8)).eval(), torch.tensor([[0, 1]])
    export_model(net, tmp_path / "net.onnx", ids, proof=True, proof_inputs=tmp_path / "mine")
    model = onnx.load(tmp_path / "net.onnx")
    (table,) = (tensor for tensor in model.graph.initializer if list(tensor.dims) == [4, 8])
    for row, is_shown in ((3, False), (1, True)):
        rows = onnx.numpy_helper.to_array(table).copy()
        rows[row] += 1
        (index,) = (place for place, tensor in enumerate(model.graph.initializer) if tensor.name == table.name)
        planted = copy.deepcopy(model)
        planted.graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(rows, table.name))
        onnx.save(planted, tmp_path / "net.onnx")
        result = verify_model(tmp_path / "net.onnx")
        assert not result.is_within
        assert isinstance(result, ProofReplay)
        assert result.is_loss_hidden is not is_shown
        assert (result.first_divergence is not None) is is_shown
        assert is_shown is any("begins in 0" in note for note in result.notes)


def test_proof_inputs_without_a_proof_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").touch()
    with pytest.raises(UsageError):
        export_model(_net(), tmp_path / "net.onnx", torch.randn(2, 5, WIDTH), proof_inputs=tmp_path / "mine.npz")


def test_command_ends_with_3_for_a_wrong_file_and_reports_it_to_ci(
    proven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    wrong = _planted(proven / "net.onnx", tmp_path / "wrong.onnx", "layers.2.gate")
    done = run_here("verify", proven, "--against", wrong, "--junit", tmp_path / "verify.xml", "-f", "json")
    assert 3 == done.code
    record = json.loads(done.out)
    assert not record["is_within"]
    assert "layers.2.gate" == record["first_divergence"]["module"]
    assert not record["recorded"]["is_same_file"]
    suite = ET.parse(tmp_path / "verify.xml").getroot()
    failed = {case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None}
    assert {record["outputs"][0]["name"], "layers.2.gate"} == failed
    assert str(len(failed)) == suite.get("failures")
    (annotation,) = [line for line in done.err.splitlines() if line.startswith("::error ")]
    assert "layers.2.gate" in annotation


@pytest.fixture(scope="module")
def before(proven: Path) -> dict[str, Any]:
    """The JSON of a verification, as another environment keeps it."""
    done = run_here("verify", proven, "-f", "json")
    assert 0 == done.code, done.err
    record: dict[str, Any] = json.loads(done.out)
    return record


def _check_upgrade(proven: Path, folder: Path, before: dict[str, Any], *options: str | Path) -> tuple[int, Any, str]:
    """Verify with a baseline; return the exit code, the JSON, and stderr."""
    (folder / "before.json").write_text(json.dumps(before), encoding="utf-8")
    done = run_here("verify", proven, "--baseline", folder / "before.json", "-f", "json", *options)
    return done.code, json.loads(done.out) if done.out else None, done.err


def test_result_lists_nodes_and_kernels_by_module_and_no_path(proven: Path, before: dict[str, Any]) -> None:
    """The nodes of all modules are those of the file; the product and the activation of a module are its kernels."""
    modules = {module["module"]: module for module in before["execution"]}
    assert str(proven.parent) not in json.dumps(before)
    assert {*PLACES} <= {*modules}
    assert {"MatMul": 1, "Tanh": 1} == modules["layers.1.mix"]["nodes"]
    assert {"CPUExecutionProvider": {"MatMul": 1, "Tanh": 1}} == modules["layers.1.mix"]["kernels"]


def test_upgrade_without_a_change_differs_in_no_version_kernel_or_error(
    proven: Path, tmp_path: Path, before: dict[str, Any]
) -> None:
    code, record, _ = _check_upgrade(proven, tmp_path, before)
    assert 0 == code
    upgrade = record["upgrade"]
    assert ({}, "yes", "yes") == (upgrade["versions"], upgrade["quality"]["answer"], upgrade["placement"]["answer"])
    measures = ("kernels", "nodes", "providers", "own_error")
    assert [] == [module for module in upgrade["modules"] if any(module[measure] for measure in measures)]
    assert [] == record["notes"]


def test_upgrade_names_versions_and_modules_that_fuse_otherwise(
    proven: Path, tmp_path: Path, before: dict[str, Any]
) -> None:
    """Other kernels alone are no loss."""
    other = copy.deepcopy(before)
    other["versions"]["onnxruntime"] = "1.0"
    place = next(module for module in other["execution"] if "layers.1.mix" == module["module"])
    place["kernels"] = {"CPUExecutionProvider": {"FusedMatMulTanh": 1}}
    code, record, _ = _check_upgrade(proven, tmp_path, other)
    assert 0 == code
    assert ["1.0", before["versions"]["onnxruntime"]] == record["upgrade"]["versions"]["onnxruntime"]
    (module,) = [module for module in record["upgrade"]["modules"] if module["kernels"]]
    assert "layers.1.mix" == module["module"]
    assert {"FusedMatMulTanh": [1, 0], "MatMul": [0, 1], "Tanh": [0, 1]} == module["kernels"]


def test_upgrade_names_a_module_that_returns_nan(proven: Path, tmp_path: Path, before: dict[str, Any]) -> None:
    wrong = _planted(proven / "net.onnx", tmp_path / "net.onnx", "layers.2.gate", math.nan)
    junit = tmp_path / "verify.xml"
    code, record, _ = _check_upgrade(proven, tmp_path, before, "--against", wrong, "--junit", junit)
    assert 3 == code
    changed = [module["module"] for module in record["upgrade"]["modules"] if module["own_error"]]
    assert "layers.2.gate" == changed[0]
    (errors,) = [case for case in ET.parse(junit).iter("testcase") if "errors" == case.get("name")]
    failure = errors.find("failure")
    assert failure is not None
    assert "layers.2.gate" in failure.get("message", "")
    words = record["upgrade"]["quality"]["reason"] + " ".join(record["notes"])
    assert "NaN" in words
    assert "-200" not in words


def test_upgrade_with_more_error_ends_with_3_and_names_the_module(
    proven: Path, tmp_path: Path, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within the limits: a rebuilt file is compared with the proof of the first."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    wrong = _planted(proven / "net.onnx", tmp_path / "wrong.onnx", "layers.2.gate")
    options = ("--against", wrong, "--min-sqnr", "0", "--junit", tmp_path / "verify.xml")
    code, record, printed = _check_upgrade(proven, tmp_path, before, *options)
    assert (3, True) == (code, record["is_within"])
    assert "no" == record["upgrade"]["quality"]["answer"]
    assert any("another file" in note for note in record["notes"])
    grown = [
        (module["own_error"][1], module["module"]) for module in record["upgrade"]["modules"] if module["own_error"]
    ]
    assert "layers.2.gate" == max(grown)[1]
    (annotation,) = [line for line in printed.splitlines() if line.startswith("::error ")]
    assert "differ: layers.2.gate" in annotation
    failed = {
        (case.get("classname"), case.get("name"))
        for case in ET.parse(tmp_path / "verify.xml").getroot().iter("testcase")
        if case.find("failure") is not None
    }
    assert ("upgrade", "errors") in failed


def test_nodes_that_left_the_provider_end_with_3(
    proven: Path, tmp_path: Path, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured kernels are of this machine's provider, so the present ones are changed."""
    kernels = proofs.measure_execution

    def measure(*arguments: Any) -> tuple[ExecutedModule, ...]:
        *modules, last = kernels(*arguments)
        return (*modules, last.model_copy(update={"kernels": {"OtherExecutionProvider": {"Tanh": 1}}}))

    monkeypatch.setattr(proofs, "measure_execution", measure)
    code, record, _ = _check_upgrade(proven, tmp_path, before)
    assert (3, "no") == (code, record["upgrade"]["placement"]["answer"])
    (module,) = [module for module in record["upgrade"]["modules"] if module["providers"]]
    assert [0, 1] == module["providers"]["OtherExecutionProvider"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"recorded": {"sha256": "0"}}, 2),
        ({"recorded": None}, 2),
        ({"provider": "QNNExecutionProvider"}, 2),
        ({"schema_version": 2}, 1),
        ({"outputs": [{"sqnr_db": "much"}]}, 1),
    ],
)
def test_baseline_of_another_build_provider_or_format_is_refused(
    proven: Path, tmp_path: Path, before: dict[str, Any], change: dict[str, Any], code: int
) -> None:
    assert code == _check_upgrade(proven, tmp_path, {**before, **change})[0]


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 1', '{"schema_version": 1}'])
def test_damaged_baseline_is_an_input_error(proven: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "before.json").write_text(text, encoding="utf-8")
    assert 1 == run_here("verify", proven, "--baseline", tmp_path / "before.json").code
    assert 2 == run_here("verify", proven, "--baseline", tmp_path / "missing.json").code


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((1.0, 1.02), (1.8, 1.9), "slower"), ((1.8, 1.9), (1.0, 1.02), "faster"),
        ((1.0, 1.02), (1.5, 1.55), "no difference found"), ((1.0, 2.0), (1.2, 1.3), None),
        ((1.0, 2.0), (3.0, 3.1), "slower"),
    ],
)  # fmt: skip
def test_time_differs_beyond_the_load_of_both_machines(
    before: tuple[float, float], after: tuple[float, float], expected: str | None
) -> None:
    times = [RunTimes(fastest_ms=fastest, median_ms=median, runs=9) for fastest, median in (before, after)]
    assert expected == upgrade._compare_times(*times)
    assert upgrade._compare_times(times[0], times[1].model_copy(update={"other_load": 0.5})) is None


def _run_step(name: str, folder: Path) -> int:
    """Run the commands of a step of the example workflow as GitHub Actions does, and return the exit code."""
    workflow = yaml.safe_load((REPOSITORY / "examples/ci/upgrade.yml").read_text(encoding="utf-8"))
    (step,) = [step for step in workflow["jobs"]["verify"]["steps"] if step.get("name") == name]
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    environment = {**os.environ, **workflow["env"], "GITHUB_ACTIONS": "true"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


@pytest.mark.skipif(
    sys.platform == "win32" or not (REPOSITORY / "examples").is_dir(),
    reason="the steps are for a POSIX shell, and the example is not part of an installed package",
)
def test_example_workflow_verifies_in_both_environments(proven: Path, tmp_path: Path) -> None:
    """The steps after the installation; both environments are that of the tests."""
    shutil.copytree(proven, tmp_path / "models/built")
    for name in ("before", "after"):
        command = tmp_path / name / "bin/winml"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m winml.modelkit "$@"\n', encoding="utf-8")
        command.chmod(0o755)
    assert 0 == _run_step("Verify with the versions of the base branch", tmp_path)
    assert 0 == _run_step("Compare with the versions of the pull request", tmp_path)
    assert "yes" == json.loads((tmp_path / "after.json").read_text(encoding="utf-8"))["upgrade"]["quality"]["answer"]
    assert ET.parse(tmp_path / "upgrade.xml").getroot().get("failures") == "0"


def test_changed_file_within_its_limits_is_noted_with_the_module(proven: Path, tmp_path: Path) -> None:
    """A file of the recorded name whose weights were edited."""
    shutil.copytree(proven, tmp_path / "edited")
    _planted(proven / "net.onnx", tmp_path / "edited/net.onnx", "layers.4.mix")
    result = verify_model(tmp_path / "edited", min_sqnr_db=0)
    assert result.is_within
    assert "layers.4.mix" == result.origin_of_loss.identity.module
    assert any("layers.4.mix" in note for note in result.notes)


def test_command_ends_with_0_for_the_recorded_file(proven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    done = run_here("verify", proven / "net.onnx", "-f", "json")
    assert 0 == done.code
    assert json.loads(done.out)["recorded"]["is_same_file"]
    assert "::error" not in done.err


def test_quiet_command_prints_errors_only(proven: Path, tmp_path: Path) -> None:
    """The exit code answers; the reason of a refusal is an error."""
    done = run_here("verify", proven, "-q")
    assert (0, "") == (done.code, done.out)
    wrong = _planted(proven / "net.onnx", tmp_path / "wrong.onnx", "layers.2.gate")
    done = run_here("verify", proven, "--against", wrong, "-q")
    assert (3, "") == (done.code, done.out)
    assert " dB" in done.err


def test_parts_are_compared_and_reported_apart(tmp_path: Path) -> None:
    """A part without a counterpart is refused unless the others are requested alone."""
    both, one, report = tmp_path / "both", tmp_path / "one/net_encoder.onnx", tmp_path / "verify.xml"
    export_loaded(HTPExporter(proof=ProofRequest()), two_parts(), both / "net.onnx")
    assert 0 == run_here("verify", both, "--by-module", "--junit", report).code
    cases = [(case.get("classname"), case.get("name")) for case in ET.parse(report).getroot().iter("testcase")]
    assert {("encoder.outputs", "states"), ("decoder.outputs", "logits")} <= {*cases}
    assert len({*cases}) == len(cases)
    one.parent.mkdir()
    one.write_bytes((both / "net_encoder.onnx").read_bytes())
    refused = run_here("verify", both, "--against", one)
    assert 2 == refused.code
    assert "--submodel encoder" in refused.err
    assert 0 == run_here("verify", both, "--against", one, "--submodel", "encoder").code


def test_verification_imports_no_model_library(proven: Path, tmp_path: Path) -> None:
    """An environment of a device has ONNX Runtime, and neither torch nor transformers."""
    wrong = _planted(proven / "net.onnx", tmp_path / "wrong.onnx", "layers.2.gate")
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'onnxscript', 'huggingface_hub')))\n"
        "from winml.modelkit.cli.main import main\n"
        "main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", program, "verify", proven, "--against", wrong, "-f", "json"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, encoding="utf-8", check=False)
    assert 3 == done.returncode, done.stderr
    assert "layers.2.gate" == json.loads(done.stdout)["first_divergence"]["module"]


def test_folder_without_a_proof_is_a_usage_error(proven: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes((proven / "net.onnx").read_bytes())
    assert 2 == run_here("verify", tmp_path).code
    assert 2 == run_here("verify", tmp_path / "missing").code


@pytest.mark.parametrize("is_cut", [True, False])
def test_damaged_proof_is_an_input_error(proven: Path, tmp_path: Path, is_cut: bool) -> None:
    """A missing end, or one other bit."""
    (tmp_path / "proof").mkdir()
    for name in ("net.onnx", "proof/proof.json", "proof/proof.safetensors"):
        (tmp_path / name).write_bytes((proven / name).read_bytes())
    tensors = tmp_path / "proof/proof.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-10] if is_cut else content[:-10] + bytes([content[-10] ^ 1]) + content[-9:])
    with pytest.raises(InputError):
        verify_model(tmp_path)


def test_model_with_other_inputs_is_refused(proven: Path, tmp_path: Path) -> None:
    class Other(nn.Module):
        def forward(self, other: torch.Tensor) -> torch.Tensor:
            return other + 1

    export_model(Other(), tmp_path / "other.onnx", torch.randn(2, 5, WIDTH))
    with pytest.raises(UsageError):
        verify_model(proven, against=tmp_path / "other.onnx")


@pytest.mark.parametrize("unread", [{"reference": nn.Identity()}, {"seed": 1}, {"sizes": {"batch_size": 2}}])
@pytest.mark.parametrize("stated", [{"min_sqnr_db": 30}, {"against": "net.onnx"}])
def test_argument_that_no_proof_reads_is_refused(proven: Path, stated: dict[str, Any], unread: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(unread))):
        verify_model(proven, **stated, **unread)


def test_file_without_its_device_may_have_a_proof_of_the_export() -> None:
    compiled = CompileSection(ep="qnn")
    device = ChosenProvider(find_execution_provider("qnn"), "npu")
    assert proofs._may_lack_device(compiled, None)
    assert proofs._may_lack_device(compiled, replace(device, stand_in="cpu"))
    assert not proofs._may_lack_device(compiled, device)
    assert not proofs._may_lack_device(CompileSection(), None), "a file of the CPU that cannot run is an error"


FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
"""


def test_build_lists_its_proof_and_records_the_deployed_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY, encoding="utf-8")
    result = build_model(
        f"{tmp_path / 'net.py'}:make",
        tmp_path / "built",
        precision="int8",
        proof=True,
        input_specs={"input": {"shape": [2, 8], "dtype": "float32"}},
    )
    proof = result.manifest.proof
    assert proof is not None
    assert {file.name for file in proof.files} <= {file.name for file in result.manifest.deploy}
    assert sum(file.size_bytes for file in proof.files if file.name.endswith("safetensors")) <= proof.limit_bytes
    (deployed,) = (line for line in result.text().splitlines() if line.startswith("deploy"))
    assert f"{len(proof.files)} proof files ({size_words(sum(file.size_bytes for file in proof.files))})" in deployed
    record = json.loads((tmp_path / "built/proof/proof.json").read_text(encoding="utf-8"))
    assert result.manifest.model[0].sha256 == record["parts"][0]["sha256"]
    replay = verify_model(tmp_path / "built")
    assert replay.is_within
    assert replay.as_record()["recorded"]["is_same_file"]
    assert verify_model(tmp_path / "built", against=tmp_path / "built/export.onnx").worst.fidelity.sqnr_db > 80


def test_quality_of_a_quantized_build_leaves_padding_out(tmp_path: Path) -> None:
    """Sentences are padded to the fixed size; the replay measures their tokens, of a float file all positions."""
    checkpoint = save_task_checkpoint(tmp_path / "bert", "bert", "BertModel", text_tokenizer())
    sizes = {"sequence_length": 32}
    build_model(checkpoint, tmp_path / "built", precision="int8", sizes=sizes, proof=True)
    arrays = load_file(tmp_path / "built/proof/proof.safetensors")
    powers = dict[str, list[float]]()
    for name in ("model", "export"):
        session = ort.InferenceSession(tmp_path / f"built/{name}.onnx")
        for number in range(4):
            feeds = {item.name: arrays[f"model/inputs/{number}/{item.name}"] for item in session.get_inputs()}
            (actual,) = session.run(["last_hidden_state"], feeds)
            expected, mask = arrays[f"model/outputs/{number}/last_hidden_state"], feeds["attention_mask"]
            assert 0 < mask.sum() < mask.size
            places = mask == 1 if name == "model" else mask >= 0
            sums = powers.setdefault(name, [0.0, 0.0])
            sums[0] += float((expected[places] ** 2).sum(dtype=np.float64))
            sums[1] += float(((expected - actual)[places] ** 2).sum(dtype=np.float64))
    for name, (signal, noise) in powers.items():
        replay = verify_model(tmp_path / "built", against=tmp_path / f"built/{name}.onnx", min_sqnr_db=0)
        (found,) = (output.fidelity for output in replay.outputs if output.fidelity.name == "last_hidden_state")
        assert 10 * np.log10(signal / noise) == pytest.approx(found.sqnr_db, abs=0.1)


def test_factory_of_other_weights_in_every_call_gives_no_proof(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY.replace("torch.manual_seed(0)", "torch.seed()"), encoding="utf-8")
    specs = {"input": {"shape": [2, 8], "dtype": "float32"}}
    with pytest.raises(VerificationError):
        build_model(f"{tmp_path / 'net.py'}:make", tmp_path / "built", proof=True, input_specs=specs)
    assert not (tmp_path / "built/proof").exists()
    assert (tmp_path / "built/model.onnx").is_file()


def test_proof_of_a_replaced_file_is_not_kept(tmp_path: Path) -> None:
    """An export or build without a proof, or whose proof cannot be made, removes the older one."""
    specs = {"input": {"shape": [2, 8], "dtype": "float32"}}
    module, inputs = nn.Linear(8, 4), torch.randn(2, 8)
    export_model(module, tmp_path / "net.onnx", inputs, proof=True)
    export_model(module, tmp_path / "other.onnx", inputs)
    assert (tmp_path / "proof/proof.json").is_file(), "it is of another file"
    export_model(module, tmp_path / "net.onnx", inputs, overwrite=True)
    assert not (tmp_path / "proof").exists()
    for text, proof in ((FACTORY, False), (FACTORY.replace("torch.manual_seed(0)", "torch.seed()"), True)):
        (tmp_path / "net.py").write_text(FACTORY, encoding="utf-8")
        build_model(f"{tmp_path / 'net.py'}:make", tmp_path / "built", proof=True, input_specs=specs)
        assert (tmp_path / "built/proof/proof.json").is_file()
        (tmp_path / "net.py").write_text(text, encoding="utf-8")
        with pytest.raises(VerificationError) if proof else contextlib.nullcontext():
            build_model(f"{tmp_path / 'net.py'}:make", tmp_path / "built", proof=proof, rebuild=True, input_specs=specs)
        assert not (tmp_path / "built/proof").exists()


@pytest.mark.parametrize(("agreement", "is_refused"), [(0.95, False), (0.1, True)])
def test_scores_that_agree_are_of_the_same_model(proven: Path, agreement: float, is_refused: bool) -> None:
    """States of a KV cache are not judged; few bits change scores more than their order."""
    part = read_proof(proven).record.parts[0]
    quality = {"sqnr_db": 1.0, "lower_db": 0.0}
    outputs = (ProofOutput(name="logits", top1_agreement=agreement, **quality), ProofOutput(name="state", **quality))
    part = part.model_copy(update={"outputs": outputs, "states": {"past": "state"}})
    with pytest.raises(VerificationError) if is_refused else contextlib.nullcontext():
        proofs._refuse_other_model("model", part, QualityMinimum(6.0, 0.85))


@pytest.mark.parametrize("error", [1e-5, 1e-2, 0.5])
def test_sketch_estimates_the_relative_error_of_the_whole_value(error: float) -> None:
    generator = np.random.default_rng(0)
    value = generator.standard_normal((64, 1024)).astype(np.float32)
    other = value + np.float32(error) * generator.standard_normal(value.shape).astype(np.float32)
    kind, stored = choose_excerpt(value, 1024, by_rows=False)
    assert ("sketch", (1024,)) == (kind, stored.shape)
    difference = take_excerpt(other, kind, stored) - stored
    assert np.linalg.norm(difference) / np.linalg.norm(stored) == pytest.approx(error, rel=0.15)


def test_rows_of_a_large_output_include_the_first_and_the_last() -> None:
    value = np.arange(40, dtype=np.float32).reshape(10, 4)
    kind, stored = choose_excerpt(value, 13, by_rows=True)
    assert "rows" == kind
    assert [0, 16, 36] == stored[:, 0].tolist()
    assert np.array_equal(stored, take_excerpt(value, kind, stored))
