"""Commands that a result ends with: each of them runs as it is printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import onnx
import pytest
from PIL import Image

from checkpoints import save_checkpoint, save_image_processor
from e2e.in_process import run_here
from e2e.workplace import Outcome
from module_chains import save_chain
from winml.modelkit.metadata_keys import COMPILE_KEY
from winml.modelkit.verbs.next_commands import running_command


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a file of nested modules with an outlier in one of its weights, and its int8 file."""
    monkeypatch.chdir(tmp_path)
    save_chain(tmp_path / "chain.onnx", outlier="w2")
    done = run_here("quantize", "-m", "chain.onnx", "-o", "int8.onnx", "--per-tensor", "--no-verify", "-q")
    assert 0 == done.code, done.err


def printed_next(done: Outcome) -> str:
    """Return the command of the line ``next``."""
    assert 0 == done.code, done.err
    return next(line.split(maxsplit=1)[1] for line in done.out.splitlines() if line.startswith("next "))


def run_printed(command: str, *more: str) -> Outcome:
    """Run a printed command."""
    program, *words = shlex.split(command)
    assert "winml" == program
    done = run_here(*words, *more)
    assert 0 == done.code, done.err
    return done


@pytest.mark.parametrize("minimum", ["0", "60"])
def test_weak_or_refused_quantization_leads_to_the_modules_to_keep_float(minimum: str) -> None:
    """The command has the options of the quantization, and finds the module with the outlier."""
    options = ("--mode", "qdq", "-p", "w8a8", "--per-tensor", "--min-sqnr", minimum)
    done = run_here("quantize", "-m", "chain.onnx", "-o", "qdq.onnx", *options)
    assert (0 if minimum == "0" else 3) == done.code, done.err
    printed = (done.out + done.err).partition("are found by ")[2].splitlines()[0].rstrip(".")
    assert {"--sensitivity", f"sqnr_db={max(int(minimum), 25)}", "--per-tensor"} < {*shlex.split(printed)}
    if minimum == "0":
        found = json.loads(run_printed(printed, "--format", "json").out)
        assert ["a.0"] == [name for name, precision in found["exclude_list"]["rules"].items() if precision == "fp32"]


def test_comparison_leads_to_the_module_to_keep_float() -> None:
    """Without modules, the command compares them; then the module with the outlier is excluded, with equal options."""
    by_module = printed_next(run_here("compare", "chain.onnx", "int8.onnx", "--samples", "4", "--threshold", "9"))
    assert "winml compare chain.onnx int8.onnx --samples 4 --by-module" == by_module
    mixed = printed_next(run_printed(by_module))
    assert {"--exclude", "--per-tensor"} < {*shlex.split(mixed)}
    run_printed(mixed)
    before, after = (
        json.loads(run_here("compare", "chain.onnx", name, "--format", "json").out)["outputs"][0]["sqnr_db"]
        for name in ("int8.onnx", "int8_mixed.onnx")
    )
    assert after > before


def test_error_of_several_modules_leads_to_their_ranking() -> None:
    """No module has half of the error, so the command measures each."""
    save_chain(Path("even.onnx"))
    run_printed("winml quantize -m even.onnx -o even_int8.onnx --no-verify -q")
    ranked = printed_next(run_here("compare", "even.onnx", "even_int8.onnx", "--by-module"))
    assert ["winml", "quantize", "even.onnx", "--sensitivity"] == shlex.split(ranked)[:4]
    # A quantized reference cannot be quantized again.
    run_printed("winml quantize -m even.onnx -o even_tensor.onnx --per-tensor --no-verify -q")
    assert "\nnext " not in run_here("compare", "even_int8.onnx", "even_tensor.onnx", "--by-module").out
    run_printed(ranked)


def test_comparison_of_equal_files_ends_with_no_command() -> None:
    assert json.loads(run_here("compare", "chain.onnx", "chain.onnx", "--format", "json").out)["next"] is None


def test_threshold_has_a_verdict() -> None:
    asked = ("compare", "chain.onnx", "int8.onnx", "--format", "json", "--threshold")
    met, exceeded = run_here(*asked, "2"), run_here(*asked, "1e-6")
    assert [(0, "yes"), (3, "no")] == [
        (done.code, json.loads(done.out)["verdict"]["answer"]) for done in (met, exceeded)
    ]


def test_file_for_a_provider_leads_to_a_command_of_this_provider() -> None:
    """It is measured on the provider, or described if the provider is not installed."""
    save_chain(Path("even.onnx"))
    commands = {
        "cpu": "winml perf even.onnx cpu.onnx --ep cpu",
        "vitisai": "winml inspect vitisai.onnx --ep vitisai",
    }
    for ep, command in commands.items():
        done = run_here("quantize", "even.onnx", "-o", f"{ep}.onnx", "-p", "w8a8", "--mode", "qdq", "--ep", ep)
        assert command == printed_next(done)


def test_files_lead_from_an_export_to_the_module_with_the_error(tmp_path: Path) -> None:
    """An export is optimized, an optimized or closely quantized file is measured, another one compared by module."""
    checkpoint = save_checkpoint("bert", tmp_path / "checkpoint", num_hidden_layers=1)
    optimizing = printed_next(run_here("export", "-m", checkpoint, "-o", "model.onnx", "--no-verify"))
    measuring = printed_next(run_printed(optimizing))
    assert f"winml perf model.onnx {Path(shlex.split(optimizing)[4]).name}" == measuring
    run_printed(measuring, "--iterations", "2")
    close = run_here("quantize", "model.onnx", "-o", "int8.onnx", "--overwrite")
    assert "winml perf model.onnx int8.onnx" == printed_next(close)
    far = printed_next(run_here("quantize", "chain.onnx", "-o", "far.onnx", "--per-tensor", "--min-sqnr", "1"))
    assert "winml compare chain.onnx far.onnx --by-module" == far
    assert "winml quantize chain.onnx" in printed_next(run_printed(far))


def test_measurement_of_a_plain_export_leads_to_its_fusions(tmp_path: Path) -> None:
    """An optimized file ends with no command."""
    checkpoint = save_checkpoint("bert", tmp_path / "checkpoint", num_hidden_layers=1)
    exported = run_here("export", "-m", checkpoint, "-o", "model.onnx", "--no-verify", "-q")
    assert 0 == exported.code, exported.err
    command = printed_next(run_here("perf", "model.onnx", "--iterations", "2"))
    by_module = run_here("perf", "model.onnx", "--by-module", "--iterations", "2")
    assert command == printed_next(by_module)
    assert "at --level full" in by_module.out
    run_printed(command, "--no-verify")
    assert "\nnext " not in run_here("perf", "model_full.onnx", "--iterations", "2").out


def test_command_that_runs_a_model_has_the_given_provider(tmp_path: Path) -> None:
    """The provider follows the folder, before the inputs of the task; the command runs."""
    checkpoint = save_checkpoint("resnet", tmp_path / "checkpoint")
    save_image_processor(checkpoint, 32)
    done = run_here("export", checkpoint, "-o", "exported/model.onnx", "--no-verify", "-q")
    assert 0 == done.code, done.err
    command = running_command(Path("exported"), {"model": Path("exported/model.onnx")}, ["--ep", "cpu"])
    words = shlex.split(command)
    assert ["winml", "run", "exported", "--ep", "cpu", "--image"] == words[:6]
    Image.new("RGB", (32, 32)).save(words[6])
    run_printed(command)


def test_parts_with_shared_weights_that_a_simulator_compiled_are_described(tmp_path: Path) -> None:
    """Only a device opens them."""
    model = onnx.load("chain.onnx")
    record = {"provider": "QNNExecutionProvider", "shares_weights": True, "simulated_on": "cpu"}
    model.metadata_props.add(key=COMPILE_KEY, value=json.dumps(record))
    onnx.save(model, tmp_path / "shared.onnx")
    command = running_command(tmp_path, {"prompt": tmp_path / "shared.onnx", "decoder": tmp_path / "shared.onnx"})
    assert ["winml", "inspect", str(tmp_path)] == shlex.split(command)
