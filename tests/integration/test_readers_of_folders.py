"""Export folders in other readers of model folders.

sentence-transformers opens ``model.onnx`` through optimum, which takes older versions of transformers only; here its
own modules process the outputs of ONNX Runtime.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from e2e.in_process import run_here
from generating import save_decoder
from readers import python_of
from winml.modelkit import HTPExporter, WinMLExportConfig, build_model, load_sentence_transformer
from winml.modelkit.errors import UsageError
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicRequest
from winml.modelkit.ort.sessions import Session

ANSWERED = """
import sys, numpy as np, openvino
core = openvino.Core()
options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
model = core.compile_model(core.read_model(sys.argv[1]), "CPU", options)
answers = model(dict(np.load(sys.argv[2])))
np.savez(sys.argv[3], **{output.get_any_name(): answers[output] for output in model.outputs})
"""
TEXTS = ["a short row", "a somewhat longer sentence about nothing in particular", "three"]


@pytest.mark.slow
def test_folder_of_an_export_gives_the_vectors_of_sentence_transformers(minilm_folder: Path, tmp_path: Path) -> None:
    """``modules.json``, the folders named there and the tokenizer describe everything around the graph."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import import_from_string

    request = ModelRequest(str(minilm_folder), dynamic=DynamicRequest(batch=True, sequence=True))
    HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, tmp_path / "model.onnx")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(TEXTS, padding=True, return_tensors="np")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    answer = session.run(["last_hidden_state"], {item.name: tokens[item.name] for item in session.get_inputs()})[0]
    features = {
        "token_embeddings": torch.from_numpy(answer),
        "attention_mask": torch.from_numpy(tokens["attention_mask"]),
    }
    modules = json.loads((tmp_path / "modules.json").read_text(encoding="utf-8"))
    assert "" == modules[0]["path"]  # the transformer itself, which is the graph
    for entry in modules[1:]:
        features = import_from_string(entry["type"]).load(str(tmp_path), subfolder=entry["path"])(features)
    expected = SentenceTransformer(str(minilm_folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(features["sentence_embedding"].numpy(), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def sentence_model(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM with settings of its own in ``minilm``, and its build in ``built``."""
    folder = tmp_path_factory.mktemp("sentences")
    source = shutil.copytree(minilm_folder, folder / "minilm")
    settings = source / "config_sentence_transformers.json"
    prompts = {"prompts": {"query": "question: "}, "similarity_fn_name": "dot"}
    settings.write_text(json.dumps({**json.loads(settings.read_bytes()), **prompts}), encoding="utf-8")
    pooling = source / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_bytes()), "include_prompt": False}), encoding="utf-8")
    build_model(source, folder / "built", verify=False)
    return folder


def test_build_is_a_model_of_sentence_transformers(sentence_model: Path) -> None:
    """Pooling, normalization, prompts and the maximum length are those of the checkpoint."""
    from sentence_transformers import SentenceTransformer

    model = load_sentence_transformer(sentence_model / "built")
    expected = SentenceTransformer(str(sentence_model / "minilm"), device="cpu")
    texts = [*TEXTS, "far too long " * 300]
    for options in ({}, {"prompt_name": "query"}):
        np.testing.assert_allclose(model.encode(texts, **options), expected.encode(texts, **options), rtol=0, atol=1e-5)
    assert ("dot", 384) == (model.similarity_fn_name, model.get_embedding_dimension())


def test_module_of_another_package_is_not_imported(sentence_model: Path, tmp_path: Path) -> None:
    """It would be code of the checkpoint."""
    shutil.copytree(sentence_model / "built", tmp_path / "built")
    path = tmp_path / "built" / "modules.json"
    modules = json.loads(path.read_bytes())
    path.write_text(json.dumps([modules[0], {**modules[1], "type": "os.path"}]), encoding="utf-8")
    with pytest.raises(UsageError, match=r"os\.path"):
        load_sentence_transformer(tmp_path / "built")


@pytest.mark.reader("openvino")
@pytest.mark.parametrize(
    "options",
    [(), ("--precision", "int4"), ("--operators", "standard"), ("--operators", "standard", "--precision", "int4")],
    ids=["fp32", "int4", "standard", "standard_int4"],
)
def test_openvino_equals_onnxruntime_with_tied_embedding_and_head(tmp_path: Path, options: tuple[str, ...]) -> None:
    """OpenVINO looks up rows of constants only, and refuses a table computed by an operator."""
    checkpoint = save_decoder(tmp_path / "checkpoint", head_dim=16, tie_word_embeddings=True)
    place = ("--ep", "openvino", "--no-compile", "--allow-dynamic", "--no-verify", "-q")
    outcome = run_here("build", "-m", checkpoint, "-o", tmp_path / "built", *options, *place)
    assert 0 == outcome.code, outcome.err
    # ONNX Runtime's products round activations to 8 bits and OpenVINO's do not, so the rounding is turned off, and
    # DequantizeLinear is not fused into such a product.
    model = onnx.load(tmp_path / "built" / "model.onnx")
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    session = Session(model.SerializeToString(), optimize=False)
    generator, rows, past = np.random.default_rng(0), 2, 4
    mask = np.ones((rows, past + 1), np.int64)
    mask[0, :2] = 0
    feeds = {
        "input_ids": generator.integers(2, 100, (rows, 1)),
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1)[:, -1:] - 1,
    }
    for name, shape in session.input_shapes.items():
        if name not in feeds:
            feeds[name] = generator.standard_normal((rows, shape[1], past, shape[3])).astype(np.float32)  # type: ignore[arg-type]
    np.savez(tmp_path / "feeds.npz", **feeds)
    command = [python_of("openvino"), "-c", ANSWERED, tmp_path / "built" / "model.onnx"]
    done = subprocess.run(
        [*map(str, command), tmp_path / "feeds.npz", tmp_path / "answers.npz"],
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    with np.load(tmp_path / "answers.npz") as file:
        answers = dict(file)
    for name, value in session.run(feeds).items():
        np.testing.assert_allclose(answers[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)
