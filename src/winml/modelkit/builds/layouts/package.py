"""The layout of a model package of ONNX Runtime: variants of one model, of which the runtime chooses one.

A package has one component for each part of the model, and each component has the same variants. A variant names the
execution provider that it is for. Weights with equal bytes in several variants are in one shared folder, which is
named by a digest of its content. Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from winml.modelkit.builds.layouts.layout import PACKAGE_NAME, BuiltFolder, Layout
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.file_names import BUILT_MODEL_NAME, ONLY_PART
from winml.modelkit.quantize.precisions import FLOAT16, INT4, INT8, W8A16
from winml.modelkit.version import __version__

_SHARED_FOLDER = "shared_assets"
"""Specified: folder of the shared folders."""
SHARED_DATA_NAME: Final = "weights.data"
"""Weights of several variants."""
WEIGHTS_OPTION = "session.model_external_initializers_file_folder_path"
"""Specified: session option with the folder of a model's data files."""
_SCHEMA: Final = "1.0"
_PRODUCER: Final = "winml"


@dataclass(frozen=True)
class Variant:
    """One variant of a package: the providers that run it, and the options of its build."""

    providers: tuple[str, ...]
    """Names in ONNX Runtime. Each is an entry of the component; all entries share the folder of the variant."""
    precision: str | None = None
    ep: str | None = None
    """Short name of the provider that the variant is built for; None: any."""
    operators: str | None = None
    """Set of operators; None: that of the optimizer."""
    is_compiled: bool = False
    """True if the provider compiles the model on the building machine, which requires fixed sizes."""


VARIANTS: Mapping[str, Variant] = {
    "cpu": Variant(("CPUExecutionProvider",)),
    "cpu-int8": Variant(("CPUExecutionProvider",), INT8),
    "cpu-int4": Variant(("CPUExecutionProvider",), INT4),
    "webgpu": Variant(("WebGpuExecutionProvider",), FLOAT16, "webgpu"),
    "cuda": Variant(("CUDAExecutionProvider",), FLOAT16, "cuda"),
    "dml": Variant(("DmlExecutionProvider",), FLOAT16, "dml"),
    "standard": Variant(
        ("OpenVINOExecutionProvider", "CoreMLExecutionProvider", "XnnpackExecutionProvider"), operators="standard"
    ),
    "qnn": Variant(("QNNExecutionProvider",), W8A16, "qnn", is_compiled=True),
}
"""Name → variant. Chosen: GPUs compute in 16-bit floats, NPUs in integers; providers that compile the graph themselves
take operators of ONNX."""
DEFAULT_VARIANTS = ("cpu", "webgpu", "standard", "qnn")
"""Chosen: one for each kind of provider; the others serve the same kinds. ``qnn`` only if the provider is installed."""


def parse_variants(text: str) -> tuple[str, ...]:
    """Return the names in a list of variants, separated by commas.

    Raises:
        UsageError: a name is unknown or repeated, or the list is empty.
    """
    names = tuple(name for word in text.split(",") if (name := word.strip()))
    unknown = next((name for name in names if name not in VARIANTS), None)
    repeated = next((name for name in names if names.count(name) > 1), None)
    problem = (
        f"{unknown} is no variant"
        if unknown is not None
        else f"{repeated} is named twice"
        if repeated is not None
        else "no variant is named"
    )
    if unknown is not None or repeated is not None or not names:
        raise UsageError(f"{opt.variants} {text!r}: {problem}", hint=f"Variants are {', '.join(VARIANTS)}.")
    return names


def directory_uri(digests: Mapping[str, str]) -> str:
    """Return the name by which ONNX Runtime refers to a shared folder.

    Args:
        digests: Path of a file relative to the folder, with ``/`` → SHA-256 of its content.

    >>> directory_uri({})[:12]
    'sha256:e3b0c'
    """
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def shared_folder(uri: str) -> str:
    """Return the path of a shared folder relative to the package."""
    return f"{_SHARED_FOLDER}/{uri.replace(':', '-')}"


def variant_path(part: str, variant: str) -> str:
    """Return the path of the model of a variant relative to the package."""
    return f"{part}/{variant}/{BUILT_MODEL_NAME}"


def manifest_record(name: str, parts: Sequence[str], files: Sequence[str], source: str) -> dict[str, Any]:
    """Return the content of ``manifest.json``.

    Args:
        name: Name of the package.
        parts: Parts of the model, which are the components.
        files: All files of the package, which a later build may replace.
        source: Name of the model.
    """
    return {
        "schema_version": _SCHEMA,
        "package_name": name,
        "layout": "portable",
        "components": {part: part for part in parts},
        "additional_metadata": {
            "producer": {"name": _PRODUCER, "version": __version__},
            "source": source,
            "files": sorted(files),
        },
    }


def package_files(record: object) -> tuple[str, ...] | None:
    """Return the files that a ``manifest.json`` of winml lists; ``None`` for another file."""
    metadata = record.get("additional_metadata") if isinstance(record, dict) else None
    producer = metadata.get("producer") if isinstance(metadata, dict) else None
    if not isinstance(producer, dict) or producer.get("name") != _PRODUCER or not isinstance(metadata, dict):
        return None
    files = metadata.get("files")
    return tuple(files) if isinstance(files, list) and all(isinstance(name, str) for name in files) else None


def component_record(
    part: str, variants: Mapping[str, Variant], uris: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the content of ``component.json``.

    Args:
        part: The part of the model.
        variants: Name → variant. Of several variants of one provider, ONNX Runtime chooses the first.
        uris: Variant → shared folder with its weights; a variant with all weights in its model is absent.
        facts: Variant → values for ``additional_metadata``.
    """
    entries = {}
    for name, variant in variants.items():
        options = {"session_options": {WEIGHTS_OPTION: uris[name]}} if name in uris else {}
        for provider in variant.providers:
            short = provider.removesuffix("ExecutionProvider").lower()
            key = name if len(variant.providers) == 1 else f"{name}-{short}"
            entries[key] = {
                "variant_directory": name,
                "ep": provider,
                "executor_info": {"ort": {"model_file": BUILT_MODEL_NAME, **options}},
                "additional_metadata": dict(facts[name]),
            }
    return {"component_name": part, "variants": entries}


def package_usage(folder: BuiltFolder) -> Sequence[str]:
    """Return lines of Python that open the first component of a package."""
    return (
        "import onnxruntime as ort",
        "options = ort.ModelPackageOptions(ort.SessionOptions())  # with providers added: the variant of the first one",
        f'session = ort.ModelPackageContext({folder.text}).select_component("{folder.stem}", options).create_session()',
    )


PACKAGE = Layout(
    PACKAGE_NAME,
    lambda part, of_several, precision: variant_path(part if of_several else ONLY_PART, precision),
    readers="onnxruntime.ModelPackage",
    usage=package_usage,
)
"""Layout of a package, whose variants are builds without a layout."""
