"""Notes about caches for optimum, and the files and code of the layout of transformers.js."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.builds.layouts.layout import BuiltFolder, LayoutFiles
from winml.modelkit.builds.layouts.optimum import TRANSFORMERS_JS, unfit_cache_words

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"model_type": "t5", "d_model": 32, "num_heads": 4, "d_kv": 16}


@pytest.mark.parametrize(
    ("config", "side", "heads", "size", "words"),
    [
        (LLAMA, "", 2, 8, ""),
        ({**LLAMA, "head_dim": 16}, "", 2, 16, "2 heads of 8"),
        ({**LLAMA, "model_type": "gemma", "head_dim": 16}, "", 2, 16, ""),
        ({**LLAMA, "model_type": "mixtral"}, "", 2, 8, "model.num_key_value_heads = 2 and model.embed"),
        (T5, "decoder.", 4, 8, ""),
        (T5, "decoder.", 4, 16, "model.decoder.embed_size_per_head = 16"),
        ({"model_type": "new"}, "", 2, 8, ""),
        ([], "", 2, 8, ""),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_are_compared_with_the_config(
    config: Any, side: str, heads: int, size: int, words: str, tmp_path: Path
) -> None:
    """The rule is that of optimum, which reads an explicit head size for some types only."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    inputs: dict[str, Any] = {"input_ids": ("batch", "sequence")}
    inputs |= {f"past_key_values.0.{side}key": ("batch", heads, "past", size)}
    inputs |= {"past_key_values.0.encoder.key": ("batch", heads, "encoded", size)} if side else {}
    told = unfit_cache_words(path, inputs)
    assert words in told
    assert bool(words) == bool(told)


def test_model_without_a_cache_or_config_has_no_note(tmp_path: Path) -> None:
    """Without a cache or a config there is nothing to compare."""
    path = tmp_path / "config.json"
    assert not unfit_cache_words(path, {"past_key_values.0.key": ("batch", 2, "past", 8)})
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert not unfit_cache_words(path, {"input_ids": ("batch", "sequence")})


@pytest.mark.parametrize(("name", "is_shared"), [("key", False), ("key_value", True)])
def test_config_names_the_cache_inputs_of_the_graph(name: str, is_shared: bool, tmp_path: Path) -> None:
    """transformers.js expects one input ``key_value`` for each layer if ``multi_query`` is true."""
    model, config = tmp_path / "model.onnx", tmp_path / "config.json"
    cache = f"past_key_values.0.{name}"
    ir.save(parse(f'g (float[1, 1, 2, 4] "{cache}") => (float[1, 1, 2, 4] y) {{ y = Identity ("{cache}") }}'), model)
    config.write_text(json.dumps({"model_type": "falcon", "multi_query": True}), encoding="utf-8")
    files = LayoutFiles({"config.json": config}, {}, {}, {"onnx/model.onnx": model})
    assert is_shared is json.loads(TRANSFORMERS_JS.describe(files)["config.json"])["multi_query"]


def test_code_for_a_relative_folder_starts_at_the_working_folder(tmp_path: Path) -> None:
    """transformers.js puts a slash between ``localModelPath`` and the folder."""
    for path, root in (("built", "./"), (str(tmp_path), "")):
        lines = TRANSFORMERS_JS.usage(BuiltFolder(path, "text-classification", ("input_ids",), "model", True))
        assert f'env.localModelPath = "{root}";' in "\n".join(lines)
