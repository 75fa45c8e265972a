"""The recipes of docs/recipes.md, followed to the letter.

All recipes are followed on one copy of the package, and the results run in separate processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from architecture.sources import REPOSITORY, package_folder

_RECIPE = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(
    r"(?:Create `(?P<created>[\w/.]+)`"
    r"|In `(?P<file>[\w/.]+)`, (?:(?P<side>below|above) `(?P<line>[^\n]+)`|in place of)):\n\n"
    r"```python\n(?P<code>.*?)^```\n"
    r"(?:\nwrite:\n\n```python\n(?P<replacement>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a recipe."""

    file: str
    code: str
    side: str = ""
    """``below`` or ``above`` the line; empty: the file is created, or the code replaced."""
    line: str = ""
    replacement: str | None = None

    def follow(self, package: Path) -> None:
        """Follow the instruction on a copy of the package."""
        path = package / self.file
        if not self.side and self.replacement is None:
            assert not path.exists(), f"{self.file} is there already"
            path.parent.mkdir(exist_ok=True)
            path.write_text(self.code, encoding="utf-8")
            return
        text = path.read_text(encoding="utf-8")
        if self.replacement is not None:
            old = self.code.rstrip("\n")
            assert text.count(old) == 1, f"{self.file} has {text.count(old)} times:\n{old}"
            path.write_text(text.replace(old, self.replacement.rstrip("\n")), encoding="utf-8")
            return
        lines = text.splitlines(keepends=True)
        found = [number for number, line in enumerate(lines) if line.strip() == self.line]
        assert len(found) == 1, f"{self.file} has {len(found)} times the line: {self.line}"
        place = found[0] + (self.side == "below")
        path.write_text("".join([*lines[:place], self.code, *lines[place:]]), encoding="utf-8")


def recipes() -> dict[str, list[Instruction]]:
    """Return the instructions of every recipe, by its heading."""
    text = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    return {
        heading: [
            Instruction(found["created"] or found["file"], found["code"], found["side"] or "", found["line"] or "",
                        found["replacement"])
            for found in _INSTRUCTION.finditer(body)
        ]
        for heading, body in _RECIPE.findall(text)
    }  # fmt: skip


@dataclass(frozen=True)
class Kitchen:
    """A copy of the package in which every recipe was followed, and a model to try it on."""

    folder: Path
    model: Path

    def run(self, *arguments: str) -> str:
        """Run Python with the copy in front of the installed package, and return stdout."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": str(self.folder)}, capture_output=True, text=True,
            encoding="utf-8", check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def winml(self, *arguments: str) -> str:
        """Run the command."""
        return self.run("-m", "winml.modelkit", *arguments)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    """Follow every recipe."""
    folder = tmp_path_factory.mktemp("recipes")
    package = folder / "winml" / "modelkit"
    shutil.copytree(package_folder(), package, ignore=shutil.ignore_patterns("__pycache__"))
    for instructions in recipes().values():
        for instruction in instructions:
            instruction.follow(package)
    yield Kitchen(folder, _write_model(folder / "model.onnx"))
    shutil.rmtree(folder, ignore_errors=True)


def _write_model(path: Path) -> Path:
    """Write x → MatMul → Neg → Neg → Relu."""
    weight = numpy_helper.from_array(np.array([[0.11, 0.52], [-0.93, 1.0]], dtype=np.float32), "weight")
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"], "product"),
        helper.make_node("Neg", ["product"], ["less"], "less"),
        helper.make_node("Neg", ["less"], ["more"], "more"),
        helper.make_node("Relu", ["more"], ["y"], "relu"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "negations", values[:1], values[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_recipes_have_instructions() -> None:
    """Every recipe is there, with instructions a test can follow."""
    found = recipes()
    assert list(found) == [
        "A verb", "An option", "An option of a stage", "A graph pass", "A stage of a build", "An optimizer capability",
        "A modality", "A precision", "Bits of an existing mode", "An execution provider", "A layout",
        "An evaluation task", "A report", "A model family", "A quirk of an architecture", "A metadata key",
    ]  # fmt: skip
    assert [] == [heading for heading, instructions in found.items() if not instructions]


def test_verb_of_the_recipe_runs(kitchen: Kitchen) -> None:
    """The verb is listed, its help imports no model library, both formats work, and its option has an effect."""
    program = (
        "import sys, winml.modelkit.cli.main as main\ntry: main.main(['nodes', '--help'])\nexcept SystemExit: pass\n"
    )
    shown = kitchen.run("-c", f"{program}print(sorted({{'torch', 'onnx', 'numpy'}} & sys.modules.keys()))")
    assert "--operator" in shown
    assert shown.endswith("[]\n")
    assert kitchen.winml("nodes", str(kitchen.model)) == "4 nodes\n"
    record = json.loads(kitchen.winml("nodes", str(kitchen.model), "--operator", "Neg", "--format", "json"))
    assert record == {"schema_version": record["schema_version"], "count": 2, "operator": "Neg"}


def test_option_of_the_recipe_reaches_command_config_python_and_request(kitchen: Kitchen) -> None:
    """The option is declared once, and the model is searched in the folder that it names."""
    inner = kitchen.folder / "checkpoint" / "inner"
    inner.mkdir(parents=True)
    (inner / "config.json").write_text("{}", encoding="utf-8")
    for verb in ("export", "build", "inspect", "config", "perf"):
        assert "--subfolder TEXT" in kitchen.winml(verb, "--help")
    assert "subfolder" in json.loads(kitchen.winml("config", "--schema"))["$defs"]["LoaderSection"]["properties"]
    program = (
        "from winml.modelkit.builds.plan import request_record\n"
        "from winml.modelkit.models.request import ModelRequest, resolve_source\n"
        "request = ModelRequest('checkpoint', subfolder='inner', random_weights=True)\n"
        "print(resolve_source(request).path.as_posix(), request_record(request)['subfolder'])\n"
    )
    assert kitchen.run("-c", program).endswith("/checkpoint/inner inner\n")


def test_modality_of_the_recipe_decides_inputs_and_adds_its_key(kitchen: Kitchen) -> None:
    """A forecasting model gets its past values, and --shape-config accepts the key."""
    program = (
        "import torch, transformers\n"
        "from winml.modelkit.models.inputs.decision import decide_inputs\n"
        "from winml.modelkit.models.inputs.modalities.pipeline import SHAPE_KEYS\n"
        "config = transformers.PatchTSTConfig(num_input_channels=3, context_length=32, d_model=16)\n"
        "with torch.device('meta'):\n"
        "    model = transformers.PatchTSTForPrediction(config)\n"
        "inputs = decide_inputs(model, config).inputs\n"
        "print([(item.name, item.shape) for item in inputs], 'context_length' in SHAPE_KEYS)\n"
    )
    assert "[('past_values', (1, 32, 3))] True\n" == kitchen.run("-c", program)


def test_pass_and_stage_of_the_recipes_run_in_a_build(kitchen: Kitchen) -> None:
    """The build normalizes with the pass, so no negation is left, and its stage writes the purpose of the graph."""
    config = json.dumps({"label": {"words": "for the npu"}})
    kitchen.winml("build", "-m", str(kitchen.model), "-o", str(kitchen.folder / "built"), "-c", config)
    manifest = json.loads((kitchen.folder / "built" / "build_manifest.json").read_text(encoding="utf-8"))
    stages = {stage["name"]: stage["status"] for stage in manifest["parts"][0]["stages"]}
    assert {"optimize": "run", "label": "run"} == {name: stages[name] for name in ("optimize", "label")}
    model = onnx.load(kitchen.folder / "built" / "labelled.onnx")
    assert ["MatMul", "Relu"] == [node.op_type for node in model.graph.node]
    assert "for the npu" == model.graph.doc_string


def test_capability_of_the_recipe_is_listed_and_enabled_by_name(kitchen: Kitchen) -> None:
    """The registry lists it, the command has its flags, and ONNX Runtime's transformer is used once."""
    listed = json.loads(kitchen.winml("optimize", "--list", "--enable-label-encoder-fusion", "--format", "json"))
    entry = next(item for item in listed["capabilities"] if item["name"] == "label_encoder_fusion")
    assert (True, "basic", []) == (entry["enabled"], entry["on_from"], entry["execution_providers"])
    text = (kitchen.folder / "winml" / "modelkit" / "optimize" / "capabilities.py").read_text(encoding="utf-8")
    assert text.count("LabelEncoderFusion") == 1


def test_precision_of_the_recipe_quantizes(kitchen: Kitchen) -> None:
    """The command knows its name, the weight has one byte a number, and the output is compared."""
    kitchen.winml("quantize", "-m", str(kitchen.model), "-o", "eight.onnx", "--precision", "fp8")
    model = onnx.load(kitchen.folder / "eight.onnx")
    assert TensorProto.FLOAT8E4M3FN in {weight.data_type for weight in model.graph.initializer}
    assert "DequantizeLinear" in {node.op_type for node in model.graph.node}


def test_bits_of_the_recipe_are_written(kitchen: Kitchen) -> None:
    """The existing mode writes unsigned weights of 8 bits, and activations of 16."""
    kitchen.winml("quantize", "-m", str(kitchen.model), "-o", "mixed.onnx", "--precision", "uw8a16", "--no-verify")
    types = {weight.data_type for weight in onnx.load(kitchen.folder / "mixed.onnx").graph.initializer}
    assert {TensorProto.UINT8, TensorProto.UINT16} <= types


def test_option_of_a_stage_of_the_recipe_reaches_the_file(kitchen: Kitchen) -> None:
    """The command accepts the option, a build config has the key, and the graph is described."""
    kitchen.winml("compile", "-m", str(kitchen.model), "-o", "compiled.onnx", "--ep", "cpu", "--description", "mine")
    assert "mine" == onnx.load(kitchen.folder / "compiled.onnx").graph.doc_string
    assert "description" in json.loads(kitchen.winml("config", "--schema"))["$defs"]["CompileSection"]["properties"]


def test_layout_of_the_recipe_names_its_models(kitchen: Kitchen) -> None:
    """Builds find the layout by its name, and the layout writes the list of the models."""
    program = (
        "from pathlib import Path\n"
        "from winml.modelkit.builds.layouts.layout import LayoutFiles, find_layout\n"
        "layout = find_layout('listed')\n"
        "models = {part: (Path(part), layout.model_name(part, True, 'fp32')) for part in ('encoder', 'decoder')}\n"
        "print(layout.describe(LayoutFiles({}, models, {}))['models.json'])\n"
    )
    assert {"encoder": "encoder.onnx", "decoder": "decoder.onnx"} == json.loads(kitchen.run("-c", program))


def test_quirk_of_the_recipe_is_read_from_a_config(kitchen: Kitchen) -> None:
    """The number of positions is found under its other name in the config."""
    program = (
        "from types import SimpleNamespace\n"
        "from winml.modelkit.models.inputs.modalities import modality\n"
        "from winml.modelkit.models.inputs.sizes import first_int\n"
        "print(first_int(SimpleNamespace(longest_text=7), modality._POSITION_LIMITS))\n"
    )
    assert "7\n" == kitchen.run("-c", program)


def test_provider_of_the_recipe_is_named_with_its_package(kitchen: Kitchen) -> None:
    """``winml sys`` prints how to install the provider, and every ``--ep`` accepts it."""
    listed = json.loads(kitchen.winml("sys", "--format", "json"))["execution_providers"]
    (entry,) = [item for item in listed if item["short"] == "example"]
    assert (False, "onnxruntime-example") == (entry["is_present"], entry["package"])
    assert "example" == json.loads(kitchen.winml("optimize", "--list", "--ep", "example", "--format", "json"))["ep"]


def test_task_of_the_recipe_measures(kitchen: Kitchen) -> None:
    """The task can be evaluated by its name, and its metric has a value and rows for the interval."""
    program = (
        "from winml.modelkit.evaluate.metrics import intervals\n"
        "from winml.modelkit.evaluate.tasks.table import task_definition\n"
        "from winml.modelkit.evaluate.evaluated_models import task_name\n"
        "(metric,) = task_definition(task_name('text-regression')).metrics\n"
        "measured = metric.measured([1.0, 2.0, 4.0], [1.0, 4.0, 3.0])\n"
        "low, high = intervals([(measured, None)], 3, 0)[0][0]\n"
        "print(metric.name, measured.value, low <= measured.value <= high)\n"
    )
    assert "mean_absolute_error 1.0 True\n" == kitchen.run("-c", program)


def test_report_of_the_recipe_is_rendered_in_three_forms(kitchen: Kitchen) -> None:
    """A terminal shows the brief rows, a page and a Markdown file show all rows."""
    program = (
        "import io\n"
        "from rich.console import Console\n"
        "from winml.modelkit.report.html import render_html\n"
        "from winml.modelkit.report.markdown import render_markdown\n"
        "from winml.modelkit.nodes.table import operators_document\n"
        "from winml.modelkit.report.terminal import print_document\n"
        "document = operators_document({'MatMul': 9, **{f'Rare{number:02}': 1 for number in range(20)}})\n"
        "written = io.StringIO()\n"
        "print_document(document, Console(file=written, width=80))\n"
        "forms = written.getvalue(), render_markdown(document), render_html(document)\n"
        "print([('MatMul' in form, 'Rare19' in form) for form in forms])\n"
    )
    assert "[(True, False), (True, True), (True, True)]\n" == kitchen.run("-c", program)


def test_family_of_the_recipe_decides_the_parts_of_a_model(kitchen: Kitchen) -> None:
    """A model with a pooler has the part; a model of another task has only the part ``model``."""
    program = (
        "import torch, transformers\n"
        "from winml.modelkit.models.model import load_model\n"
        "from winml.modelkit.models.request import ModelRequest\n"
        "sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20)\n"
        "transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained('bert')\n"
        "for task in ('feature-extraction', 'fill-mask'):\n"
        "    loaded = load_model(ModelRequest('bert', task=task, random_weights=True))\n"
        "    print([part.name for part in loaded.parts])\n"
    )
    assert "['sentence']\n['model']\n" == kitchen.run("-c", program)


def test_metadata_key_of_the_recipe_is_known_to_inspect(kitchen: Kitchen) -> None:
    """The value that is written under the key is among our records."""
    program = (
        "import onnx_ir as ir\n"
        "from winml.modelkit.onnx.model_metadata import write_license\n"
        f"model = ir.load({str(kitchen.model)!r})\n"
        "write_license(model, 'MIT')\n"
        "ir.save(model, 'licensed.onnx')\n"
    )
    kitchen.run("-c", program)
    shown = json.loads(kitchen.winml("inspect", str(kitchen.folder / "licensed.onnx"), "--format", "json"))
    assert {"winml.license": "MIT"} == shown["records"]
