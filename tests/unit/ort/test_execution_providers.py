"""Names of execution providers, and dynamic dimensions for providers that need fixed sizes."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.ort.execution_providers import (
    EXECUTION_PROVIDERS,
    LIBRARY_VARIABLE,
    find_execution_provider,
    refuse_dynamic,
)
from winml.modelkit.verbs.next_commands import measuring_command
from winml.modelkit.words import command_line


@pytest.mark.parametrize("name", ["qnn", "QNN", "QNNExecutionProvider"])
def test_provider_has_both_names(name: str) -> None:
    """The short name and ONNX Runtime's own name are equivalent."""
    assert "QNNExecutionProvider" == find_execution_provider(name).name


def test_unknown_provider_is_refused_with_the_nearest() -> None:
    """A typo gets a suggestion."""
    with pytest.raises(UsageError, match=r"--ep openvno: (.|\n)*'openvino'"):
        find_execution_provider("openvno")


def test_provider_with_fixed_sizes_refuses_open_sizes_unless_allowed() -> None:
    """QNN needs fixed sizes; the message names the option that allows dynamic ones."""
    with pytest.raises(UsageError, match=r"QNNExecutionProvider requires fixed sizes(.|\n)*--allow-dynamic"):
        refuse_dynamic("qnn", is_dynamic=True, allow_dynamic=False)
    refuse_dynamic("qnn", is_dynamic=True, allow_dynamic=True)
    refuse_dynamic("qnn", is_dynamic=False, allow_dynamic=False)
    refuse_dynamic("cpu", is_dynamic=True, allow_dynamic=False)
    refuse_dynamic(None, is_dynamic=True, allow_dynamic=False)


def test_provider_table_has_the_names_of_onnx_runtime() -> None:
    """Every provider of the table is one of ONNX Runtime's, on any platform."""
    known = {provider.name for provider in EXECUTION_PROVIDERS.values()}
    assert known <= set(ort.get_all_providers()) | {"NvTensorRTRTXExecutionProvider"}


def test_recommended_command_repeats_the_library_of_its_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library, the command would not know the provider."""
    (library := tmp_path / "libmy.so").touch()
    monkeypatch.setenv(LIBRARY_VARIABLE, f"MyExecutionProvider={library}")
    command = measuring_command("perf", ["model.onnx"], ["--ep", "MyExecutionProvider", "--threads", "2"])
    assert command.endswith(command_line([f"MyExecutionProvider={library}"]))
    assert "winml perf model.onnx --ep cpu" == measuring_command("perf", ["model.onnx"], ["--ep", "cpu"])
