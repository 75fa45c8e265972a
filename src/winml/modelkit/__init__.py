"""What may a caller use?

Everything a caller may rely on is in ``__all__`` and is fetched on first use, so that importing this package costs
nothing and brings in neither torch nor transformers. Anything imported from deeper down may move without notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from winml.modelkit.build.export_flow import HTPExporter, export_pytorch
    from winml.modelkit.errors import (
        CheckpointError,
        ConfigError,
        ExportError,
        InputError,
        StageError,
        UsageError,
        VerificationError,
        WinMLError,
    )
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
    from winml.modelkit.report.export_result import ExportResult

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ExportError",
    "ExportResult",
    "HTPExporter",
    "InputError",
    "InputTensorSpec",
    "OutputTensorSpec",
    "StageError",
    "UsageError",
    "VerificationError",
    "WinMLError",
    "WinMLExportConfig",
    "__version__",
    "export_pytorch",
]

__version__ = "0.1.0"
"""Read by the build too, so the distribution and the package cannot disagree."""

_HOMES = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "ExportError": "errors",
    "ExportResult": "report.export_result",
    "HTPExporter": "build.export_flow",
    "InputError": "errors",
    "InputTensorSpec": "graph.specs",
    "OutputTensorSpec": "graph.specs",
    "StageError": "errors",
    "UsageError": "errors",
    "VerificationError": "errors",
    "WinMLError": "errors",
    "WinMLExportConfig": "export.config",
    "export_pytorch": "build.export_flow",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
