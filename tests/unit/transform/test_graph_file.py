"""Steps common to all work on a graph: reading, normalization, verification and publication."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.errors import InputError, NormalizeError, OutputExistsError, UsageError, VerificationError
from winml.modelkit.file_names import is_data_of
from winml.modelkit.metadata_keys import EXPORT_KEY, INPUTS_KEY, NORMALIZED_KEY
from winml.modelkit.onnx.fingerprint import is_normalized, stamp
from winml.modelkit.onnx.stage import DeclaredPass, StageResult, run_passes
from winml.modelkit.tags.tagging import measure_coverage
from winml.modelkit.transform.graph_file import ALREADY_NORMALIZED, GraphFileTask, GraphWork, transform_file

BODY = """m (float[N, 3] x) => (float[N, 3] y) <float[3] w = {1, 2, 3}>
    { a = Add (x, w) b = Relu (a) c = Relu (b) y = Mul (c, w) }"""
"""The second Relu has no effect, unlike the first."""
WIDE_BODY = BODY.replace("3]", "100]").replace("1, 2, 3", ", ".join(map(str, range(1, 101))))
"""The same with weights of 400 bytes, which are worth a file of their own."""
UNNORMALIZED_BODY = BODY.replace("y = Mul (c, w)", "d = Identity (c) y = Mul (d, w)")


class ReluRemovalPass(ir.passes.InPlacePass):
    """Removes the last ``count`` Relu of a graph."""

    def __init__(self, count: int) -> None:
        self._count = count

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace each Relu's output by its input."""
        relus = [node for node in model.graph if node.op_type == "Relu"]
        for node in relus[len(relus) - self._count :]:
            value = node.inputs[0]
            assert value is not None
            node.outputs[0].replace_all_uses_with(value)
            model.graph.remove(node, safe=True)
        return ir.passes.PassResult(model, bool(relus))


@dataclass(frozen=True)
class ReluRemoval(GraphWork[StageResult]):
    """Removal of a number of Relu nodes: outputs stay equal without one, but not without two."""

    count: int = 1
    step_name: ClassVar[str] = "removal"

    @property
    def is_requested(self) -> bool:
        """Return True if any Relu is to be removed."""
        return self.count > 0

    def apply(self, model: ir.Model) -> StageResult:
        """Run the pass."""
        changed = run_passes(model, (DeclaredPass(ReluRemovalPass(self.count), "keeps"),), NormalizeError)
        return StageResult(model, changed, ("Relu was looked for.",), measure_coverage(model))

    def summary(self, result: StageResult) -> str:
        """Return whether something changed."""
        return f"changed {result.changed}"


class EarlyReluRemoval(ReluRemoval):
    """The same removal before normalization, on the graph of the file."""

    precedes_normalization: ClassVar[bool] = True

    def metadata(self, model: ir.Model) -> Mapping[str, Any]:
        """Return values for a key of the file and for a missing key."""
        return {INPUTS_KEY: [value.name for value in model.graph.inputs], "winml.model": "new"}


class InterruptedRemoval(ReluRemoval):
    """Stopped by the user when the file is written, but not in its place."""

    def compare(self, source: Path, written: Path, seed: int) -> VerificationInfo:
        """Stop."""
        assert (True, 7) == (written.is_file() and written != source, seed)
        raise KeyboardInterrupt


def save(path: Path, body: str = BODY, *, stamped: bool = False, data: bool = False) -> Path:
    """Write a graph with tags; ``data`` keeps its weights outside."""
    model = parse(body)
    if stamped:
        stamp(model)
    ir.save(model, path, external_data=f"{path.name}.data" if data else None, size_threshold_bytes=0)
    return path


def operators(path: Path) -> list[str]:
    """Return the operators of a file."""
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def files(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by its name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_result_is_plain_verified_tagged_and_counted_in_the_file(tmp_path: Path) -> None:
    """The steps run in order, and every number describes the written file."""
    source = save(tmp_path / "in.onnx", UNNORMALIZED_BODY)
    result = transform_file(GraphFileTask(source, tmp_path / "out.onnx"), ReluRemoval()).file
    assert ["Add", "Relu", "Mul"] == operators(result.model_path)
    assert is_normalized(ir.load(result.model_path))
    assert (False, True, 1) == (result.is_copy, result.is_plain, result.normalizations)
    assert (5, 3) == (result.before.nodes, result.after.nodes)
    assert result.after.size_bytes == result.model_path.stat().st_size
    assert (3, True) == (result.coverage.nodes, result.coverage.is_complete)
    assert result.verification is not None
    assert result.verification.is_verified
    assert ("Relu was looked for.",) == result.notes
    assert ["reading", "normalization", "removal", "writing and verification"] == [step.name for step in result.steps]
    assert "changed True" == result.steps[2].summary


@pytest.mark.parametrize(("version", "inputs"), [(3, ["x"]), (6, ["x", "w"])])
def test_weights_of_old_files_become_constants(version: int, inputs: list[str], tmp_path: Path) -> None:
    """IR version 3 requires initializers among the inputs; in later versions, such an input is a default."""
    model = parse("m (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { a = Mul (x, w)  y = Neg (a) }", 8)
    model.ir_version = version
    ir.save(model, tmp_path / "in.onnx")
    result = transform_file(GraphFileTask(tmp_path / "in.onnx", tmp_path / "out.onnx"), ReluRemoval()).file
    written = onnx.load(result.model_path)
    assert inputs == [value.name for value in written.graph.input]
    assert max(version, 4) == written.ir_version
    assert (version == 3) == any("no longer in the inputs" in note for note in result.notes)
    assert result.verification is not None
    assert result.verification.is_verified


def test_work_with_changed_outputs_writes_no_file(tmp_path: Path) -> None:
    """The comparison with the source finds the change, unless verification is off."""
    source = save(tmp_path / "in.onnx", stamped=True)
    before = files(tmp_path)
    with pytest.raises(VerificationError) as raised:
        transform_file(GraphFileTask(source, tmp_path / "new" / "out.onnx"), ReluRemoval(2))
    assert "step 4 of 4, writing and verification" == raised.value.step
    assert (before, False) == (files(tmp_path), (tmp_path / "new").exists())
    result = transform_file(GraphFileTask(source, tmp_path / "out.onnx", verify=False), ReluRemoval(2)).file
    assert (None, ["Add", "Mul"]) == (result.verification, operators(result.model_path))


def test_plain_source_without_a_request_is_copied(tmp_path: Path) -> None:
    """The result has the bytes of the source, and a later change of one does not reach the other."""
    source = save(tmp_path / "in.onnx", stamped=True)
    result = transform_file(GraphFileTask(source, tmp_path / "out.onnx"), ReluRemoval(0)).file
    assert source.read_bytes() == result.model_path.read_bytes()
    assert not source.samefile(result.model_path)
    assert (True, True, 0, None) == (result.is_copy, result.is_plain, result.normalizations, result.verification)
    assert result.before == result.after
    assert result.coverage.is_complete
    assert ALREADY_NORMALIZED == result.notes[0]
    # A build links files of its own folder.
    task = GraphFileTask(source, tmp_path / "linked.onnx", shares_files=True)
    assert source.samefile(transform_file(task, ReluRemoval(0)).file.model_path)


def test_damaged_stamp_is_ignored(tmp_path: Path) -> None:
    """The graph is normalized again, and the result bears a stamp that fits."""
    source = save(tmp_path / "in.onnx", UNNORMALIZED_BODY, stamped=True)
    model = ir.load(source)
    model.metadata_props[NORMALIZED_KEY] = '{"version": 2, "fingerprint": "damaged'
    ir.save(model, source)
    result = transform_file(GraphFileTask(source, tmp_path / "out.onnx"), ReluRemoval(0)).file
    assert (False, 1) == (result.is_copy, result.normalizations)
    assert "Identity" not in operators(result.model_path)
    assert is_normalized(ir.load(result.model_path))


def test_duplicate_keys_are_merged_with_a_note(tmp_path: Path) -> None:
    """Such a file is rewritten with every key once in spite of its stamp, even without normalization."""
    source = save(tmp_path / "in.onnx", stamped=True)
    model = onnx.load(source)
    model.metadata_props.add(key="author", value="one")
    model.metadata_props.add(key="author", value="two")
    model.graph.node[0].metadata_props.extend(list(model.graph.node[0].metadata_props))
    onnx.save(model, source)
    told = (
        "1 node(s) had a metadata key several times: merged.",
        "The model had author several times: the last was used.",
    )
    for name, skip in (("out", False), ("skipped", True)):
        task = GraphFileTask(source, tmp_path / f"{name}.onnx", skip_normalization=skip, copies_any_form=True)
        result = transform_file(task, ReluRemoval(0)).file
        assert (False, told) == (result.is_copy, result.notes[:2])
        written = onnx.load(result.model_path)
        for holder in (written, *written.graph.node):
            keys = [entry.key for entry in holder.metadata_props]
            assert len(keys) == len(set(keys))
        assert "two" == next(entry.value for entry in written.metadata_props if entry.key == "author")


@pytest.mark.parametrize("change", ["a name taken away", "a weight nobody reads"])
def test_stamp_does_not_hold_for_a_graph_that_broke_a_promise_later(change: str, tmp_path: Path) -> None:
    """Normalization repairs a normalized file that another tool changed."""
    source = save(tmp_path / "in.onnx", UNNORMALIZED_BODY)
    plain = transform_file(GraphFileTask(source, tmp_path / "plain.onnx"), ReluRemoval(0)).file.model_path
    model = onnx.load(plain)
    if change == "a name taken away":
        model.graph.node[1].name = ""
    else:
        model.graph.initializer.add().CopyFrom(onnx.helper.make_tensor("unread", onnx.TensorProto.FLOAT, [1], [0]))
    onnx.save(model, plain)
    result = transform_file(GraphFileTask(plain, tmp_path / "out.onnx"), ReluRemoval(0)).file
    assert (False, 1) == (result.is_copy, result.normalizations)
    mended = onnx.load(result.model_path).graph
    assert len(mended.node) == len({node.name for node in mended.node} - {""})
    assert ["w"] == [tensor.name for tensor in mended.initializer]


def test_unnormalized_result_has_no_stamp(tmp_path: Path) -> None:
    """A result that was not normalized has no stamp."""
    source = save(tmp_path / "in.onnx", UNNORMALIZED_BODY)
    task = GraphFileTask(source, tmp_path / "out.onnx", skip_normalization=True)
    written = transform_file(task, ReluRemoval(0)).file
    assert (False, False, 0) == (written.is_copy, written.is_plain, written.normalizations)
    assert NORMALIZED_KEY not in ir.load(written.model_path).metadata_props
    task = GraphFileTask(source, tmp_path / "copy.onnx", skip_normalization=True, copies_any_form=True)
    copied = transform_file(task, ReluRemoval(0)).file
    assert (True, False, 0) == (copied.is_copy, copied.is_plain, copied.normalizations)
    assert source.read_bytes() == copied.model_path.read_bytes()
    assert ALREADY_NORMALIZED not in copied.notes


def test_work_before_normalization_sees_the_graph_of_the_file(tmp_path: Path) -> None:
    """The changed graph is normalized afterwards, and only metadata keys of the file are updated."""
    model = parse(UNNORMALIZED_BODY)
    stamp(model)
    model.metadata_props[INPUTS_KEY] = "[]"
    model.metadata_props[EXPORT_KEY] = '{"exporter":"other","opset_produced":1}'
    ir.save(model, tmp_path / "in.onnx")
    result = transform_file(GraphFileTask(tmp_path / "in.onnx", tmp_path / "out.onnx"), EarlyReluRemoval()).file
    assert ["reading", "removal", "normalization", "writing and verification"] == [step.name for step in result.steps]
    assert (["Add", "Relu", "Mul"], 1) == (operators(result.model_path), result.normalizations)
    metadata = ir.load(result.model_path).metadata_props
    assert ["x"] == json.loads(metadata[INPUTS_KEY])
    assert {"exporter": "other", "opset_produced": 17} == json.loads(metadata[EXPORT_KEY])
    assert "winml.model" not in metadata


def test_weights_are_placed_as_requested(tmp_path: Path) -> None:
    """Data are outside on request or above a size, inside on request; data of an earlier output are removed."""
    source = save(tmp_path / "in.onnx", WIDE_BODY, data=True)
    (tmp_path / "new").mkdir()
    output = tmp_path / "new" / "out.onnx"
    placed = {}
    for name, wish in {
        "outside": {"external_data": True},
        "inside": {"external_data": False, "external_from_bytes": 1},
        "from a size on": {"external_from_bytes": 400},
        "where they must": {"external_from_bytes": 401},
    }.items():
        task = GraphFileTask(source, output, overwrite=True, **wish)  # type: ignore[arg-type]
        result = transform_file(task, ReluRemoval()).file
        placed[name] = [file.path.name for file in result.files]
        assert placed[name] == sorted(files(output.parent))
        assert all(is_data_of("out.onnx", data) for data in placed[name][1:])
    assert {"outside": 2, "inside": 1, "from a size on": 2, "where they must": 1} == {
        name: len(names) for name, names in placed.items()
    }


def test_copy_shares_the_data_of_its_source_if_allowed(tmp_path: Path) -> None:
    """The copy has data of its own if sharing is not allowed."""
    source = save(tmp_path / "in.onnx", stamped=True, data=True)
    shared = GraphFileTask(source, tmp_path / "shared.onnx", shares_files=True)
    assert ["shared.onnx"] == [file.path.name for file in transform_file(shared, ReluRemoval(0)).file.files]
    own = GraphFileTask(source, tmp_path / "own.onnx")
    model, data = (file.path.name for file in transform_file(own, ReluRemoval(0)).file.files)
    assert "own.onnx" == model
    assert is_data_of(model, data)
    assert {"in.onnx", "in.onnx.data", "own.onnx", data, "shared.onnx"} == set(files(tmp_path))


def test_impossible_output_is_refused_before_any_read(tmp_path: Path) -> None:
    """The file there stays, and the source need not even exist."""
    (tmp_path / "out.onnx").write_bytes(b"earlier")
    with pytest.raises(OutputExistsError) as raised:
        transform_file(GraphFileTask(tmp_path / "missing.onnx", tmp_path / "out.onnx"), ReluRemoval())
    assert "" == raised.value.step
    assert b"earlier" == (tmp_path / "out.onnx").read_bytes()
    with pytest.raises(UsageError):
        transform_file(GraphFileTask(tmp_path / "missing.onnx", tmp_path / "out.txt"), ReluRemoval())


def test_graph_with_undefined_values_is_refused(tmp_path: Path) -> None:
    """A library would make up the missing value."""
    source = save(tmp_path / "in.onnx")
    model = onnx.load(source)
    model.graph.node[0].input[1] = "nowhere"
    onnx.save(model, source)
    with pytest.raises(InputError):
        transform_file(GraphFileTask(source, tmp_path / "out.onnx", verify=False), ReluRemoval())
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("data", [False, True])
def test_interruption_leaves_the_earlier_files(tmp_path: Path, data: bool) -> None:
    """The old model and data remain, and no other file."""
    source = save(tmp_path / "in.onnx", data=data)
    task = GraphFileTask(source, tmp_path / "out.onnx", external_data=True, overwrite=True, seed=7)
    transform_file(task, ReluRemoval(0))
    before = files(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        transform_file(task, InterruptedRemoval())
    assert before == files(tmp_path)


_KILLED = """
import os, sys
from pathlib import Path
from winml.modelkit.transform.graph_file import GraphFileTask, GraphWork, transform_file
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.tags.tagging import measure_coverage

class Killed(GraphWork):
    step_name = "nothing"

    def apply(self, model):
        return StageResult(model, False, (), measure_coverage(model))

    def summary(self, result):
        return ""

    def compare(self, source, written, seed):
        os._exit(9)

transform_file(GraphFileTask(Path(sys.argv[1]), Path(sys.argv[2]), external_data=True, overwrite=True), Killed())
"""


def test_killed_process_leaves_the_earlier_files(tmp_path: Path) -> None:
    """The unfinished files are in a hidden folder, not under the name of the output."""
    source = save(tmp_path / "in.onnx", UNNORMALIZED_BODY)
    output = tmp_path / "out.onnx"
    transform_file(GraphFileTask(source, output, external_data=True), ReluRemoval())
    before = files(tmp_path)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(source), str(output)], check=False, capture_output=True)
    assert 9 == done.returncode, done.stderr
    after = files(tmp_path)
    assert before == {name: content for name, content in after.items() if "winml-partial" not in name}
    assert any(name.endswith("new/out.onnx") for name in after.keys() - before.keys())
