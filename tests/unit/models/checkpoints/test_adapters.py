"""Reading of adapter files without their weights, and refusals of unsupported formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adapters import save_adapter
from winml.modelkit.errors import CheckpointError, ModelPathError, UsageError
from winml.modelkit.models.checkpoints.adapters import named_adapter, read_adapters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of one linear layer."""
    return save_adapter(tmp_path / "adapter", nn.ModuleDict({"linear": nn.Linear(8, 6)}), ("linear",), seed=1)


def changed(folder: Path, **config: Any) -> Path:
    """Change keys of the config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_option_is_a_path_or_a_name_and_a_path(tmp_path: Path) -> None:
    """A folder with the sign `=` in its name is a path if the folder exists."""
    odd = tmp_path / "rank=8"
    odd.mkdir()
    assert (None, tmp_path) == (named_adapter(str(tmp_path)).name, named_adapter(str(tmp_path)).folder)
    assert ("fr", tmp_path) == (named_adapter(f"fr={tmp_path}").name, named_adapter(f"fr={tmp_path}").folder)
    assert (None, odd) == (named_adapter(str(odd)).name, named_adapter(str(odd)).folder)


@pytest.mark.parametrize("text", ["", "=path", "a b=path", "fr=", "-x=path"])
def test_names_that_no_file_has_are_refused(text: str) -> None:
    """The name becomes the name of a file beside the model."""
    with pytest.raises(UsageError, match="--adapter"):
        named_adapter(text)


def test_two_adapters_of_one_name_are_refused(folder: Path) -> None:
    """Names that differ in case only are the same file on some systems."""
    with pytest.raises(UsageError, match="two adapters have this name"):
        read_adapters([f"fr={folder}", f"FR={folder}"])


def test_base_weights_are_not_needed_to_read_an_adapter(folder: Path) -> None:
    """Module, rank and scaling come from config and header."""
    (adapter,) = read_adapters([str(changed(folder, lora_alpha=6, use_rslora=True))])
    assert ["linear"] == list(adapter.pairs)
    assert (4, 3.0) == (adapter.pairs["linear"].rank, adapter.pairs["linear"].scaling)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"), ("peft_type", None), ("layer_replication", [[0, 2]]), ("target_parameters", ["gate"]),
        ("trainable_token_indices", [1, 2]), ("use_qalora", True), ("alora_invocation_tokens", [5]),
        ("megatron_config", {"a": 1}), ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "olora"),
        ("use_newest_lora", True),
    ],
)  # fmt: skip
def test_other_formulas_are_refused_with_key_and_value(folder: Path, key: str, value: object) -> None:
    """The message names key and value; the hint says how to get a merged model."""
    with pytest.raises(CheckpointError) as caught:
        read_adapters([str(changed(folder, **{key: value}))])
    assert f"adapter_config.json: {key} is {value!r}: " in caught.value.message
    assert "merge_and_unload" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [("r", 0), ("r", "4"), ("lora_alpha", None), ("rank_pattern", {"linear": -1}), ("alpha_pattern", [1])],
)
def test_damaged_numbers_are_refused_with_key_and_value(folder: Path, key: str, value: object) -> None:
    """No merge helps there, since peft reads the same numbers."""
    with pytest.raises(CheckpointError) as caught:
        read_adapters([str(changed(folder, **{key: value}))])
    assert f"adapter_config.json: {key} is {value!r}: expected " in caught.value.message
    assert "merge_and_unload" not in caught.value.hint
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [("init_lora_weights", "gaussian"), ("lora_dropout", 0.3), ("use_newest_lora", False), ("eva_config", {"rho": 2})],
)
def test_keys_of_training_alone_have_no_effect(folder: Path, key: str, value: object) -> None:
    """Unknown keys that are off are those of newer versions of peft."""
    assert read_adapters([str(changed(folder, **{key: value}))])


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    """A missing folder, a folder without a config, and a pickle instead of safetensors are named."""
    with pytest.raises(ModelPathError, match="no such folder"):
        read_adapters([str(tmp_path / "nowhere")])
    (folder / "adapter_model.safetensors").unlink()
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(ModelPathError, match=r"adapter_model\.safetensors") as caught:
        read_adapters([str(folder)])
    assert "pickle" in caught.value.hint
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelPathError, match=r"adapter_config\.json"):
        read_adapters([str(folder)])


def test_damaged_files_are_named(folder: Path) -> None:
    """No JSON, another JSON value, a file cut short."""
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        read_adapters([str(folder)])
    for text in ("{", "[]"):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
            read_adapters([str(folder)])


def test_values_by_module_equal_peft(tmp_path: Path) -> None:
    """The first key in the order of the config that a path ends with, part by part, or after ``^`` is."""
    net = nn.ModuleDict({"a": nn.ModuleDict({"q": nn.Linear(8, 8)}), "q": nn.Linear(8, 8), "xq": nn.Linear(8, 8)})
    pattern = {"^q": 2, r"a\.q": 4, "q": 16}
    folder = save_adapter(tmp_path / "by module", net, ("q", "xq"), seed=0, rank=4, alpha=8, alpha_pattern=pattern)
    (adapter,) = read_adapters([str(folder)])
    assert {"a.q": 1.0, "q": 0.5, "xq": 2.0} == {path: pair.scaling for path, pair in adapter.pairs.items()}


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("expression", ["(a+)+$", ".*q", "[0-9]+", "a|b", "(", "a" * 2000, ""])
def test_regular_expression_of_an_adapter_is_refused_by_name(folder: Path, key: str, expression: str) -> None:
    """The time to match a regular expression of a foreign file is unbounded."""
    with pytest.raises(CheckpointError) as caught:
        read_adapters([str(changed(folder, **{key: {expression: 4}}))])
    assert f"{key} has the key {expression[:100]!r}" in caught.value.message


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
@pytest.mark.parametrize("value", ["1e300", "2147483648", "true", "Infinity", "NaN", f"1{'0' * 400}"])
def test_number_that_no_adapter_has_is_refused(folder: Path, key: str, value: str) -> None:
    """Some of the numbers cannot be a float in Python."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: "VALUE"}).replace('"VALUE"', value))
    with pytest.raises(CheckpointError, match=f"{key} is "):
        read_adapters([str(folder)])


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("C64", 64), ("F8_E4M3FNUZ", 8), ("F8_E8M0", 8), ("X9", 8)])
def test_element_type_that_torch_lacks_is_refused(folder: Path, dtype: str, bits: int) -> None:
    """The type is refused although the sizes fit."""
    path = folder / "adapter_model.safetensors"
    size = 4 * 8 * bits // 8
    entries = {
        f"base_model.model.linear.lora_{part}.weight": {
            "dtype": dtype, "shape": shape, "data_offsets": [place * size, (place + 1) * size],
        }
        for place, (part, shape) in enumerate((("A", [4, 8]), ("B", [8, 4])))
    }  # fmt: skip
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2 * size))
    with pytest.raises(CheckpointError) as caught:
        read_adapters([str(folder)])
    assert {"C64": "complex64"}.get(dtype, dtype.lower()) in caught.value.message
