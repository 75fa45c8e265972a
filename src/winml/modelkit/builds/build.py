"""Build of a model in a folder: its stages run in order, for each part of the model.

An earlier result of a stage is reused while it is valid (``stage_walk.py``). The manifest is written after each stage,
so an interrupted build resumes at the next stage. The text that quantized parts generate is compared with PyTorch's
once all parts are finished, since their errors add up. ``stages.py`` defines the stages.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from winml.modelkit import file_names
from winml.modelkit.builds.cache import library_versions
from winml.modelkit.builds.config import EvalSection, quantize_options
from winml.modelkit.builds.evaluated_models import evaluate_build
from winml.modelkit.builds.folder import held_folder, refuse_input_as_output
from winml.modelkit.builds.identity import ModelIdentity, identify_model, identify_onnx
from winml.modelkit.builds.in_memory_stages import handed_over_stages
from winml.modelkit.builds.layouts.folder_layout import file_record
from winml.modelkit.builds.manifest_records import (
    TOOL_NAME,
    BuildManifest,
    BuildResult,
    CoverageRecord,
    FileRecord,
    PartRecord,
    StageRecord,
)
from winml.modelkit.builds.plan import BuildPlan, refuse_missing_compiler, spell_open_sizes
from winml.modelkit.builds.stage_walk import PlacedModel, StageStore, StageWalk, StoredResult
from winml.modelkit.builds.stages import (
    STAGES,
    BuiltPart,
    Stage,
    StageOutcome,
    StageTask,
    adapter_names,
    names_of,
    relevant_options,
    skip_reason,
)
from winml.modelkit.errors import WinMLError, opt, spell_options
from winml.modelkit.evaluate.records import evaluation_words
from winml.modelkit.export.sidecar import DescribedFile, adapted_sidecar_json
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.named_paths import drop_read
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.host import PeakMemory
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.tags.tagging import all_nodes, measure_coverage, read_tag
from winml.modelkit.version import __version__
from winml.modelkit.words import message_words

EVAL_STEP = "eval"
"""Step after the stages that evaluates the result."""


@dataclass(frozen=True)
class BuildListener:
    """Progress callbacks of a build."""

    on_stage: Callable[[StepEvent], None] | None = None
    """Called when a stage starts or ends."""
    on_step: Callable[[StepEvent], None] | None = None
    """Called when a step inside the export starts or ends."""
    on_kept: Callable[[str], None] | None = None
    """Called with the name of a stage whose result is in the folder and stays there if the build is interrupted."""
    tell: Callable[[str], None] = lambda _words: None
    """Called with a message: the build waits for another one, or a value of the config is not used."""


@dataclass(frozen=True)
class BuildCache:
    """Model identity and result store of a build in the cache."""

    identity: ModelIdentity
    """Identity of the model; part of the name of the folder."""
    store: StageStore
    """Stage results of all builds in the cache; read and extended."""


def identify_plan(plan: BuildPlan) -> ModelIdentity:
    """Return the identity of the model of a plan, by the files at this moment.

    Raises:
        UsageError: the request is wrong.
        InputError: a file is missing or cannot be read, or the Hub did not deliver.
    """
    return identify_onnx(plan.onnx_path) if plan.onnx_path is not None else identify_model(plan.request)


def run_build(
    plan: BuildPlan,
    folder: Path,
    *,
    cache: BuildCache | None = None,
    rebuild: bool = False,
    stages: Sequence[Stage] = STAGES,
    listener: BuildListener = BuildListener(),
) -> BuildResult:
    """Build a model into a folder.

    Args:
        plan: The build.
        folder: Folder of the build; created if it is missing.
        cache: Identity and store of a build in the cache; None for another folder.
        rebuild: Run every stage, including up-to-date ones.
        stages: The stages, in order.
        listener: Receives the progress.

    Raises:
        UsageError: the folder is the model, or contains files that no build wrote or the finished build of another
            model.
        WinMLError: a stage failed; finished stages are kept.
    """
    refuse_missing_compiler(plan)
    identity = cache.identity if cache is not None else identify_plan(plan)
    identity.start()
    store = cache.store if cache is not None else None
    names = names_of_build(plan, stages)
    refuse_input_as_output(folder, identity.places, (*names, file_names.BUILD_MANIFEST_NAME))
    with held_folder(folder, names, is_cache=cache is not None, tell=listener.tell) as build_folder:
        build_folder.refuse_other_model(plan.request.model, lambda: identity.record.get("files"), rebuild=rebuild)
        return _Build(plan, build_folder, identity, stages, rebuild=rebuild, store=store).run(listener)


def names_of_build(plan: BuildPlan, stages: Sequence[Stage] = STAGES) -> tuple[str, ...]:
    """Return every file name that a build of a model of one part may write, except the manifest and data files."""
    runs = (stages, handed_over_stages(stages, plan))
    evaluated = () if plan.config.eval is None else (file_names.EVALUATION_NAME,)
    named = (name for run in runs for name in names_of(run, config=plan.config))
    return tuple(dict.fromkeys((*named, *adapter_names(plan), *evaluated)))


class _Build(StageWalk):
    """One build in a locked folder; runs the stages."""

    def run(self, listener: BuildListener) -> BuildResult:
        """Run or reuse every stage, and write the result under its final names."""
        folder = self.folder
        eval_steps = [] if self.plan.config.eval is None else [EVAL_STEP]
        self._listener = listener
        self._clock = StepClock([*(stage.name for stage in self.stages), *eval_steps], listener.on_stage)
        self._started = datetime.now(timezone.utc).astimezone()
        self._started_at = time.perf_counter()
        folder.announce()
        try:
            for stage in self.stages:
                with self._clock.step(stage.name) as step:
                    self.walk_stage(stage)
                    step.summary = self._stage_summary(stage)
                if listener.on_kept is not None and any(part.records[-1].files for part in self.parts):
                    listener.on_kept(stage.name)
        except BaseException as error:
            if not any(part.current_files for part in self.parts):
                folder.forget()  # no stage is finished: the folder is left as before the build
            elif isinstance(error, WinMLError):
                unfinished = self._make_manifest("unfinished", {})
                reason = message_words(error.message)
                folder.save(unfinished.model_copy(update={"failed": stage.name, "reason": reason}))
            drop_read(folder.path)
            raise
        manifest = self._make_manifest("done", self._place_models())
        # Before files of stages are removed: the notes read their graphs.
        notes = [*self._stage_notes(), *self.companions.placed.notes, *self._optimization_notes()]
        if self.plan.deploy_only:
            manifest = _without_stage_files(manifest)
        folder.remove_all_but(manifest.files)
        folder.save(manifest)
        result = BuildResult(folder.path, manifest, (*folder.notes, *manifest.notes, *notes))
        section = self.plan.config.eval
        return result if section is None else self._write_evaluation(result, section)

    def walk_stage(self, stage: Stage) -> None:
        """Also refuse graphs that readers of the layout do not support, and compare the text of quantized parts."""
        super().walk_stage(stage)
        if stage.makes_graph:
            self.layout.refuse(self.parts)
        elif stage.takes_bits and not skip_reason(stage, self.plan):
            _compare_generated_text(self.plan, self.parts, self.earlier)
            self.folder.save(self._make_manifest("unfinished", {}))

    def keep_records(self, records: Mapping[str, StageRecord]) -> None:
        """Write the records of a stage to the manifest and the store."""
        super().keep_records(records)
        self.folder.save(self._make_manifest("unfinished", {}))
        if self.store is not None:
            self.store.add(records, self.folder.path)

    def claim_parts(self, names: Sequence[str]) -> None:
        """Claim the file names of the parts before the files are written.

        Raises:
            OutputExistsError: a file of such a name exists and no build wrote it.
        """
        if tuple(names) != (file_names.ONLY_PART,):
            self.folder.claim(names_of(self.stages, names, self.plan.config))

    def take(self, stored: StoredResult) -> bool:
        """Link the files of the result into the folder."""
        return stored.link(self.folder.path, self.files)

    def run_stage(self, stage: Stage, part: BuiltPart | None, reason: str) -> dict[str, StageRecord]:
        """Run a stage.

        Raises:
            WinMLError: the stage failed.
        """
        output, source, of_several = self.folder.path / stage.file, None, False
        if part is not None:
            source, of_several = part.current, part.of_several
            output = file_names.part_path(output, part.name, of_several=of_several)
        statistics = None if self.store is None else self.store.statistics
        task = StageTask(self.plan, source, output, self._listener.on_step, self.claim_parts, statistics, of_several)
        started = time.perf_counter()
        with PeakMemory() as memory, spell_options(spell_open_sizes(self.plan.config)):
            outcomes = stage.work(task)
        seconds = time.perf_counter() - started
        origin = self.origin_of(stage, part)
        if part is None:
            relevant = relevant_options(origin.options, [outcome.part for outcome in outcomes])
            origin = origin.model_copy(update={"options": relevant})

        def record(outcome: StageOutcome) -> StageRecord:
            nodes, coverage = _count_nodes(outcome.files[0])
            return StageRecord(
                name=stage.name,
                status="run",
                reason=reason,
                origin=origin,
                files=self.files.of(outcome.files),
                seconds=round(seconds if outcome.seconds is None else outcome.seconds, 3),
                peak_memory_bytes=memory.largest_bytes,
                nodes=nodes,
                coverage=coverage,
                normalizations=outcome.normalizations,
                summary=outcome.summary,
                assumed=outcome.assumed,
                resolved=dict(outcome.resolved),
                notes=outcome.notes,
            )

        return {outcome.part if part is None else part.name: record(outcome) for outcome in outcomes}

    def _write_evaluation(self, result: BuildResult, section: EvalSection) -> BuildResult:
        """Evaluate a finished build and write the result; the build is kept in any case."""
        if len(self.parts) > 1:
            note = "The model has several parts and was not evaluated: run them together, with the metric of your task."
            return replace(result, notes=(*result.notes, note))
        with self._clock.step(EVAL_STEP) as step:
            request = self.plan.request if self.plan.onnx_path is None else None
            evaluation = evaluate_build(result.model_path, section, request, self._listener.on_step)
            step.summary = evaluation_words(evaluation)
        names = tuple(sorted({*result.manifest.files, file_names.EVALUATION_NAME}))
        manifest = result.manifest.model_copy(update={"files": names})
        with OutputFiles() as files:
            files.write_json(self.folder.path / file_names.EVALUATION_NAME, evaluation.as_record())
            self.folder.save(manifest)
            files.commit(overwrite=True)
        return replace(result, manifest=manifest, evaluation=evaluation)

    def _stage_summary(self, stage: Stage) -> str:
        """Summarize the result of a stage in a few words."""
        words = [(part.name, _record_words(part.records[-1])) for part in self.parts]
        if len(words) == 1 or skip_reason(stage, self.plan):
            return words[0][1]
        return "; ".join(f"{name}: {text}" for name, text in words)

    def _make_manifest(self, status: Literal["unfinished", "done"], models: Mapping[str, PlacedModel]) -> BuildManifest:
        """Return the manifest of the stages so far; ``models`` contains the files of finished parts."""
        parts = tuple(self._part_record(part, status, models.get(part.name, PlacedModel())) for part in self.parts)
        stage_files = (file for part in parts for record in part.stages for file in record.files)
        model_files = (file for part in parts for file in (*part.model, part.sidecar) if file is not None)
        part_files = {file.name for file in (*stage_files, *model_files)}
        final_names = (
            *self.companions.placed.names,
            *self.layout.written_names,
            file_names.BUILD_CONFIG_NAME,
            file_names.BUILD_MANIFEST_NAME,
        )
        names = tuple(sorted({*part_files, *(final_names if status == "done" else self.folder.owned_names())}))
        libraries = dict.fromkeys(name for stage in self.stages for name in stage.libraries)
        return BuildManifest(
            status=status,
            files=names,
            parts=parts,
            companions=self.companions.records,
            deploy=self._deployed_files(models) if status == "done" else (),
            layout=self.plan.config.layout,
            input=self.input_record,
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._started_at, 3),
            normalizations=sum(record.normalizations for part in self.parts for record in part.records),
            versions={TOOL_NAME: __version__, "python": platform.python_version(), **library_versions(libraries)},
            notes=self.layout.notes(self.parts, self.folder.path) if status == "done" else (),
        )

    def _deployed_files(self, models: Mapping[str, PlacedModel]) -> tuple[FileRecord, ...]:
        """Return the records of the files to deploy: models, and files that readers expect beside them."""
        placed = self.companions.placed
        companions = (*placed.names, *placed.kept, *self.layout.written_names)
        folder = self.folder.path
        records = self.files.of(folder / name for name in dict.fromkeys(companions))
        return (*(file for model in models.values() for file in model.files), *records)

    def _stage_notes(self) -> list[str]:
        """Return the notes of all stages, prefixed with the part name unless all parts have the note."""
        notes = {part.name: [note for record in part.records for note in record.notes] for part in self.parts}
        common = {note for texts in notes.values() for note in texts if all(note in other for other in notes.values())}
        reported = (note if note in common else f"{name}: {note}" for name, texts in notes.items() for note in texts)
        return list(dict.fromkeys(reported))

    def _optimization_notes(self) -> tuple[str, ...]:
        """Note a build without an optimization, and decoders whose inputs of 16-bit floats prevent fusions."""
        section = self.plan.config.optim
        if section is None or self.plan.skip_pre_normalization:
            return ()
        if section.states_optimization and not self.plan.has_default_level:
            return ()
        from winml.modelkit.builds.decoder_fusions import is_fused, note_on_half_precision  # imports onnx

        models = [part.current for part in self.parts if part.current is not None]
        if fused_models := [model for model in models if is_fused(model, self.plan)]:
            return tuple(dict.fromkeys(filter(None, map(note_on_half_precision, fused_models))))
        if self.plan.has_default_level:
            return ()
        note = (
            "Nothing was optimized: the weights were converted in memory, and ONNX Runtime would read them in float "
            f"from a temporary file. Pass {opt.level} full (optim.level in the config) to optimize."
        )
        return (note,)

    def _part_record(self, part: BuiltPart, status: str, placed: PlacedModel) -> PartRecord:
        finished_stages = {record.name for record in part.records}
        # Earlier results of stages that have not run yet may be reused, by this build or by the next one after a kill.
        earlier = None if status == "done" or self.earlier is None else self.earlier.part(part.name)
        earlier_stages = () if earlier is None else earlier.stages
        stages = (*part.records, *(record for record in earlier_stages if record.name not in finished_stages))
        return PartRecord(name=part.name, model=placed.files, sidecar=placed.sidecar, stages=stages)

    def _place_models(self) -> dict[str, PlacedModel]:
        """Write the last result of each part under its final name, and the resolved config; return part → files."""
        folder = self.folder.path
        reusable = {part.name: self.reusable_model(part) for part in self.parts}
        names: dict[str, tuple[str, ...]] = {}
        with OutputFiles() as files:
            for part in self.parts:
                if (model := reusable[part.name]) is not None:
                    names[part.name] = tuple(file.name for file in model.files)
                    continue
                path = folder / self.layout.model_name(part)
                names[part.name] = self.layout.place(part, folder, files)
                self._write_sidecar(part, path, names[part.name], files)
            if self.plan.layout.numbers_data:
                # A name that is not derived from the content may be that of a user's file.
                owned_names = self.folder.owned_names()
                self.folder.claim([name for _, *data in names.values() for name in data if name not in owned_names])
            self.companions.reserve(files)
            # The manifest lists the next files before they are put in place, so that a kill leaves no unknown file.
            self.folder.save(self._make_manifest("unfinished", {}))
            files.write_json(folder / file_names.BUILD_CONFIG_NAME, self._resolved_config())
            for name, text in self.layout.written(self.parts, names).items():
                files.write_text(folder / name, text)
            self.layout.place_adapters(self.parts, folder, files)
            written = {path.relative_to(folder.absolute()).as_posix() for path in files.commit()}
        self.companions.settle(files)
        placed_models = {}
        for part in self.parts:
            path = folder / self.layout.model_name(part)
            sidecar = file_names.sidecar_path(path)
            has_sidecar = sidecar.relative_to(folder).as_posix() in written
            placed_models[part.name] = reusable[part.name] or PlacedModel(
                self.files.of((path, *external_files(path))), self.files.of([sidecar])[0] if has_sidecar else None
            )
        return placed_models

    def _write_sidecar(self, part: BuiltPart, path: Path, names: Sequence[str], files: OutputFiles) -> None:
        """Write the sidecar of a finished part, if the export wrote one and it describes the export.

        Args:
            part: The part; its last stage ran or was reused.
            path: The path that the model gets, under which it is written but not in place yet.
            names: Names of the model and its data files in the folder.
            files: Transaction that puts the files in place together.
        """
        if part.exported is None:
            return
        exported, sidecar = part.exported
        folder = self.folder.path
        try:
            record: dict[str, object] = read_json_file(folder / sidecar.name)
            # Sidecars of earlier versions lack the digest of the model; the manifest has it.
            is_its_own = record.get("model_sha256", exported.sha256) == exported.sha256
        except (OSError, ValueError, AttributeError):
            is_its_own = False
        if not is_its_own:
            self.folder.notes.append(f"{folder / sidecar.name} does not describe {exported.name} and is ignored.")
            return
        sizes = files.written_sizes()
        data = {name: sizes[(folder / name).absolute()] for name in names[1:]}
        if not self.plan.is_deployed:  # the model may share data files with its stage
            shared = (file for file in part.current_files[1:] if not file.name.endswith(file_names.SIDECAR_SUFFIX))
            data = {**{file.name: file.size_bytes for file in shared}, **data}
        # The file of the stage has the same nodes, and less is read if its weights are external.
        model = ir.serde.deserialize_model(read_structure(folder / part.current_files[0].name))
        tags = [(node.name or "", tag) for node in all_nodes(model) if (tag := read_tag(node))]
        staged_model = files.reserve(path)
        model_file = file_record(staged_model.name, staged_model)
        described_file = DescribedFile(
            sha256=model_file.sha256,
            files=((model_file.name, model_file.size_bytes), *data.items()),
            nodes={name: tag.tag for name, tag in tags},
            root_nodes=tuple(name for name, tag in tags if tag.source == "root"),
            coverage=measure_coverage(model),
        )
        files.write_text(file_names.sidecar_path(path), adapted_sidecar_json(record, described_file))

    def _resolved_config(self) -> dict[str, object]:
        config = self.plan.config.as_record()
        for part in self.parts:
            for record in part.records:
                config.update(record.resolved)
        return config


def _count_nodes(path: Path) -> tuple[int, CoverageRecord]:
    """Count the nodes and tags of a written file."""
    coverage = measure_coverage(graph_of(read_structure(path), path))
    # Without any tag, the source had no hierarchy, or the export omitted it.
    if coverage.nodes and not coverage.tagged:
        return coverage.nodes, CoverageRecord(tagged=0, percent=None)
    shares = (round(coverage.percent, 2), round(coverage.at_root_percent, 2))
    return coverage.nodes, CoverageRecord(tagged=coverage.tagged, percent=shares[0], at_root_percent=shares[1])


def _without_stage_files(manifest: BuildManifest) -> BuildManifest:
    """Return the manifest of a folder that contains only the files to deploy and the manifest."""
    parts = tuple(
        part.model_copy(
            update={
                "sidecar": None,
                "stages": tuple(stage.model_copy(update={"files": ()}) for stage in part.stages),
            }
        )
        for part in manifest.parts
    )
    files = tuple(
        sorted({*(file.name for file in manifest.deploy), file_names.BUILD_MANIFEST_NAME} & {*manifest.files})
    )
    return manifest.model_copy(update={"parts": parts, "files": files})


def _record_words(record: StageRecord) -> str:
    if record.status == "skipped":
        return f"skipped: {record.reason}"
    because = f" ({record.reason})" if record.reason else ""
    return f"{'reused, ' if record.status == 'reused' else ''}{record.nodes} nodes, {record.summary}{because}"


_SEPARATOR = "; "


def _compare_generated_text(plan: BuildPlan, parts: Sequence[BuiltPart], earlier: BuildManifest | None) -> None:
    """Compare the text that quantized parts generate, and add the result to the record of the decoder.

    Reused parts that were compared before are not compared again, unless that build failed or was killed.

    Args:
        plan: The build.
        parts: All parts; the last record of each is that of the quantize stage.
        earlier: Manifest of the earlier build in the folder, or None.

    Raises:
        VerificationError: the scores of the quantized parts are below the limit.
    """
    decoder = next((part for part in parts if part.name == file_names.DECODER), None)
    paths = {part.name: part.current for part in parts if part.current is not None}
    if decoder is None:
        return
    if decoder.records[-1].together:
        if _is_same_build(parts, earlier):
            return
        decoder.records[-1] = _set_comparison(decoder.records[-1], "")
    if len(parts) < 2 or len(paths) < len(parts) or not plan.verify or plan.onnx_path is not None:
        return
    from winml.modelkit.export.part_export import words_of_text_together
    from winml.modelkit.quantize.file_quantization import Quantization

    config, section = plan.config.export, plan.config.quant
    assert config is not None  # several parts exist, so an export ran
    assert section is not None  # the quantize stage ran
    least = Quantization(decoder.current or paths[file_names.DECODER], quantize_options(section), {}).least_sqnr_db
    words = words_of_text_together(plan.request, config, paths, least)
    if words is not None:
        decoder.records[-1] = _set_comparison(decoder.records[-1], words)


def _is_same_build(parts: Sequence[BuiltPart], earlier: BuildManifest | None) -> bool:
    """Return True if all parts are reused from the earlier finished build; cached parts may be of several builds."""
    if earlier is None or earlier.status != "done" or len(earlier.parts) != len(parts):
        return False
    return all(part.records[-1].status == "reused" and not part.records[-1].reason for part in parts)


def _set_comparison(record: StageRecord, words: str) -> StageRecord:
    summary = record.summary.removesuffix(f"{_SEPARATOR}{record.together}") if record.together else record.summary
    return record.model_copy(
        update={"together": words, "summary": f"{summary}{_SEPARATOR}{words}" if words else summary}
    )
