"""Which version is an execution provider of? That of the package which brings it."""

from __future__ import annotations

import importlib.metadata

import onnxruntime as ort

from winml.modelkit.runtime.bindings.plug_ins import installed_plug_ins
from winml.modelkit.runtime.execution_providers import ExecutionProvider

__all__ = ["provider_version"]


def provider_version(provider: ExecutionProvider) -> str:
    """Return the version of the package of a plug-in, or of the ONNX Runtime that contains the provider."""
    if provider.name not in installed_plug_ins():
        return str(ort.__version__)
    packages = importlib.metadata.packages_distributions().get(provider.plug_in, [])
    return importlib.metadata.version(packages[0]) if packages else "unknown"
