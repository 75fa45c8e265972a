"""Does what reads folders of models take the folder of an export as it is written?

sentence-transformers opens ``model.onnx`` through optimum, which takes older versions of transformers only; here its
own modules work on what ONNX Runtime answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.graph.specs import DynamicRequest
from winml.modelkit.load.request import ModelRequest

TEXTS = ["a short row", "a somewhat longer sentence about nothing in particular", "three"]


@pytest.mark.slow
def test_folder_of_an_export_gives_the_vectors_of_sentence_transformers(minilm_folder: Path, tmp_path: Path) -> None:
    """Its ``modules.json``, the folders named there and its tokenizer say all that stands around the graph."""
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
