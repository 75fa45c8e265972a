"""Builds the candidates of a tuning from one export.

Each candidate is a build in a separate folder, made as ``winml build`` makes it. Stages shared by candidates are run
once: a store beside the folders holds their results. Selects and measures no candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winml.modelkit.builds.build import BuildCache, identify_plan, run_build
from winml.modelkit.builds.config import CompileSection, OptimSection, QuantSection, WinMLBuildConfig
from winml.modelkit.builds.identity import ModelIdentity, identify_onnx
from winml.modelkit.builds.manifest_records import BuildResult
from winml.modelkit.builds.plan import BuildPlan, plan_build
from winml.modelkit.builds.stage_walk import StageStore
from winml.modelkit.errors import UsageError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.file_names import TUNE_CANDIDATES_NAME, TUNE_EXPORT_NAME, TUNE_FIXED_NAME
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.files.moving import remove_folder
from winml.modelkit.options import parse_options
from winml.modelkit.transform.pin import pin_model
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.records import Candidate
from winml.modelkit.tune.state import TuneState


@dataclass(frozen=True)
class TunedModel:
    """Source of the candidates."""

    request: ModelRequest
    export: WinMLExportConfig
    identity: ModelIdentity
    note: str = ""

    def plan(self, candidate: Candidate | None, rules: Mapping[str, str] | None = None) -> BuildPlan:
        """Return the build plan of a candidate; None: of the export alone.

        Raises:
            UsageError: the options contradict each other.
        """
        return plan_build(_build_config(self.export, candidate, rules), self.request)


def tuned_model(request: ModelRequest, export: WinMLExportConfig) -> TunedModel:
    """Return the source of the candidates; exports nothing.

    Raises:
        WinMLError: as :func:`~winml.modelkit.builds.build.identify_plan`.
    """
    return TunedModel(request, export, identify_plan(plan_build(_build_config(export, None, None), request)))


def exported_once(model: TunedModel, folder: Path, state: TuneState) -> TunedModel:
    """Return a repeatable source of the candidates: the model itself, or an export written once if exports may differ.

    Args:
        model: The model to tune.
        folder: Folder of the tuning.
        state: State of the tuning, which records the export.

    Raises:
        UsageError: the model has several parts.
        WinMLError: as :func:`~winml.modelkit.builds.build.run_build`.
    """
    if model.identity.is_repeatable:
        return model
    path = state.exported
    if path is None:
        build = run_build(model.plan(None), folder / TUNE_EXPORT_NAME)
        _refuse_parts(build)
        path = build.model_path
        state.keep_exported(path)
    source = ModelRequest(model=str(path), seed=model.request.seed)
    note = (
        "A factory may return a different model on every call: all candidates, and the model of the config, "
        f"are made from its export {path}."
    )
    return TunedModel(source, model.export, identify_plan(plan_build(WinMLBuildConfig(), source)), note)


@dataclass(frozen=True)
class CandidateBuilds:
    """The builds of the candidates of one tuning."""

    model: TunedModel
    folder: Path
    """Folder of the tuning."""

    @property
    def place(self) -> Path:
        """Folder of all candidates."""
        return self.folder / TUNE_CANDIDATES_NAME

    def build(self, candidate: Candidate, rules: Mapping[str, str] | None = None) -> BuildResult:
        """Build a candidate, or return its existing build.

        The stages are not verified, because the candidate is compared with the plain file when measured.

        Args:
            candidate: The candidate.
            rules: Modules that stay in float, selector → precision.

        Raises:
            UsageError: the model has several parts.
            WinMLError: as :func:`~winml.modelkit.builds.build.run_build`.
        """
        return self.build_in(self.place / candidate.name, candidate, rules, verify=False)

    def build_in(
        self, folder: Path, candidate: Candidate, rules: Mapping[str, str] | None = None, *, verify: bool = True
    ) -> BuildResult:
        """Build a candidate in a folder, with stages from the shared store; raises as :meth:`build`."""
        model = self._fix_sizes(candidate.fixed_sizes) if candidate.fixed_sizes else self.model
        cache = BuildCache(model.identity, StageStore(self.place))
        if candidate.sections.get("quant") and model.plan(None).onnx_path is None:
            # With the export in the folder, a quantized build does not export the model again.
            run_build(model.plan(None), folder, cache=cache)
        # The export itself is verified in any case, because all candidates share it.
        plan = replace(model.plan(candidate, rules), verify=verify)
        result = run_build(plan, folder, cache=cache)
        _refuse_parts(result)
        return result

    def _fix_sizes(self, sizes: Mapping[str, int]) -> TunedModel:
        """Return the model with its dynamic dimensions fixed: a file in the folder of the tuning, made if missing.

        Raises:
            WinMLError: as :func:`~winml.modelkit.transform.pin.pin_model`.
        """
        path = self.folder / TUNE_EXPORT_NAME / TUNE_FIXED_NAME
        if not path.is_file():
            plain_model = self.model.plan(None).onnx_path or self.build(Candidate(PLAIN, PLAIN, "")).model_path
            pin_model(plain_model, path, sizes)
        identity = identify_onnx(path, companions=self.model.identity.companions)
        return TunedModel(ModelRequest(model=str(path)), self.model.export, identity)

    def remove(self, candidate: Candidate) -> None:
        """Remove the folder of a candidate; its measurements are kept."""
        remove_folder(self.place / candidate.name)


def _build_config(
    export: WinMLExportConfig, candidate: Candidate | None, rules: Mapping[str, str] | None
) -> WinMLBuildConfig:
    """Return the config of a candidate with its float modules (selector → precision); None: that of the export."""
    if candidate is None:
        return WinMLBuildConfig(export=export, optim=None, quant=None, compile=None)
    sections: dict[str, Any] = {name: dict(section) for name, section in candidate.sections.items()}
    if rules is not None:
        sections["quant"] = {**sections["quant"], "per_module": dict(rules)}
    return WinMLBuildConfig(
        export=export,
        optim=parse_options(OptimSection, sections.get("optim", {"level": "none"}), "optim"),
        quant=parse_options(QuantSection, sections["quant"], "quant") if "quant" in sections else None,
        compile=parse_options(CompileSection, sections["compile"], "compile") if "compile" in sections else None,
    )


def _refuse_parts(result: BuildResult) -> None:
    """Refuse a model of several parts, because a tuning takes one file.

    Raises:
        UsageError: names the files of the parts.
    """
    if len(result.manifest.parts) > 1:
        files = ", ".join(path.name for path in result.part_paths.values())
        raise UsageError(
            f"the model has several parts, but a tuning takes one file: {files}",
            hint="Build it with winml build, and tune each part separately: winml tune -m DIR/encoder.onnx -o tuned",
        )
