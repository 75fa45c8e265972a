"""Names of execution providers, and dynamic dimensions for providers that need fixed sizes."""

from __future__ import annotations

import onnxruntime as ort
import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS, find_execution_provider, refuse_dynamic


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
