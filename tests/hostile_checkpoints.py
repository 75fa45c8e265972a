"""Hostile checkpoint folders, which try to make a loader open a connection or run their code.

Run as a program, the module takes a folder for the checkpoints and prints one JSON object a line for each checkpoint:
sockets, processes and code files that winml opened (``doors``), and the result of the command (``outcome``).
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoints import save_checkpoint
from winml.modelkit.cli.main import COLLECTION_THRESHOLD

EVIL = "evil/repository"

_CODE = """
from transformers import BertConfig, BertModel
class EvilConfig(BertConfig): model_type = "evil"
class EvilModel(BertModel): config_class = EvilConfig
"""

KERNELS_PACKAGE = '''
"""What transformers imports of the package `kernels`, which fetches code from the Hub."""
import socket
class _Any:
    def __init__(self, *arguments, **keywords): pass
CUDAProperties = Device = LayerRepository = LocalLayerRepository = ROCMProperties = _Any
class KernelizeFallback: ALL = 0
class Mode: INFERENCE = TRAINING = TORCH_COMPILE = 0
def _fetch(*arguments, **keywords):
    socket.getaddrinfo("kernels.invalid", 443)
get_kernel = kernelize = register_kernel_mapping = replace_kernel_forward_from_hub = use_kernel_mapping = _fetch
def use_kernel_forward_from_hub(name): return lambda layer: layer
def use_kernelized_func(*functions): return lambda layer: layer
'''


def _changed(architecture: str, change: Mapping[str, Any], **options: Any) -> Callable[[Path], None]:
    """Return a function that saves a checkpoint with changed config values; nested keys are ``outer.inner``."""

    def make(folder: Path) -> None:
        save_checkpoint(architecture, folder, **options)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        for key, value in change.items():
            *outer, last = key.split(".")
            record = config
            for name in outer:
                record = record[name]
            record[last] = value
        path.write_text(json.dumps(config))
        (folder / "evil_code.py").write_text(_CODE)

    return make


def _beside(files: Mapping[str, str], change: Mapping[str, Any] | None = None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _changed("bert", change or {})(folder)
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return make


def _config_alone(config: Mapping[str, Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))

    return make


def _pickle_that_runs(folder: Path) -> None:
    _changed("bert", {})(folder)
    (folder / "model.safetensors").unlink()
    # Protocol 0: calls os.system.
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def _pickled_weights(folder: Path) -> None:
    import torch

    _changed("bert", {})(folder)
    weights = folder / "model.safetensors"
    from safetensors.torch import load_file

    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


_ADAPTER = json.dumps({"base_model_name_or_path": EVIL, "peft_type": "LORA"})
_AUTO_MAP = {"AutoConfig": "evil_code.EvilConfig", "AutoModel": "evil_code.EvilModel"}
_PROCESSORS = {
    name: json.dumps({"auto_map": dict.fromkeys(keys, f"{EVIL}--evil_code.Evil"), "processor_class": "Evil"})
    for name, keys in {
        "tokenizer_config.json": ("AutoTokenizer", "AutoProcessor"),
        "preprocessor_config.json": ("AutoImageProcessor", "AutoFeatureExtractor", "AutoVideoProcessor"),
        "processor_config.json": ("AutoProcessor",),
        "generation_config.json": ("AutoModel",),
    }.items()
}
_DETR = {"model_type": "detr", "backbone_config": None, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
_MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 2,
}  # fmt: skip
_SMALL = {
    "vocab_size": 99, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "context_length": 64, "max_position_embeddings": 64,
}  # fmt: skip
_QUANTIZATIONS = {
    "awq": {"bits": 4}, "bitsandbytes": {"load_in_4bit": True}, "eetq": {}, "fbgemm_fp8": {}, "fp8": {},
    "gptq": {"bits": 4}, "metal": {"bits": 4}, "mxfp4": {}, "nvfp4": {}, "torchao": {"quant_type": "int4_weight_only"},
}  # fmt: skip

CHECKPOINTS: Mapping[str, Callable[[Path], None]] = {
    "nothing hostile": _changed("bert", {}),
    "attention of a kernel": _changed("bert", {"attn_implementation": EVIL}),
    "private attention of a kernel": _changed("bert", {"_attn_implementation": f"{EVIL}@main:run"}),
    "internal attention of a kernel": _changed("bert", {"_attn_implementation_internal": EVIL}),
    "paged attention of a kernel": _changed("bert", {"attn_implementation": f"paged|{EVIL}"}),
    "attention by inner config": _changed("clip", {"attn_implementation": {"text_config": EVIL, "": "eager"}}),
    "attention of an inner config": _changed("clip", {"text_config.attn_implementation": EVIL}),
    "flash attention": _changed("bert", {"attn_implementation": "flash_attention_2", "dtype": "float16"}),
    "experts of a kernel": _config_alone({**_MIXTRAL, "experts_implementation": "sonicmoe"}),
    "experts of another kernel": _config_alone({**_MIXTRAL, "_experts_implementation": "deepgemm"}),
    "kernels switched on": _changed("bert", {"use_kernels": True, "kernel_config": {"kernel_mapping": {"Norm": EVIL}}}),
    "own code": _changed("bert", {"auto_map": _AUTO_MAP, "model_type": "evil"}),
    "own code for a known type": _changed("bert", {"auto_map": {"AutoModel": "evil_code.BertModel"}}),
    "own code elsewhere": _changed("bert", {"auto_map": {"AutoModel": f"{EVIL}--evil_code.BertModel"}}),
    "inner own code": _changed("clip", {"text_config.auto_map": _AUTO_MAP, "text_config.model_type": "timm_backbone"}),
    "another name": _changed("bert", {"_name_or_path": EVIL, "name_or_path": EVIL}),
    "processors of own code": _beside(_PROCESSORS),
    "an adapter": _beside({"adapter_config.json": _ADAPTER}),
    "other weights": _beside({}, {"transformers_weights": "../other.safetensors"}),
    "distributed weights": _beside({"shard-00001-model-00001-of-00001.safetensors": ""}),
    "generation of own code": _beside({"custom_generate/generate.py": "exit()", "generation_config.json": "{}"}),
    "a pickle that runs": _pickle_that_runs,
    "pickled weights": _pickled_weights,
    "a language adapter": _changed("wav2vec2", {"target_lang": "evil", "adapter_attn_dim": 4, "_name_or_path": EVIL}),
    "a backbone elsewhere": _config_alone({**_DETR, "backbone": EVIL, "use_timm_backbone": False}),
    "a backbone by its name": _config_alone({**_DETR, "backbone": "evil", "backbone_kwargs": {"out_indices": [1]}}),
    "a timm model elsewhere": _config_alone({"model_type": "timm_wrapper", "architecture": f"hf-hub:{EVIL}"}),
    **{
        f"quantized by {method}": _changed("bert", {"quantization_config": {"quant_method": method, **values}})
        for method, values in _QUANTIZATIONS.items()
    },
    **{f"kernel of {name}": _config_alone({"model_type": name, **_SMALL}) for name in ("mra", "rwkv", "yoso")},
}
"""Name → function that writes the folder."""

TRUSTED_CODE = frozenset({"own code", "own code for a known type"})
"""Checkpoints with code that runs once the user trusts it."""

EXPORTED = frozenset({"nothing hostile", "attention of a kernel", "private attention of a kernel", "pickled weights"})
"""Checkpoints to export as well; the rest is only loaded, because the load may open doors."""

_WATCHED = frozenset(
    {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "os.system", "os.posix_spawn",
     "os.exec", "pickle.find_class"}
)  # fmt: skip


class Doors:
    """Records Python's audit events about the outside world; the hook cannot be removed, so it is switched."""

    def __init__(self) -> None:
        """Take the code importable at the start as harmless: Python, the installed packages, this package."""
        self._roots = tuple({form for root in sys.path if root for form in (root, os.path.realpath(root))})
        self._opened: list[str] | None = None
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._opened is None:
            return
        if event in _WATCHED:
            self._opened.append(f"{event} {arguments[:2]!r:.100}")
        elif event == "exec":
            place = getattr(arguments[0], "co_filename", "")
            if not place.startswith(("<", *self._roots)):
                self._opened.append(f"exec {place}")

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Record the audit events of the block."""
        self._opened = opened = []
        try:
            yield opened
        finally:
            self._opened = None


def _outcome(folder: Path, *, trust: bool) -> str:
    """Inspect, load and perhaps export a checkpoint; return the error message, or the notes of the load."""
    from winml.modelkit.errors import WinMLError
    from winml.modelkit.export.exporting import HTPExporter
    from winml.modelkit.inspect.model_inspection import inspect_checkpoint
    from winml.modelkit.models.model import load_model
    from winml.modelkit.models.request import ModelRequest

    random = not list(folder.glob("*.safetensors")) and not (folder / "pytorch_model.bin").exists()
    request = ModelRequest(str(folder), random_weights=random, trust_remote_code=trust)
    try:
        inspect_checkpoint(request)
        loaded = load_model(request)
        if folder.name in EXPORTED and not trust:
            HTPExporter().export_checkpoint(request, folder / "out.onnx")
    except WinMLError as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(("done", *loaded.notes))


def main(workplace: Path) -> None:
    """Build every checkpoint, use it with and without trust, and print doors and outcome."""
    gc.set_threshold(COLLECTION_THRESHOLD)
    doors = Doors()
    for name, make in CHECKPOINTS.items():
        folder = workplace / name
        make(folder)
        for trust in (False, True):
            said = io.StringIO()
            with doors.watched() as opened, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                outcome = _outcome(folder, trust=trust)
            record = {"name": name, "trust": trust, "doors": opened, "outcome": outcome}
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
