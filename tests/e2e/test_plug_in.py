"""A package that extends winml: installed into a separate environment, used, and removed again."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnxruntime
import pytest
import safetensors.numpy

from architecture.sources import REPOSITORY, package_folder
from e2e.in_process import run_here
from e2e.workplace import Outcome, Workplace
from sweep_models import write_models

EXAMPLE = REPOSITORY / "examples" / "plugin"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the example is not part of an installed package")

_NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 4] x) => (float[1, 4] y)
{
    positive = Relu (x)
    same = Relu (positive)
    y = Neg (same)
}
"""


def _packages(folder: Path) -> Path:
    scheme = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "posix_prefix" if os.name != "nt" else "nt", scheme))


def _environment(folder: Path) -> Path:
    """Make a virtual environment with access to the packages of this one, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    places = [sysconfig.get_path("purelib"), *site.getsitepackages(), str(package_folder().parents[1])]
    lines = (f"import site; site.addsitedir({place!r})\n" for place in dict.fromkeys(places))
    (_packages(folder) / "shared.pth").write_text("".join(lines), encoding="utf-8")
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _pip(python: Path, *arguments: str | Path) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as a wheel."""
    folder = tmp_path_factory.mktemp("example")
    # setuptools writes into the folder that it builds from.
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    _pip(Path(sys.executable), "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder,
         folder / "source")  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the example is installed."""
    interpreter = _environment(tmp_path_factory.mktemp("environment") / "venv")
    _pip(interpreter, "install", "--no-deps", "--no-index", wheel)
    return interpreter


def _place(workplace: Workplace, python: Path) -> Workplace:
    onnx.save(onnx.parser.parse_model(_NET), workplace.folder / "net.onnx")
    return replace(workplace, program=(str(python), "-m", "winml.modelkit"))


@pytest.fixture
def extended(workplace: Workplace, python: Path) -> Workplace:
    """A workplace with a model, and with a winml that has the example."""
    return _place(workplace, python)


def _answer(outcome: Outcome) -> str:
    assert 0 == outcome.code, outcome.err
    return outcome.out


def test_verb_of_a_package_is_listed_and_run(extended: Workplace) -> None:
    """The verb is listed among the others, with the options of its command."""
    assert "operators  Count the operators of an ONNX file." in _answer(extended.winml("--help"))
    (extended.folder / "text.onnx").write_text("text", encoding="utf-8")
    counted, refused = extended.winml_in_turn(("operators", "net.onnx", "--format", "json"), ("operators", "text.onnx"))
    record = json.loads(_answer(counted))
    assert record.pop("schema_version")
    assert {"Relu": 2, "Neg": 1} == record
    assert 1 == refused.code


def test_layout_of_a_package_lays_out_a_build(extended: Workplace) -> None:
    """Command and config accept the layout; its files are beside the model."""
    config = '{"layout": "triton"}'
    *_, schema = map(
        _answer,
        extended.winml_in_turn(
            ("build", "-m", "net.onnx", "-o", "out", "--layout", "triton"),
            ("build", "-m", "net.onnx", "-o", "again", "-c", config, "--deploy-only"),
            ("config", "--schema"),
        ),
    )
    assert (extended.folder / "out" / "1" / "model.onnx").is_file()
    assert "onnxruntime" in (extended.folder / "out" / "config.pbtxt").read_text(encoding="utf-8")
    assert {"again/1/model.onnx", "again/config.pbtxt"} <= {*extended.files()}
    assert "triton" in json.loads(schema)["properties"]["layout"]["anyOf"][0]["enum"]


def _operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def test_pass_of_a_package_optimizes_from_command_config_and_python(extended: Workplace) -> None:
    """The pass is listed, runs if enabled by name or level, and its version is part of a stage's request."""
    config = '{"optim": {"idempotent_removal": true}}'
    listed, *_ = map(
        _answer,
        extended.winml_in_turn(
            ("optimize", "--list", "--level", "basic", "--format", "json"),
            ("optimize", "-m", "net.onnx", "-o", "fast.onnx", "--enable-idempotent-removal"),
            ("build", "-m", "net.onnx", "-o", "out", "-c", config),
        ),
    )
    entry = next(item for item in json.loads(listed)["capabilities"] if item["name"] == "idempotent_removal")
    assert (True, "basic", "winml") == (entry["enabled"], entry["on_from"], entry["engine"])
    assert ["Relu", "Neg"] == _operators(extended.folder / "fast.onnx")
    assert ["Relu", "Neg"] == _operators(extended.folder / "out" / "model.onnx")
    manifest = json.loads((extended.folder / "out" / "build_manifest.json").read_text(encoding="utf-8"))
    (stage,) = [stage for stage in manifest["parts"][0]["stages"] if stage["name"] == "optimize"]
    assert {"idempotent_removal": "winml-example 1.0"} == stage["origin"]["options"]["plug_ins"]
    program = "import winml.modelkit as m; m.optimize_onnx('net.onnx', 'py.onnx', idempotent_removal=True)"
    _answer(replace(extended, program=(extended.program[0], "-c", program)).winml())
    assert ["Relu", "Neg"] == _operators(extended.folder / "py.onnx")


_RATING = """
<ir_version: 8, opset_import: ["" : 17]>
rating (int64[batch, length] input_ids) => (float[batch, 1] logits)
{
    numbers = Cast <to = 1> (input_ids)
    logits = ReduceMean <axes = [1], keepdims = 1> (numbers)
}
"""


def test_task_of_a_package_judges_a_model(extended: Workplace) -> None:
    """The task has a metric, a limit and an agreement, for a model without a task in the file."""
    pytest.importorskip("datasets")
    here = extended.folder
    onnx.save(onnx.parser.parse_model(_RATING), here / "rating.onnx")
    words = {"type": "WordLevel", "vocab": {"bad": 0, "fair": 1, "good": 2}, "unk_token": "fair"}
    tokenizer = {"version": "1.0", "model": words, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    (here / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "fair"}
    (here / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (here / "ratings.csv").write_text("text,score\nbad bad,0\ngood fair,1.5\ngood good,3\n", encoding="utf-8")
    asked = ("eval", "rating.onnx", "--task", "text-regression", "--dataset", "ratings.csv", "--baseline", "none")
    outcome = extended.winml(*asked, "--batch-size", "1", "--max", "mean_absolute_error=0.1", "--format", "json")
    assert 3 == outcome.code, outcome.err
    record = json.loads(outcome.out)
    (metric,) = record["metrics"]
    assert ("text-regression", "mean_absolute_error") == (record["task"], metric["name"])
    assert abs(metric["value"] - 1 / 3) < 1e-6


_LIBRARY = """
#include <stddef.h>
#include <stdint.h>
static const char *name(const void *self) { return "ExampleExecutionProvider"; }
static void *nothing(void *self) { return NULL; }
static struct { uint32_t version; const void *functions[64]; } factory = {22, {name, name, nothing}};
void *CreateEpFactories(const char *asked, const void *api, const void *log, void **made, size_t most, size_t *count) {
  for (int i = 3; i < 64; i++) factory.functions[i] = nothing;
  made[0] = &factory;
  *count = 1;
  return NULL;
}
void *ReleaseEpFactory(void *made) { return NULL; }
"""
"""The smallest library that ONNX Runtime accepts as a provider's: one that finds no supported device."""


def test_provider_of_a_package_is_registered_by_its_library(extended: Workplace, tmp_path: Path) -> None:
    """ONNX Runtime refuses another file; the library is loaded, and reports its devices."""
    measured = ("perf", "net.onnx", "--ep", "example", "--iterations", "2")
    printed, outcome = extended.winml_in_turn(("sys", "--format", "json"), measured)
    listed = json.loads(_answer(printed))["execution_providers"]
    assert ["ExampleExecutionProvider"] == [entry["name"] for entry in listed if entry["short"] == "example"]
    assert 1 == outcome.code
    assert "libexample_provider.so" in outcome.err
    compiler = shutil.which("cc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("no C compiler makes a library here")
    (tmp_path / "provider.c").write_text(_LIBRARY, encoding="utf-8")
    library = tmp_path / "libprovider.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "provider.c"], check=True)
    outcome = replace(extended, variables={"WINML_EXAMPLE_LIBRARY": str(library)}).winml(*measured)
    assert 2 == outcome.code
    assert "finds no supported device" in outcome.err


@pytest.fixture
def added_here(python: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that gives this process the packages in the environment of the example."""
    return lambda: monkeypatch.syspath_prepend(str(_packages(python.parents[1])))


_HALTING = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class HaltingConfig(PretrainedConfig):
    model_type = "halting"

    def __init__(self, vocab_size=4096, max_rounds=3, **others):
        super().__init__(**others)
        self.vocab_size, self.max_rounds = vocab_size, max_rounds


class HaltingModel(PreTrainedModel):
    config_class = HaltingConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = torch.nn.Embedding(config.vocab_size, 1)
        self.block = torch.nn.Linear(1, 1, bias=False)
        self.halting = torch.nn.Linear(1, 1, bias=False)
        self.post_init()

    def forward(self, input_ids, rounds=None):
        state = self.embeddings(input_ids)
        running = torch.ones_like(state, dtype=torch.bool)
        for _ in range(rounds or self.config.max_rounds):
            if rounds is None and not running.any():
                break
            state = torch.where(running, torch.tanh(self.block(state)), state)
            running = running & (self.halting(state) < 0)
        return BaseModelOutput(last_hidden_state=state)
"""


@pytest.mark.usefixtures("libraries_may_warn")
def test_family_of_a_package_exports_a_model_that_no_other_knows(
    added_here: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token but one halts after a round: only the family's graph is right for that token as well."""
    checkpoint = tmp_path / "halting"
    checkpoint.mkdir()
    classes = {"AutoConfig": "halting.HaltingConfig", "AutoModel": "halting.HaltingModel"}
    config = {"model_type": "halting", "architectures": ["HaltingModel"], "auto_map": classes}
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (checkpoint / "halting.py").write_text(_HALTING, encoding="utf-8")
    states, one = np.linspace(1, 2, 4096, dtype=np.float32)[:, None], np.ones((1, 1), np.float32)
    states[7] = -1
    weights = {"embeddings.weight": states, "block.weight": one, "halting.weight": one}
    safetensors.numpy.save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)

    def answer(name: str) -> list[float]:
        _answer(run_here("export", "-m", checkpoint, "-o", name, "--trust-remote-code", "--no-dynamo", "-q"))
        session = onnxruntime.InferenceSession(name)
        ids = np.full(session.get_inputs()[0].shape, 7)
        ids[:, 1:] = 0
        return session.run(None, {"input_ids": ids})[0][0, :2, 0].tolist()

    early, late = np.tanh(1.0), -np.tanh(np.tanh(np.tanh(1.0)))
    assert pytest.approx([-early, early]) == answer("without.onnx")
    added_here()
    assert pytest.approx([late, early]) == answer("with.onnx")


def test_queue_sweeps(extended: Workplace) -> None:
    """Every cell is done once, a damaged model fails alone, and a wrong address is refused."""
    write_models(extended.folder)
    (extended.folder / "plan.txt").write_text("first.onnx\ndamaged.onnx\n", encoding="utf-8")
    asked = ("sweep", "plan.txt", "-o", "swept", "--format", "json")
    assert 2 == extended.winml(*asked, "--queue", "executor=many").code
    outcome = extended.winml(*asked, "--queue", "executor=2")
    assert 1 == outcome.code, outcome.err
    assert outcome.out, outcome.err
    states = {cell["model"]: cell["state"] for cell in json.loads(outcome.out)["cells"]}
    assert {"first.onnx": "done", "damaged.onnx": "failed"} == states


def test_names_of_a_removed_package_are_refused_as_any_other(
    wheel: Path, make_workplace: Callable[[], Workplace], tmp_path: Path
) -> None:
    """Its names are unknown, and an error about a folder in its layout names the layout."""
    interpreter = _environment(tmp_path / "venv")
    _pip(interpreter, "install", "--no-deps", "--no-index", wheel)
    place = _place(make_workplace(), interpreter)
    _answer(place.winml("build", "-m", "net.onnx", "-o", "out", "--layout", "triton"))
    _pip(interpreter, "uninstall", "--yes", "winml-example")
    (place.folder / "x.csv").write_text("text,score\ngood,1\n", encoding="utf-8")
    refusals = (
        (("operators", "net.onnx"), "No such verb 'operators'"),
        (("build", "-m", "net.onnx", "-o", "new", "--layout", "triton"), "triton"),
        (("build", "-m", "net.onnx", "-o", "new", "-c", '{"layout": "triton"}'), "layout: no such layout"),
        (("optimize", "-m", "out", "-o", "new"), "triton: no such layout"),
        (
            ("optimize", "-m", "net.onnx", "-o", "new.onnx", "--enable-idempotent-removal"),
            "--enable-idempotent-removal",
        ),
        (("build", "-m", "net.onnx", "-o", "new", "-c", '{"optim": {"idempotent_removal": true}}'), "unknown key"),
        (("perf", "net.onnx", "--ep", "example"), "no such execution provider"),
        (("eval", "net.onnx", "--dataset", "x.csv", "--task", "text-regression"), "unknown task"),
    )
    outcomes = place.winml_in_turn(*(command for command, _ in refusals))
    for outcome, (_, words) in zip(outcomes, refusals, strict=True):
        assert 2 == outcome.code
        assert words in outcome.err
        assert "Traceback" not in outcome.err


def test_page_shows_parts_of_the_example() -> None:
    """Each code block of ``docs/how_to/extend.md`` is part of the tested example."""
    page = (REPOSITORY / "docs" / "how_to" / "extend.md").read_text(encoding="utf-8")
    shown = re.findall(r"^<!-- not run: part of examples/plugin -->\n```\w+\n(.*?)^```$", page, re.M | re.S)
    texts = [path.read_text(encoding="utf-8") for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(shown) > 2
    assert [] == [part for part in shown if not any(part in text for text in texts)]


def _described(folder: Path, name: str, entry_points: str) -> None:
    """Write the metadata of an installed package, in version 0.3."""
    described = folder / f"{name}-0.3.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n", encoding="utf-8")
    (described / "entry_points.txt").write_text(entry_points, encoding="utf-8")


_WEIGHTED = """
<ir_version: 8, opset_import: ["" : 21]>
net (float[1, 32] x) => (float[1, 2] y)
<float[32, 2] weight>
{
    y = MatMul (x, weight)
}
"""


def test_precision_of_a_package_quantizes_by_its_engine(workplace: Workplace, tmp_path: Path) -> None:
    """The command, its config and its record know the name; the engine is the one that the package names."""
    _described(
        tmp_path,
        "finer",
        "[winml.contract]\nv1 = winml.modelkit.extend:CONTRACT\n[winml.precisions]\nfiner8 = finer:FINER\n",
    )
    (tmp_path / "finer.py").write_text(
        "from winml.modelkit.extend import ModeRules, Precision\n"
        "RULES = ModeRules('blocks', frozenset({'MatMul'}), 21, engine='finer_engine:quantize')\n"
        "FINER = Precision('finer8', 8, ('weight-only', 'finer'), '8-bit weights', 20.0, ways={'finer': RULES})\n",
        encoding="utf-8",
    )
    (tmp_path / "finer_engine.py").write_text(
        "from winml.modelkit.quantize.engines.weight_only import quantize_weights as quantize\n", encoding="utf-8"
    )
    model = onnx.parser.parse_model(_WEIGHTED)
    numbers = np.random.default_rng(3).standard_normal((32, 2)).astype(np.float32)
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "weight"))
    model.graph.node[0].name = "product"
    place = replace(
        workplace, program=(sys.executable, "-m", "winml.modelkit"), variables={"PYTHONPATH": str(tmp_path)}
    )
    onnx.save(model, place.folder / "net.onnx")
    asked = ("quantize", "-m", "net.onnx", "-o", "few.onnx", "--precision", "finer8")
    config = '{"quant": {"precision": "finer8", "mode": "finer"}}'
    quantized, refused, built = place.winml_in_turn(
        (*asked, "--mode", "finer"), (*asked, "--mode", "fine"), ("build", "-m", "net.onnx", "-o", "out", "-c", config)
    )
    _answer(quantized)
    assert ["MatMulNBits"] == _operators(place.folder / "few.onnx")
    assert "'finer'" in refused.err
    _answer(built)
    manifest = json.loads((place.folder / "out" / "build_manifest.json").read_text(encoding="utf-8"))
    (stage,) = [stage for stage in manifest["parts"][0]["stages"] if stage["name"] == "quantize"]
    assert "finer 0.3" in json.dumps(stage["origin"]["options"])


def _broken_package(folder: Path) -> None:
    """Write a package with many names, each wrong in a different way."""
    _described(
        folder,
        "broken",
        "[winml.contract]\nv1 = winml.modelkit.extend:CONTRACT\n"
        "[winml.layouts]\nabsent = no_such_module:LAYOUT\nnumber = math:pi\noptimum = math:pi\n"
        "[winml.passes]\nlevel = broken_passes:LEVEL\nlost_removal = broken_passes:LOST\n"
        "[winml.verbs]\ncrash = broken_verb:command\n"
        "[winml.nothing]\nname = math:pi\n",
    )
    (folder / "broken_passes.py").write_text(
        "from winml.modelkit.extend import Capability\n"
        "LEVEL = Capability('level', 'x', None, 'winml', implementation='math:pi')\n"
        "LOST = Capability('lost_removal', 'x', None, 'winml', implementation='no_such_module:Pass')\n",
        encoding="utf-8",
    )
    (folder / "broken_verb.py").write_text("raise RuntimeError('at import')\n", encoding="utf-8")


def test_broken_package_is_named_and_left_out(workplace: Workplace, tmp_path: Path) -> None:
    """``winml sys`` has the problem of each name; help and other verbs work, and a request names the package."""
    _broken_package(tmp_path)
    place = replace(_place(workplace, Path(sys.executable)), variables={"PYTHONPATH": str(tmp_path)})
    printed, page, written, *refusals = place.winml_in_turn(
        ("sys", "--format", "json"),
        ("sys",),
        ("build", "-m", "net.onnx", "-o", "out", "--layout", "optimum"),
        ("crash",),
        ("build", "-m", "net.onnx", "-o", "new", "--layout", "number"),
        ("optimize", "-m", "net.onnx", "-o", "new.onnx", "--enable-lost-removal"),
    )
    found = json.loads(_answer(printed))["plug_ins"]
    problems = {entry["name"]: entry["problem"] for entry in found}
    assert {"absent", "number", "optimum", "crash", "name", "level", "lost_removal"} == {*problems}
    assert {"broken"} == {entry["package"] for entry in found}
    for name, words in (
        ("absent", "ModuleNotFoundError"), ("number", "float"), ("optimum", "winml has"), ("crash", "at import"),
        ("name", "no group"), ("level", "name"),
    ):  # fmt: skip
        assert words in problems[name]
    assert "cannot be used" in _answer(page)
    assert "crash" not in _answer(place.winml("--help"))
    _answer(written)
    for refused in refusals:
        assert 2 == refused.code
        assert "pip uninstall broken" in refused.err
