"""Plans a build: stages to run, up-to-date results, and files to write and remove.

Walks over the stages and only takes notes: writes nothing, locks no folder and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from winml.modelkit import file_names
from winml.modelkit.builds.build import EVAL_STEP, PROOF_STEP, identify_plan, names_of_build
from winml.modelkit.builds.build_model import cache_folder, cache_key, note_of_sizes
from winml.modelkit.builds.cache import only_looking
from winml.modelkit.builds.config import quantize_options
from winml.modelkit.builds.folder import BuildFolder, refuse_input_as_output
from winml.modelkit.builds.identity import ModelIdentity
from winml.modelkit.builds.manifest_records import StageRecord
from winml.modelkit.builds.open_sizes import first_attempt
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stage_walk import StageStore, StageWalk, StoredResult
from winml.modelkit.builds.stages import STAGES, BuiltPart, Stage, adapter_names, stage_files
from winml.modelkit.models.checkpoints.adapters import adapter_files, read_adapters
from winml.modelkit.models.request import cached_checkpoint, resolve_source
from winml.modelkit.onnx.files.named_paths import cache_root
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.quantize.calibration.calibration_files import calibration_files
from winml.modelkit.report.plan import Plan, PlannedFile, PlannedStep, interruptions_beside, planned_data, planned_file

_OUTSIDE = "the model has external data"
_TRIED = (
    "The build tries dynamic sizes of batch and length, and fixes those that the model does not support; the plan "
    "lists the first attempt."
)


@dataclass(frozen=True, kw_only=True)
class PlannedBuild(Plan):
    """Plan of a build with its files."""

    build: BuildPlan
    folder: Path
    """Folder of the build; in the cache, a ``*`` replaces the digest while the model is not fetched."""
    is_exported: bool = False
    """True if a graph is exported, because no up-to-date result is known."""


def planned_build(requested: BuildPlan, output: Path | None, *, rebuild: bool = False) -> PlannedBuild:
    """Plan a build with the current files.

    Args:
        requested: The build; the plan lists its first attempt if it tries several sizes.
        output: Folder to build in; None: a folder of the cache.
        rebuild: Run every stage, including up-to-date ones.

    Raises:
        UsageError: the folder is the model, or the request is wrong.
        OutputExistsError: the folder contains a file that no build wrote, or the finished build of another model.
        InputError: a file of the model is missing or cannot be read.
        WriteError: the folder cannot be written.
    """
    with only_looking():
        identity = None if is_to_be_fetched(requested) else identify_plan(requested)
        plan = first_attempt(
            requested, note_of_sizes(requested), lambda: "" if identity is None else cache_key(requested, identity)
        )
        folder = output if output is not None else cache_folder(plan, identity)
        names = names_of_build(plan)
        source_paths = () if identity is None else identity.places
        refuse_input_as_output(folder, source_paths, (*names, file_names.BUILD_MANIFEST_NAME))
        target = BuildFolder(folder, names, is_cache=output is None)
        files = (lambda: None) if identity is None else (lambda: identity.record.get("files"))
        target.refuse_other_model(plan.request.model, files, rebuild=rebuild)
        store = StageStore(cache_root()) if output is None and identity is not None else None
        unknown = ModelIdentity(dict, is_repeatable=False, places=())
        outline = _Outline(plan, target, identity or unknown, STAGES, rebuild=rebuild or identity is None, store=store)
        planned = outline.planned(is_fetched=identity is not None)
        if plan is requested:
            return planned
        return replace(planned, build=requested, notes=(*planned.notes, _TRIED))


def is_to_be_fetched(plan: BuildPlan) -> bool:
    """Return True if the model is a Hub id, is not on this disk, and may be fetched."""
    request = plan.request
    source = None if plan.onnx_path is not None else resolve_source(request)
    if source is None or source.kind != "hub":
        return False
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return False  # the build refuses a missing model as well
    return cached_checkpoint(source, request) is None


@dataclass
class _Doubt:
    """Reason why the input of a stage may differ from that of the earlier build."""

    cause: str
    """Stage that runs, or ``recovery``."""
    is_new: bool
    """True if its result has no earlier result that may be equal."""


class _Outline(StageWalk):
    """Walks over the stages of one build, and notes the files of each.

    A stage after a rerun is up to date if the rerun recreates the same graph, and is listed with a condition.
    """

    def planned(self, *, is_fetched: bool) -> PlannedBuild:
        """Examine the folder and return the plan; without ``is_fetched``, the model's files are not on this disk."""
        plan, folder = self.plan, self.folder
        self._interrupted = interruptions_beside([folder.path / file_names.BUILD_MANIFEST_NAME])
        self._unknown = "" if is_fetched else "no up-to-date result fits the downloaded model"
        # Recovery may put files in place before a stage is examined.
        is_recovered = any(leftover.completes for leftover in self._interrupted)
        self._recovery = _Doubt("recovery", is_new=False) if is_recovered else None
        self._doubts: dict[str, _Doubt] = {}
        self._is_exported = False
        self._writes: dict[Path, PlannedFile] = {}
        self._remaining_names: set[str] = set()
        steps = [PlannedStep(stage.name, self._walk_and_describe(stage)) for stage in self.stages]
        if plan.deploy_only:  # files of stages are removed in the end
            self._writes, self._remaining_names = {}, set()
        for part in self.parts:
            self._note_part(part)
        self._note_other_files()
        if plan.proof is not None:
            steps.append(PlannedStep(PROOF_STEP, "records PyTorch's outputs and values of modules"))
            for path in file_names.proof_paths(folder.path):
                self._note_file(path)
        if plan.config.eval is not None:
            is_judged = len(self.parts) == 1
            description = "evaluates the result" if is_judged else "skipped: parts are not evaluated separately"
            steps.append(PlannedStep(EVAL_STEP, description))
            if is_judged:
                self._note_file(folder.path / file_names.EVALUATION_NAME)
        return PlannedBuild(
            verb="build",
            reads=self._list_reads(),
            writes=tuple(self._writes.values()),
            steps=tuple(steps),
            notes=(*folder.notes, *self._list_notes(is_fetched=is_fetched)),
            removes=self._list_removes(),
            interrupted=self._interrupted,
            build=plan,
            folder=folder.path,
            is_exported=self._is_exported,
        )

    def find_or_run(self, stage: Stage, part: BuiltPart | None) -> Mapping[str, StageRecord]:
        """Run a stage with a new input, independent of the earlier result."""
        doubt = self._find_doubt_of_input(stage, part)
        if doubt is None or not doubt.is_new:
            return super().find_or_run(stage, part)
        _, reason = self.earlier_result(stage, part)
        return self.run_stage(stage, part, reason or f"{doubt.cause} recreates its input")

    def stored_result(self, stage: Stage, part: BuiltPart | None) -> StoredResult | None:
        """Return ``None`` for an input that may change."""
        return None if self._find_doubt_of_input(stage, part) else super().stored_result(stage, part)

    def claim_parts(self, names: Sequence[str]) -> None:
        """Claim no name: nothing is written."""

    def take(self, stored: StoredResult) -> bool:
        """Return True if there are files; :meth:`_note_result` lists them."""
        return bool(stored.files)

    def run_stage(self, stage: Stage, part: BuiltPart | None, reason: str) -> Mapping[str, StageRecord]:
        """Return the files of the earlier build, which would be replaced."""
        earlier = {} if self.earlier is None else {entry.name: entry.stage(stage.name) for entry in self.earlier.parts}
        all_names = [known.name for known in self.parts] if self.joins_parts(stage) else [*earlier]
        names = [part.name] if part is not None else all_names or [file_names.ONLY_PART]
        records = {name: earlier.get(name) for name in names}
        return {
            name: StageRecord(name=stage.name, status="run", reason=reason, files=record.files if record else ())
            for name, record in records.items()
        }

    def _find_doubt_of_input(self, stage: Stage, part: BuiltPart | None) -> _Doubt | None:
        """Return a doubt about the input of a stage, which is one part or several; ``None`` for the earlier input."""
        parts = [part] if part is not None else self.parts if self.joins_parts(stage) else []
        return next(filter(None, map(self._find_doubt, parts)), None)

    def _find_doubt(self, part: BuiltPart) -> _Doubt | None:
        """Return the doubt about the input of the next stage of a part; ``None``: surely the earlier input."""
        return self._doubts.get(part.name, self._recovery)

    def _walk_and_describe(self, stage: Stage) -> str:
        """Walk a stage, note the files of all parts, and describe the planned action."""
        self.walk_stage(stage)
        descriptions = {part.name: self._note_result(stage, part) for part in self.parts}
        if len({*descriptions.values()}) == 1:
            return next(iter(descriptions.values()))
        return "; ".join(f"{name}: {text}" for name, text in descriptions.items())

    def _note_result(self, stage: Stage, part: BuiltPart) -> str:
        """Note the files of the last result of a part; return the planned action in words."""
        record, doubt = part.records[-1], self._find_doubt(part)
        if record.status == "skipped":
            return f"skipped: {record.reason}"
        if record.status == "run":
            self._doubts[part.name] = _Doubt(stage.name, is_new=not record.files)
            self._is_exported |= stage.makes_graph
            self._note_stage_files(stage, part, self._unknown)
            section = self.plan.config.quant
            words = ", ".join(self.plan.config.dtypes) or ("" if section is None else quantize_options(section).words)
            detail = f"; {words}" if stage.name == "quantize" and section is not None else ""
            runs = f"runs, if {self._unknown}" if self._unknown else f"runs: {record.reason or 'no result yet'}"
            return f"{runs}{detail}"
        if record.reason:  # linked from another folder
            for file in record.files:
                self._note_file(self.folder.path / file.name)
            return f"up to date, {record.reason}"
        if doubt is None:
            self._remaining_names.update(file.name for file in record.files)
            return "up to date"
        condition = f"{doubt.cause} changes its input"
        self._note_stage_files(stage, part, condition)
        return f"up to date, unless {condition}"

    def _note_stage_files(self, stage: Stage, part: BuiltPart, condition: str) -> None:
        """Note the files that a stage writes for a part; ``condition``: when, empty: always."""
        model = file_names.part_path(self.folder.path / stage.file, part.name, of_several=part.of_several)
        for path in stage_files(stage, model, self.plan.config):
            self._note_file(path, condition)
            self._note_data(planned_data(path).path, condition)
        if stage.makes_graph and self._writes_sidecar():
            self._note_file(file_names.sidecar_path(model), condition)
        if stage.makes_graph and self.plan.is_refittable:
            self._note_file(file_names.refit_path(model), condition)

    def _writes_sidecar(self) -> bool:
        """Return True if the export records the module tree, which a sidecar contains."""
        export = self.plan.config.export
        return export is not None and export.hierarchy

    def _note_part(self, part: BuiltPart) -> None:
        """Note the files of a planned part: as kept if up to date, else as written, with the condition."""
        doubt, reusable = self._find_doubt(part), self.reusable_model(part)
        if reusable is not None and doubt is None:
            self._remaining_names.update(
                file.name for file in (reusable.files if self.plan.deploy_only else reusable.all_files)
            )
            return
        condition = f"{doubt.cause} changes its input" if reusable is not None and doubt is not None else self._unknown
        model, *others = (self.folder.path / name for name in self.layout.model_names(part))
        numbered = self.plan.layout.numbers_data
        for path in (model, *others):
            self._note_file(path, condition)
            self._note_data(file_names.numbered_data_path(path, 0) if numbered else planned_data(path).path, condition)
        is_described = part.has_run and self.plan.onnx_path is None and self._writes_sidecar()
        if not self.plan.deploy_only and (is_described or part.exported is not None):
            self._note_file(file_names.sidecar_path(model), condition)

    def _note_other_files(self) -> None:
        """Note the files beside the models, and the build config and manifest."""
        plan, folder, folder_names = self.plan, self.folder.path, self.folder.owned_names()
        copied_names = self.companions.outdated()
        self._remaining_names.update(name for name in self.companions.planned if name not in copied_names)
        for name in copied_names:
            self._note_file(folder / name)
        layout = plan.layout
        if self.layout.has_card and file_names.MODEL_CARD_NAME in folder_names:
            self._remaining_names.add(file_names.MODEL_CARD_NAME)  # rewritten if a fact in it changes
        elif self.layout.has_card:
            self._note_file(folder / file_names.MODEL_CARD_NAME)
        for name in self.layout.rewritten:
            self._note_file(folder / name)
        for name in adapter_names(plan):
            self._note_file(folder / name)
        for name in layout.described:
            self._note_file(folder / name, f"this kind of model needs it in {layout.readers}")
        if not plan.deploy_only:
            self._note_file(folder / file_names.BUILD_CONFIG_NAME)
        self._note_file(folder / file_names.BUILD_MANIFEST_NAME)

    def _note_file(self, path: Path, condition: str = "") -> None:
        """Note a file to write; ``condition``: when, empty: always."""
        self._writes[path] = planned_file(path, condition)

    def _note_data(self, path: Path, condition: str) -> None:
        """Note a data file, which is written if the weights do not fit into the model."""
        self._note_file(path, f"{_OUTSIDE}, and {condition}" if condition else _OUTSIDE)

    def _list_reads(self) -> tuple[Path, ...]:
        """Return the files that the build reads: model, adapters and calibration data."""
        plan = self.plan
        quant = plan.config.quant
        data = None if quant is None else quant.calibration_data or quant.dataset
        samples = () if data is None else calibration_files(data).values()
        if plan.onnx_path is not None:
            return (plan.onnx_path, *external_files(plan.onnx_path), *samples)
        adapters = adapter_files(read_adapters(plan.request.adapter)).values()
        return (*(path for path in resolve_source(plan.request).files if path.is_file()), *adapters, *samples)

    def _list_removes(self) -> tuple[Path, ...]:
        """Return the files of earlier builds that are neither kept nor written; `()` without an earlier build."""
        folder = self.folder
        current_files = {folder.path / name for name in self._remaining_names} | self._writes.keys()
        if self.earlier is None:
            return ()
        earlier_files = [folder.path / name for name in self.earlier.files]
        return tuple(path for path in earlier_files if path not in current_files and path.is_file())

    def _list_notes(self, *, is_fetched: bool) -> Iterator[str]:
        """Yield notes on a model to download, and on an unknown number of parts."""
        plan = self.plan
        if not is_fetched:
            yield (
                f"{plan.request.model} is not on this disk and is downloaded first; only then are up-to-date stages "
                "and companion files known."
            )
        is_guessed = self.earlier is None or not self.earlier.parts
        if plan.onnx_path is None and is_guessed and all(part.current_files == () for part in self.parts):
            yield (
                "The number of parts is known when the model is loaded; the files of one part are listed. For several, "
                "stages write <stage>_<part>.onnx, and the results are named <part>.onnx."
            )
