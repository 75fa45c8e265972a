"""Refusals of ``--dry-run``: the exit codes and messages of a run that fails before it loads weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from e2e.in_process import run_here
from e2e.workplace import Outcome
from winml.modelkit.builds.layouts.layout import LAYOUTS

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
CHANGES: dict[str, dict[str, object]] = {
    "plain": {},
    "code": {"auto_map": {"AutoModel": "code.M"}},
    "quantized": {"quantization_config": GPTQ},
    "unknown class": {"architectures": ["NoSuchModel"]},
    "unknown type": {"model_type": "nosuch"},
    "wrong weights": {"vocab_size": 7},
}
"""Name → keys of the config of a checkpoint."""
FACTORY = """
import torch

def make():
    return torch.nn.Linear(4, 4).eval()

def example_inputs():
    return torch.zeros(1, 4)
"""
REQUESTS: dict[str, tuple[str, ...]] = {
    "not on this machine": ("missing",),
    "needs code": ("code",),
    "quantized tensors missing": ("quantized",),
    "unknown class": ("unknown class",),
    "unknown type": ("unknown type",),
    "task of other models": ("plain", "--task", "image-classification"),
    "class of other models": ("plain", "--model-class", "Nope"),
    "size too large": ("plain", "--shape-config", '{"sequence_length": 100000}'),
    "layout without a class": ("plain", "--layout", "genai"),
    "functions of no module": ("plain", "--functions", "Nope"),
    # The weights, which do not fit the config, are not read before.
    "layout without a class for the task": (
        "wrong weights",
        "--task",
        "next-sentence-prediction",
        "--layout",
        "optimum",
    ),
    **{f"layout {name} of a factory": ("net.py:make", "--layout", name) for name in LAYOUTS.names},
}


@pytest.fixture(name="checkpoints", autouse=True)
def make_checkpoints(here: Path, small_bert: Path) -> Path:
    """Copies of a checkpoint with changed configs."""
    for name, keys in CHANGES.items():
        folder = Path(shutil.copytree(small_bert, here / name))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **keys}), encoding="utf-8")
    (here / "net.py").write_text(FACTORY, encoding="utf-8")
    return here


def _complaint(outcome: Outcome) -> str:
    return outcome.err[outcome.err.index("error") :].partition(": ")[2]


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        (verb, name)
        for verb in ("export", "build")
        for name, (_, *options) in REQUESTS.items()
        if {"export": "--layout", "build": "--functions"}[verb] not in options
    ],
)
def test_dry_run_refuses_the_same_requests_as_the_run(checkpoints: Path, verb: str, name: str) -> None:
    """Neither the plan nor the run writes a file."""
    model, *options = REQUESTS[name]
    output = {"export": "out/model.onnx", "build": "out"}[verb]
    arguments = (verb, "-m", model, "-o", output, *options)
    planned = run_here(*arguments, "--dry-run")
    assert not (checkpoints / "out").exists()
    done = run_here(*arguments)
    assert planned.code == done.code != 0
    assert _complaint(planned) == _complaint(done)


ONNX_REQUESTS = {
    "batch norm in a convolution": ("quantize", "--mode", "qdq", "--exclude", "norm"),
    "linear layer of a convolutional network": ("quantize", "--precision", "int8", "--mode", "dynamic"),
    "module without nodes to quantize": ("quantize", "--mode", "qdq", "--exclude", "probabilities"),
    "sensitivity of a convolution only": ("quantize", "--sensitivity", "--mode", "dynamic", "--include", "conv"),
    "nothing left": ("quantize", "--mode", "qdq", "--exclude", "conv", "--exclude", "head"),
    "module without nodes to optimize": ("optimize", "--level", "basic", "--module", "norm", "--exclude", "Net"),
}
"""Verbs and options that a run refuses for the normalized graph of a convolutional network."""


@pytest.fixture(name="network", scope="module")
def make_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with tags for its modules of torch.nn."""
    import torch
    from torch import nn

    from winml.modelkit import HTPExporter, WinMLExportConfig

    layers = {
        "conv": nn.Conv2d(3, 32, 3),
        "norm": nn.BatchNorm2d(32),
        "act": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "head": nn.Linear(32, 2),
        "probabilities": nn.Softmax(1),
    }
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    path = tmp_path_factory.mktemp("network") / "model.onnx"
    config = WinMLExportConfig(exporter="torchscript", verify=False, torch_module="all")
    HTPExporter(config).export(net.eval(), path, {"input": torch.randn(1, 3, 8, 8)})
    return path


@pytest.mark.parametrize("name", ONNX_REQUESTS)
def test_dry_run_of_an_onnx_file_refuses_the_same_requests_as_the_run(here: Path, network: Path, name: str) -> None:
    """Some refusals depend on batch norms folded into the weights."""
    verb, *options = ONNX_REQUESTS[name]
    arguments = (verb, "-m", network, "-o", "out.json" if "--sensitivity" in options else "out.onnx", *options)
    planned, done = run_here(*arguments, "--dry-run"), run_here(*arguments)
    assert planned.code == done.code != 0
    assert _complaint(planned) == _complaint(done)
    assert not list(here.glob("out*"))


def test_factory_without_its_layout_is_built_and_run() -> None:
    """The refusal suggests it, and does not suggest ``--task``, which a factory does not have."""
    build = ("build", "-m", "net.py:make", "-o", "out")
    refused = run_here(*build, "--layout", "optimum")
    assert 2 == refused.code
    assert "winml run" in refused.err
    assert "--task" not in refused.err
    assert [0, 0] == [run_here(*build).code, run_here("run", "out", "--input", "input=[[1,2,3,4]]").code]
