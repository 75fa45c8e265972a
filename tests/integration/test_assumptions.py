"""Assumptions of a graph about its inputs, listed as data wherever a program reads them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from e2e.in_process import run_here
from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.export.records import ExportResult
from winml.modelkit.file_names import sidecar_path
from winml.modelkit.inspect.onnx_inspection import inspect_onnx

Forward = Callable[[Any, torch.Tensor], torch.Tensor]
KEYS = ["kind", "value", "file", "line", "message"]


class Assuming(nn.Module):
    """A model with a forward function of this module."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mode", torch.tensor(1))
        self.register_buffer("calls", torch.tensor(0))
        self.counted, self.of_model = 0, forward
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the forward function."""
        return self.of_model(self, x)


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches at a value that no draw reaches."""
    return self.other(x) if x.sum() > 1e6 else self.linear(x)


def values_in_c(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads values by tolist(), which torch's dispatcher does not see."""
    return self.other(x) if max(x.flatten().tolist()) > 1e6 else self.linear(x)


def large_size(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches at a size above the tried sizes."""
    return self.other(x) if x.shape[1] > 5000 else self.linear(x)


def later_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes the output at the fourth call, not at the second."""
    self.calls += 1
    return self.linear(x) * torch.where(self.calls > 3, 2.0, 1.0)


def first_call(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts its calls and adds the count."""
    self.counted += 1
    return self.linear(x) + self.counted


def nothing(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has assertions, errors and a mode of the weights, none of which depends on the inputs."""
    assert x.isfinite().all()
    if x.abs().max() > 1e9:
        raise ValueError("too large")
    return self.linear(x) if self.mode.item() == 1 else self.other(x)


def exported(forward: Forward, path: Path, **options: Any) -> ExportResult:
    config = WinMLExportConfig(exporter="torchscript", **options)
    return HTPExporter(config).export(Assuming(forward), path, inputs={"x": torch.randn(2, 6, 4)})


def line_of(forward: Forward, text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = forward.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines, 1) if number > first and text in line)


@pytest.mark.parametrize(
    ("forward", "kind", "value", "text"),
    [
        (branch, "branch", "False", "x.sum() > 1e6"),
        (values_in_c, "value", None, "max(x.flatten()"),
        (large_size, "size", "False", "x.shape[1] > 5000"),
        (first_call, "first_call", "counted", None),
        (later_call, "first_call", "calls", None),
    ],
)
def test_assumption_is_the_same_record_in_summary_sidecar_and_inspection(
    forward: Forward, kind: str, value: str | None, text: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    result = exported(forward, path, dynamic_axes={"x": {1: "tokens"}})
    verification = result.only_part.verification
    assert verification is not None
    assert (verification.agrees, verification.is_verified) == (True, False)
    record = json.loads(json.dumps(result.as_record()))["verification"]
    (item,) = record["assumed"]
    assert [key for key in item if key != "input"] == KEYS
    assert (item["kind"], item["value"]) == (kind, value)
    place = (None, None) if text is None else (Path(__file__).name, line_of(forward, text))
    assert (item["file"], item["line"]) == place
    assert item.get("input") == {"branch": "x", "value": "x", "size": "tokens"}.get(kind)
    assert item["message"] in result.notes
    sidecar = json.loads(sidecar_path(path).read_text(encoding="utf-8"))
    assert sidecar["verification"] == record
    assert inspect_onnx(path).as_record()["assumed"] == record["assumed"]


def longest_so_far(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Adds a table that depends on the longest input so far."""
    if x.shape[1] > getattr(self, "longest", 0):
        self.longest = x.shape[1]
        self.table = torch.arange(x.shape[1]).float()[:, None] / x.shape[1]
    return self.linear(x) + self.table[: x.shape[1]]


def test_state_that_grows_with_the_inputs_is_an_assumption(tmp_path: Path) -> None:
    """A second call at the traced sizes has the same outputs, one at other sizes has not."""
    config = WinMLExportConfig(exporter="dynamo", dynamic_axes={"x": {1: "tokens"}})
    result = HTPExporter(config).export(
        Assuming(longest_so_far), tmp_path / "model.onnx", inputs={"x": torch.randn(2, 6, 4)}
    )
    (assumption,) = result.only_part.assumed
    assert ("first_call", "longest, table") == (assumption.kind, assumption.value)


def written_through_a_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes a column of a new tensor through a view, and reads the tensor."""
    limits = torch.zeros(len(x), 2)
    limits[:, 0] = x.amax((1, 2))
    return self.other(x) if limits.max() > 1e6 else self.linear(x)


def written_into_an_argument(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls an operator that writes into ``out``."""
    sums = torch.zeros(2, 4)
    torch.sum(x[0], 0, out=sums[0])
    return self.other(x) if sums.max() > 1e6 else self.linear(x)


def written_into_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls an operator that writes into each tensor of a list."""
    sums = torch.zeros(4)
    torch._foreach_add_([sums], [x[0, 0]])
    return self.other(x) if sums.max() > 1e6 else self.linear(x)


def number_of_selected(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a size that depends on values."""
    return self.other(x) if x[x > 1e6].numel() else self.linear(x)


def loop_over_selected(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Loops over selected rows; the number of iterations depends on values."""
    result = self.linear(x)
    for row in x[0][x[0, :, 0] > 1e6]:
        result = result + row
    return result


def number_of_repeated(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Repeats rows by a number that depends on values."""
    repeated = torch.repeat_interleave(x[0], (x[0, :, 0] > 1e6).long(), dim=0)
    return self.other(x) if len(repeated) else self.linear(x)


def error_caught(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes another branch if an assertion fails."""
    try:
        assert x.max() < 1e6
    except AssertionError:
        return self.other(x)
    return self.linear(x)


def check(x: torch.Tensor) -> None:
    if x.max() > 1e6:  # a helper raises
        raise ValueError


def error_of_a_helper_suppressed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Suppresses the error of a called function."""
    result = self.other(x)
    with contextlib.suppress(ValueError):
        check(x)
        result = self.linear(x)
    return result


def error_of_an_operator_caught(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Catches an error that an operator raises by values."""
    try:
        torch.linalg.cholesky((1e6 - x.max()) * torch.eye(2))
    except RuntimeError:
        return self.other(x)
    return self.linear(x)


def applied_by_element(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes each element in Python."""
    return self.linear(x.clone().apply_(lambda value: min(value, 1e6)))


def read_by_a_thread(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads values in a thread: torch's modes belong to one thread."""
    with ThreadPoolExecutor(1) as pool:
        most = pool.submit(lambda: float(x.max())).result()
    return self.other(x) if most > 1e6 else self.linear(x)


def read_from_a_pickle(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads values from a pickled copy, which torch does not track."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return self.other(x) if torch.load(file).max() > 1e6 else self.linear(x)


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (written_through_a_view, "limits.max()"),
        (written_into_an_argument, "sums.max()"),
        (written_into_a_list, "sums.max()"),
        (number_of_selected, "numel()"),
        (loop_over_selected, "for row in"),
        (number_of_repeated, "len(repeated)"),
        (error_caught, "assert x"),
        (error_of_a_helper_suppressed, "a helper raises"),
        (error_of_an_operator_caught, "cholesky"),
        (applied_by_element, "apply_"),
        (read_by_a_thread, "float("),
        (read_from_a_pickle, "torch.save"),
    ],
)
def test_line_that_reads_values_in_a_roundabout_way_is_named(forward: Forward, text: str, tmp_path: Path) -> None:
    verification = exported(forward, tmp_path / "model.onnx").only_part.verification
    assert verification is not None
    assert (verification.agrees, verification.is_verified) == (True, False)
    (item,) = verification.assumed
    line = line_of(check if "helper" in text else forward, text)
    assert (item.input, item.file, item.line) == ("x", Path(__file__).name, line)


def rows_selected(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Selects rows: one size depends on values, the other does not."""
    rows = x[x[..., 0] > 0]
    width = int(rows.shape[1])
    return self.linear(rows).reshape(-1, 2, width // 2)


def classes_one_by_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Loops over a stated number of classes."""
    chosen = functional.one_hot(x.argmax(-1), 4).permute(2, 0, 1)
    result = self.linear(x)
    for number in range(chosen.shape[0]):
        result = result + chosen[number][..., None] * self.other(x)
    return result


def error_replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Replaces an error by another error."""
    try:
        assert x.max() < 1e6
    except AssertionError as error:
        raise ValueError("too large") from error
    return self.linear(x)


def mode_beside_written_views(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes through a view into one tensor, and reads another."""
    limits = torch.zeros(len(x))
    limits[0] = x.max()
    return self.linear(x) * limits.sum() if self.mode.item() == 1 else self.other(x)


def rows_by_seven(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Divides by one of two dynamic sizes."""
    return self.linear(x) if len(x) % 7 else self.other(x)


def tokens_of_a_result(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches at a size of a computed tensor."""
    return self.linear(x) if self.other(x).shape[1] < 900 else self.other(x)


@pytest.mark.parametrize(("forward", "sizes"), [(rows_by_seven, "rows"), (tokens_of_a_result, "rows, tokens")])
def test_deciding_size_is_named_before_any_comparison(forward: Forward, sizes: str, tmp_path: Path) -> None:
    axes = {"x": {0: "rows", 1: "tokens"}}
    part = exported(forward, tmp_path / "model.onnx", dynamic_axes=axes, verify=False).only_part
    (item,) = part.assumed
    assert (item.kind, item.input, item.file) == ("size", sizes, Path(__file__).name)
    # A fixed size needs no assumption.
    assert not exported(forward, tmp_path / "fixed.onnx", verify=False).only_part.assumed


@pytest.mark.parametrize(
    "forward",
    [nothing, large_size, rows_selected, classes_one_by_one, error_replaced, mode_beside_written_views],
)
def test_inputs_without_influence_cause_no_assumption(forward: Forward, tmp_path: Path) -> None:
    result = exported(forward, tmp_path / "model.onnx")  # of fixed sizes, so that no size decides either
    verification = result.only_part.verification
    assert verification is not None
    assert (verification.is_verified, verification.assumed) == (True, ())


def test_accepted_assumptions_are_listed_and_the_file_is_verified(tmp_path: Path) -> None:
    verification = exported(branch, tmp_path / "model.onnx", accept_assumptions=True).only_part.verification
    assert verification is not None
    assert verification.is_verified
    assert [item.kind for item in verification.assumed or ()] == ["branch"]


def test_inspection_ignores_sidecars_of_other_files_and_of_version_1(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    exported(branch, path)
    sidecar = json.loads(sidecar_path(path).read_text(encoding="utf-8"))
    for changed in ({**sidecar, "model_sha256": "0" * 64}, {**sidecar, "verification": None}):
        sidecar_path(path).write_text(json.dumps(changed), encoding="utf-8")
        assert inspect_onnx(path).assumed is None
    del sidecar["verification"]["assumed"]
    sidecar_path(path).write_text(json.dumps({**sidecar, "schema_version": 1}), encoding="utf-8")
    assert inspect_onnx(path).assumed is None


FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(x) if x.sum() > 1e6 else self.one(x)

def build():
    return Net().eval()

def example_inputs():
    return {"x": torch.randn(2, 4)}
"""


def printed(*arguments: str) -> Any:
    outcome = run_here(*arguments)
    assert 0 == outcome.code, outcome.err
    return json.loads(outcome.out)


@pytest.mark.parametrize("accepts", [False, True])
def test_json_of_export_and_build_lists_assumptions(tmp_path: Path, *, accepts: bool) -> None:
    (tmp_path / "net.py").write_text(FACTORY, encoding="utf-8")
    quiet = ["-m", f"{tmp_path / 'net.py'}:build", "-q", *(["--accept-assumptions"] * accepts)]
    options = [*quiet, "--format", "json"]
    verification = printed("export", *options, "-o", str(tmp_path / "net.onnx"))["verification"]
    assert verification["is_verified"] is accepts
    (item,) = verification["assumed"]
    assert ("branch", "net.py", 12) == (item["kind"], item["file"], item["line"])
    built = printed("build", *options, "-o", str(tmp_path / "built"))
    for manifest in (built, json.loads((tmp_path / "built" / "build_manifest.json").read_text())):
        (part,) = manifest["parts"]
        assert part["stages"][0]["assumed"] == verification["assumed"]
    sidecar = json.loads(sidecar_path(tmp_path / "built" / "model.onnx").read_text(encoding="utf-8"))
    assert sidecar["verification"]["is_verified"] is accepts
    for verb, output in (("export", "quiet.onnx"), ("build", "built")):
        done = run_here(verb, *quiet, "-o", tmp_path / output)
        assert (0, "") == (done.code, done.out)
        assert accepts == (not done.err)
        assert accepts or "net.py:12 reads the value" in done.err
