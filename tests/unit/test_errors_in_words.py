"""Errors of the Python functions, in the words of Python."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from winml.modelkit import (
    ConfigError,
    UsageError,
    WinMLExportConfig,
    build_hf_model,
    export_pytorch,
    optimize_onnx,
    tune_model,
)
from winml.modelkit.builds.build import BuildListener
from winml.modelkit.cli._endings import exit_status
from winml.modelkit.compare.verification.streamed_reference import run_in_lock_step
from winml.modelkit.errors import missing_name, spell, spell_options
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.python_functions import python_function


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"opset": 3}, "WinMLExportConfig: unknown key 'opset'; did you mean 'opset_version'?"),
        ({"opset_version": 3}, "opset_version: Input should be greater than or equal to 11 (got 3)"),
        ({"output_tensors": 3}, "output_tensors: Input should be a valid tuple"),
    ],
)
def test_config_with_a_wrong_value_is_refused_in_one_sentence(values: dict[str, Any], words: str) -> None:
    """The command refuses the config with the same sentence."""
    with pytest.raises(ConfigError) as caught:
        WinMLExportConfig(**values)
    assert words in caught.value.message


def test_invalid_model_is_refused_and_a_path_is_accepted() -> None:
    """A function that takes a model accepts a path and refuses None."""
    with pytest.raises(UsageError, match="model is of type NoneType, expected text or a path"):
        build_hf_model(None)  # type: ignore[arg-type]
    assert str(Path("folder") / "model") == ModelRequest(Path("folder") / "model").model  # type: ignore[arg-type]


def test_error_names_the_python_keyword(tmp_path: Path) -> None:
    """The message does not name an option of a command."""
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(UsageError, match=r"^dtype does not apply to"):
        build_hf_model(str(tmp_path / "model.onnx"), tmp_path / "out", dtype="fp16")
    config = WinMLExportConfig(dynamic_axes={"inputs": {0: "batch"}})
    with pytest.raises(UsageError, match=r"^dynamic_axes: the model has no input 'inputs'"):
        export_pytorch(torch.nn.Linear(2, 2), tmp_path / "m.onnx", torch.zeros(1, 2), config=config)


def test_ineffective_config_keys_are_reported_to_the_listener(tmp_path: Path) -> None:
    """The command prints the same note on stderr."""
    told: list[str] = []
    config = {"export": {"dynamo": False}, "loader": {"model_type": "bert"}}
    with pytest.raises(UsageError):
        build_hf_model("missing/folder/", tmp_path / "out", config=config, listener=BuildListener(tell=told.append))
    assert ["note: loader.model_type bert: ignored, the checkpoint determines it"] == told


def test_option_is_spelled_as_a_flag_a_key_or_a_keyword() -> None:
    """The innermost names apply; a public function called by a command, or within a section, spells as its caller."""
    spelled = python_function()(lambda: [spell(option) for option in ("min_sqnr", "no_verify", "eval.dataset")])
    assert ["--min-sqnr", "--no-verify"] == [spell("min_sqnr"), spell("no_verify")]
    assert ["min_sqnr_db", "verify=False", "eval.dataset"] == spelled()
    with spell_options({"min_sqnr": "quant.min_sqnr_db"}):
        assert ["quant.min_sqnr_db", "--no-verify", "eval.dataset"] == spelled()
        with spell_options({"no_verify": f"{spell('no_verify')} or nothing"}):
            assert ["quant.min_sqnr_db", "--no-verify or nothing"] == spelled()[:2]
    assert "--min-sqnr" == spell("min_sqnr")


def test_python_function_uses_its_own_keywords(tmp_path: Path) -> None:
    """The opset is ``opset_version`` of an export and ``opset`` of an optimization; sizes are ``sizes`` of a tuning."""
    model = tmp_path / "model.onnx"
    model.touch()
    with pytest.raises(UsageError, match=r"^module.*: opset converts the whole graph"):
        optimize_onnx(model, tmp_path / "out.onnx", opset=18, module=["encoder"])
    with pytest.raises(UsageError, match=r"^sizes: input_data "):
        tune_model(model, tmp_path / "out", sizes={"batch": 2}, input_data=str(tmp_path / "x.npz"))


def test_thread_of_a_streamed_reference_spells_as_its_caller() -> None:
    """A thread begins without the context of the thread that starts it."""
    with spell_options({"input_specs": "export.input_tensors"}):
        assert ["export.input_tensors"] == run_in_lock_step([lambda _: spell("input_specs")], lambda _: [])


def test_missing_key_of_an_object_is_no_version_error() -> None:
    """A key that a config or a module lacks may be an error of ours; an attribute that a library lacks is not."""
    in_ours = {"__name__": "winml.modelkit.models.somewhere", "layer": torch.nn.Linear(1, 1), "library": torch.jit}
    for code, words in (
        ("layer.no_such", ""),
        ("library.no_such", f"torch {torch.__version__} has no torch.jit.no_such"),
    ):
        with pytest.raises(AttributeError) as caught:
            eval(code, in_ours)
        assert words == missing_name(caught.value)


def test_name_missing_in_a_library_is_reported_with_the_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer torch may have moved a name that our module imports; the module is imported anew."""
    module = "winml.modelkit.inspect.model_inspection"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(importlib.import_module("torch._subclasses.fake_tensor"), "FakeTensorMode")
    assert 1 == exit_status(lambda: importlib.import_module(module), debug=False)
    words = capsys.readouterr().err.splitlines()
    moved = f"torch {torch.__version__} has no torch._subclasses.fake_tensor.FakeTensorMode"
    assert words[0].startswith(f"error: {moved}, ")
    assert words[1].startswith("Install another version of torch (")
    assert "torch>=2.1" in words[1]
    assert "ONNX" in words[1]
