"""Files with modules as functions: requests, and results of other commands on such files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from module_chains import save_chain
from winml.modelkit import HTPExporter
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.inspect.onnx_inspection import inspect_onnx
from winml.modelkit.optimize.verb import optimize_onnx
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.ort.sessions import Session
from winml.modelkit.profile.by_module import profile_modules
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.transform.retag import carry_between


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A normalized graph of nested modules."""
    return optimize_onnx(save_chain(tmp_path / "source.onnx"), tmp_path / "chain.onnx").model_path


def test_all_modules_become_functions_with_equal_outputs(chain: Path, tmp_path: Path) -> None:
    """The root is the graph, and the function of a module calls the functions of its inner modules."""
    result = optimize_onnx(chain, tmp_path / "functions.onnx", functions="all")
    assert result.functions is not None
    assert {"M.A.0": 1, "M.A.0.B": 1, "M.C": 1, "M.A.1": 1} == result.functions.functions
    assert (11, 4, ()) == (result.functions.written_nodes, result.functions.graph_nodes, result.functions.left_out)
    feeds = {"x": np.ones((2, 32), np.float32)}
    expected, actual = (Session(path).run(feeds)["y"] for path in (chain, result.model_path))
    assert np.array_equal(expected, actual)


def test_file_with_functions_becomes_its_original_file(chain: Path, tmp_path: Path) -> None:
    """The result without options is not a copy, and a second request for functions starts from the graph."""
    functions = optimize_onnx(chain, tmp_path / "functions.onnx", functions="classes").model_path
    again = optimize_onnx(functions, tmp_path / "again.onnx", functions="classes").model_path
    assert functions.read_bytes() == again.read_bytes()
    flat = optimize_onnx(functions, tmp_path / "flat.onnx")
    assert (False, chain.read_bytes()) == (flat.is_copy, flat.model_path.read_bytes())
    assert any(note.startswith("4 ") for note in flat.notes)


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("Nothing", "'Nothing'"),
        ("M", "the root"),
    ],
)
def test_functions_without_a_match_are_refused(chain: Path, tmp_path: Path, selector: str, message: str) -> None:
    """No file is written."""
    with pytest.raises(UsageError, match=message):
        optimize_onnx(chain, tmp_path / "functions.onnx", functions=selector)
    assert not (tmp_path / "functions.onnx").exists()


@pytest.mark.parametrize(
    ("selector", "begun"),
    [
        # No module has this class or path, whatever runs.
        ("Blok", ["model preparation"]),
        ("body.5", ["model preparation"]),
        ("", ["model preparation"]),
        # The modules that run, and their tags, are known after a run.
        ("/Net/Nothing", ["model preparation", "input generation", "hierarchy building"]),
        ("Net", ["model preparation", "input generation", "hierarchy building"]),
    ],
)
def test_export_refuses_impossible_functions_early(selector: str, begun: list[str], tmp_path: Path) -> None:
    """The error comes before the model runs if names are enough, else before the graph is exported."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    events: list[str] = []
    exporter = HTPExporter(on_step=lambda event: events.append(event.name))
    with pytest.raises(UsageError):
        exporter.export(Net(), tmp_path / "net.onnx", torch.ones(2, 4), functions=selector)
    assert begun == list(dict.fromkeys(events))


def test_file_without_tags_has_no_functions(tmp_path: Path) -> None:
    """Names of nodes are no tags: the nodes of functions could not be given theirs back."""
    source = save_chain(tmp_path / "source.onnx", tagged=False)
    begun = []
    with pytest.raises(InputError, match="module information"):
        optimize_onnx(source, tmp_path / "functions.onnx", functions="all", on_step=begun.append)
    # Refused by the plan, before the first step.
    assert [] == begun


def test_older_format_is_raised(tmp_path: Path) -> None:
    """Functions have metadata and shapes since IR version 10."""
    source = save_chain(tmp_path / "source.onnx")
    model = onnx.load(source)
    model.ir_version = 7
    onnx.save(model, source)
    result = optimize_onnx(source, tmp_path / "functions.onnx", functions="all")
    assert 10 == onnx.load(result.model_path).ir_version
    assert any("IR version 7" in note for note in result.notes)


def test_other_flows_see_the_graph(chain: Path, tmp_path: Path) -> None:
    """Inspection and profile tell of modules as if there were no functions; tags are not brought to such a file."""
    functions = optimize_onnx(chain, tmp_path / "functions.onnx", functions="all").model_path
    expected, actual = inspect_onnx(chain), inspect_onnx(functions)
    assert (expected.modules, expected.total, expected.operators) == (actual.modules, actual.total, actual.operators)
    assert 4 == len(actual.functions)
    profile = profile_modules(functions, RunOptions(shown="functions"), LatencyOptions(iterations=2, warmup=0)).profile
    assert {"/M", "/M/A.0", "/M/A.0/B", "/M/C", "/M/A.1"} == set(profile.tags.values())
    with pytest.raises(InputError, match="4 modules"):
        carry_between(chain, functions, tmp_path / "tagged.onnx", overwrite=False)
