"""Models with LoRA adapters, compared with PyTorch: merged, over packed weights, and switched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

import coded_checkpoints
from adapters import merge_by_formula, save_adapter
from e2e.in_process import run_here
from generating import save_decoder
from readers import python_of
from winml.modelkit import build_hf_model
from winml.modelkit.errors import CheckpointError, UsageError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.sessions import Session

PROMPT = [3, 7, 5]
NEW_TOKENS = 12
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# float32 through two layers.
TOLERANCE = 2e-5
SWITCHED = """
import json, sys, onnxruntime_genai as og
folder, prompt, count, *names = sys.argv[1:]
model, tokens, texts = og.Model(folder), json.loads(prompt), {}
loaded = og.Adapters(model)
for name in names:
    loaded.load(f"{folder}/{name}.onnx_adapter", name)
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=len(tokens) + int(count), do_sample=False)
    generator = og.Generator(model, options)
    generator.set_active_adapter(loaded, name)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    texts[name] = [int(token) for token in generator.get_sequence(0)]
print(json.dumps(texts))
"""


def pytorch(checkpoint: Path, *adapters: tuple[Path, float]) -> Any:
    """Load a checkpoint with adapters merged by the formula, each with its scaling."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for folder, scaling in adapters:
        merge_by_formula(model, folder, scaling)
    return model


def feeds_of(session: Session, tokens: list[int], text: int, held: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a decoder with a cache."""
    values = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, text), np.int64),
        "position_ids": np.arange(text - len(tokens), text)[None],
    }
    return {**{name: values[name] for name in values if name in session.inputs}, **held}


def generated(path: Path, adapter: Path | None = None) -> tuple[list[int], Any]:
    """Return the greedy tokens, and the scores after the prompt."""
    session = Session(path, adapter=adapter)
    text, now = list(PROMPT), list(PROMPT)
    held = {
        name: np.zeros((1, int(shape[1] or 0), 0, int(shape[3] or 0)), np.float32)
        for name, shape in session.input_shapes.items()
        if name.startswith("past")
    }
    scores = None
    for _ in range(NEW_TOKENS):
        answer = session.run(feeds_of(session, now, len(text), held))
        scores = answer["logits"][0, -1] if scores is None else scores
        held = {name: answer[name.replace("past_key_values", "present")] for name in held}
        now = [int(answer["logits"][0, -1].argmax())]
        text += now
    return text[len(PROMPT) :], scores


def assert_equal(path: Path, model: Any, adapter: Path | None = None) -> None:
    """Check that the file gives the scores and the tokens of a PyTorch model."""
    tokens, scores = generated(path, adapter)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        text = model.generate(torch.tensor([PROMPT]), do_sample=False, **length)
    assert np.abs(scores - expected).max() < TOLERANCE * np.abs(expected).max()
    assert text[0, len(PROMPT) :].tolist() == tokens


def assert_near(path: Path, model: Any, adapter: Path | None) -> None:
    """Check the scores of a file against a PyTorch model, within the error of few-bit weights."""
    _, scores = generated(path, adapter)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    assert np.abs(scores - expected).max() < 0.02 * np.abs(expected).max()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder with its tokenizer."""
    return save_decoder(tmp_path_factory.mktemp("llama") / "base", "llama")


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Two adapters with different modules, ranks and scalings."""
    folder, model = tmp_path_factory.mktemp("adapters"), pytorch(llama)
    return {
        "one": (save_adapter(folder / "one", model, (*ATTENTION, "embed_tokens", "lm_head"), seed=1), 2.0),
        "two": (
            save_adapter(folder / "two", model, ("q_proj", "gate_proj", "down_proj"), seed=2, rank=2, alpha=1),
            0.5,
        ),
    }


@pytest.fixture(scope="module")
def switched(llama: Path, adapters: dict[str, tuple[Path, float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder with switchable adapters."""
    output = tmp_path_factory.mktemp("switched") / "built"
    named = tuple(f"{name}={folder}" for name, (folder, _) in adapters.items())
    build_hf_model(str(llama), output, config={"layout": "genai"}, adapter=named)
    return output


def test_merged_adapters_are_in_the_weights_of_a_build(
    llama: Path, adapters: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    """Several adapters are summed; the graph equals that of the base model."""
    build_hf_model(str(llama), tmp_path / "built", adapter=tuple(str(folder) for folder, _ in adapters.values()))
    path = tmp_path / "built" / "model.onnx"
    assert_equal(path, pytorch(llama, *adapters.values()))
    assert not [name.name for name in onnx.load(path).graph.initializer if "lora" in name.name]


def test_adapter_merged_without_values_in_memory_gives_the_same_weights(
    llama: Path, adapters: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    """Dynamo traces without weights; adapters are merged weight by weight while the file is written."""
    request = ModelRequest(model=str(llama), adapter=(str(adapters["one"][0]),))
    config = WinMLExportConfig(exporter="dynamo", verify=False)
    HTPExporter(config).export_checkpoint(request, tmp_path / "model.onnx")
    assert_equal(tmp_path / "model.onnx", pytorch(llama, adapters["one"]))


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_codes_stay_and_lora_is_added_in_floats(form: str, tmp_path: Path) -> None:
    """Packed weights stay as without an adapter, and every node of a LoRA branch has its module."""
    saved = getattr(coded_checkpoints, f"save_{form}")(tmp_path)
    targets = ("q_proj", "v_proj", "down_proj", "lm_head")
    folder = save_adapter(tmp_path / "adapter", pytorch(saved.reference), targets, seed=3)
    graphs = {}
    for name, adapter in (("base", ()), ("lora", (str(folder),))):
        path = tmp_path / name / "model.onnx"
        path.parent.mkdir()
        # The graph without an adapter only provides the packed weights.
        exact = WinMLExportConfig(activations="float32", verify=bool(adapter))
        HTPExporter(exact).export_checkpoint(ModelRequest(model=str(saved.folder), adapter=adapter), path)
        graphs[name] = onnx.load(path).graph
    codes = {
        name: {item.name: item.raw_data for item in graph.initializer if item.name.endswith("_Q4")}
        for name, graph in graphs.items()
    }
    assert codes["base"]
    assert codes["base"] == codes["lora"]
    branches = [node for node in graphs["lora"].node if "/lora_" in node.name]
    assert 3 * 3 == len(branches)  # lm_head has 16 bits, and is merged
    for node in branches:
        metadata = {item.key: item.value for item in node.metadata_props}
        assert metadata["winml.hierarchy.module"].startswith("model.layers.")
        assert not node.name.startswith("/lm_head")
    assert_equal(tmp_path / "lora" / "model.onnx", pytorch(saved.reference, (folder, 2.0)))


@pytest.mark.parametrize("name", [None, "one", "two"])
def test_switched_adapter_equals_pytorch_with_the_merged_adapter(
    switched: Path, llama: Path, adapters: dict[str, tuple[Path, float]], name: str | None
) -> None:
    """Outputs without an active adapter equal the base model's."""
    active = [] if name is None else [adapters[name]]
    assert_equal(switched / "model.onnx", pytorch(llama, *active), name and switched / f"{name}.onnx_adapter")


def test_build_compares_with_every_adapter(tmp_path: Path) -> None:
    """Adapters over packed weights are compared as well; the note names the adapters compared with PyTorch."""
    saved = coded_checkpoints.save_awq(tmp_path)
    model = pytorch(saved.reference)
    named = tuple(
        f"{name}={save_adapter(tmp_path / name, model, targets, seed=seed)}"
        for name, targets, seed in (("a", ("q_proj", "down_proj"), 3), ("b", ("v_proj",), 4))
    )
    path = tmp_path / "out" / "model.onnx"
    path.parent.mkdir()
    result = HTPExporter().export_checkpoint(ModelRequest(model=str(saved.folder), adapter=named), path)
    assert "Also compared with PyTorch with each adapter merged: a, b." in result.notes
    for name in "ab":
        assert_near(path, pytorch(saved.reference, (tmp_path / name, 2.0)), path.with_name(f"{name}.onnx_adapter"))


def test_one_module_over_codes_takes_a_merged_and_a_switched_adapter(tmp_path: Path) -> None:
    """The merged adapter is a branch with its own weight names; inputs have the names of the switched adapter."""
    saved = coded_checkpoints.save_awq(tmp_path)
    model = pytorch(saved.reference)
    merged, named = (
        (save_adapter(tmp_path / name, model, ("q_proj",), seed=seed), 2.0) for name, seed in (("a", 3), ("b", 4))
    )
    path = tmp_path / "out" / "model.onnx"
    path.parent.mkdir()
    request = ModelRequest(model=str(saved.folder), adapter=(str(merged[0]), f"b={named[0]}"))
    HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, path)
    assert_near(path, pytorch(saved.reference, merged), None)
    assert_near(path, pytorch(saved.reference, merged, named), path.with_name("b.onnx_adapter"))


@pytest.mark.parametrize("verb", ["perf", "compare", "eval"])
def test_verbs_run_the_base_model_of_such_a_file(switched: Path, llama: Path, tmp_path: Path, verb: str) -> None:
    """Inputs of adapters have defaults, so no command has to feed them."""
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "the king had a queen and she was by it"}\n')
    arguments = {
        "perf": ["-m", switched, "--iterations", "2"],
        "compare": [llama, switched],
        "eval": ["-m", switched, "--dataset", data, "--task", "text-generation"],
    }
    outcome = run_here(verb, *arguments[verb], "--format", "json")
    assert outcome.code == 0, outcome.err
    if verb == "compare":
        assert json.loads(outcome.out)["quality"]["outputs"]["logits"]["sqnr_db"]["all"] > 100


def test_inputs_of_adapters_have_a_default_and_are_named_by_module(switched: Path) -> None:
    """The inputs cover the modules of all adapters; their rank is dynamic and 0 by default."""
    model = onnx.load(switched / "model.onnx")
    held = {item.name: list(item.dims) for item in model.graph.initializer}
    inputs = {
        item.name: [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim]
        for item in model.graph.input
        if "lora" in item.name
    }
    path = "model.layers.1.mlp.gate_proj"
    assert [32, f"{path}.rank"] == inputs[f"{path}.lora_A.weight"]
    assert [32, 0] == held[f"{path}.lora_A.weight"]
    metadata = {item.key: item.value for item in model.metadata_props}
    described = json.loads(metadata["winml.adapters"])
    assert ["one", "two"] == described["names"]
    assert inputs.keys() == {f"{name}.lora_{part}.weight" for name in described["modules"] for part in "AB"}
    assert {"model.embed_tokens", "lm_head", path} <= {*described["modules"]}
    tags = {node.name: {item.key: item.value for item in node.metadata_props} for node in model.graph.node}
    assert all("winml.hierarchy.tag" in tag for name, tag in tags.items() if "lora" in name)


def test_manifest_lists_adapters_and_another_build_reuses_its_stages(
    switched: Path, llama: Path, adapters: dict[str, tuple[Path, float]]
) -> None:
    """Adapters are deployed files; a second build with the same adapters runs no stage."""
    manifest = json.loads((switched / "build_manifest.json").read_text())
    assert {"one.onnx_adapter", "two.onnx_adapter"} <= {item["name"] for item in manifest["deploy"]}
    named = tuple(f"{name}={folder}" for name, (folder, _) in adapters.items())
    again = build_hf_model(str(llama), switched, config={"layout": "genai"}, adapter=named)
    assert {"reused", "skipped"} == {stage.status for part in again.manifest.parts for stage in part.stages}


@pytest.mark.reader("genai")
def test_onnxruntime_genai_switches_the_adapters(
    switched: Path, llama: Path, adapters: dict[str, tuple[Path, float]]
) -> None:
    """onnxruntime-genai reads the folder with the adapters beside the model and generates PyTorch's tokens."""
    arguments = (switched, json.dumps(PROMPT), str(NEW_TOKENS), *adapters)
    command = [python_of("genai"), "-c", SWITCHED, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8", check=False)
    assert 0 == done.returncode, done.stderr
    expected = {}
    for name, adapter in adapters.items():
        text = pytorch(llama, adapter).generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected[name] = text[0].tolist()
    assert expected == json.loads(done.stdout.splitlines()[-1])


def test_adapter_of_another_model_is_refused_before_any_write(llama: Path, tmp_path: Path) -> None:
    """The refusal leaves neither file nor folder."""
    path = "base_model.model.model.layers.7.self_attn.q_proj"
    extra = {f"{path}.lora_A.weight": torch.ones(4, 32), f"{path}.lora_B.weight": torch.ones(32, 4)}
    folder = save_adapter(tmp_path / "adapter", pytorch(llama), ("q_proj",), seed=1, extra=extra)
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM has no module 'model\.layers\.7"):
        build_hf_model(str(llama), tmp_path / "built", adapter=(str(folder),))
    with pytest.raises(CheckpointError, match="no module"):
        HTPExporter().export_checkpoint(
            ModelRequest(model=str(llama), adapter=(f"one={folder}",)), tmp_path / "model.onnx"
        )
    assert ["adapter"] == sorted(path.name for path in tmp_path.iterdir())


def test_factory_takes_no_adapter(tmp_path: Path) -> None:
    """The author of a factory merges adapters in its code."""
    (tmp_path / "net.py").write_text("def make(): ...\n")
    with pytest.raises(UsageError, match="creates the weights"):
        HTPExporter().export_checkpoint(
            ModelRequest(model=f"{tmp_path / 'net.py'}:make", adapter=(str(tmp_path),)), tmp_path / "model.onnx"
        )
