"""Names of the files that winml writes, defined here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

MODEL_SUFFIX = ".onnx"
BUILT_MODEL_NAME = "model.onnx"
"""Result of the last stage of a build of one part."""
ONLY_PART = "model"
"""Part name of a model with a single part; not used in file names."""
ENCODER, DECODER = "encoder", "decoder"
"""Part names of an encoder-decoder model."""
PROMPT = "prompt"
"""Name of the part that reads the prompt, for a decoder of fixed sizes; the decoder then reads single tokens. Of
several such parts, each has its number of tokens in its name: ``prompt_64``."""
VISION, EMBEDDING = "vision", "embedding"
"""Names of the parts before the decoder of a vision-language model."""
VISION_ENCODER, MASK_DECODER = "vision_encoder", "prompt_encoder_mask_decoder"
"""Part names of a model of masks for prompts. Specified by optimum and transformers.js."""
PIPELINE_INDEX_NAME = "model_index.json"
"""Name used by diffusers for the index of a pipeline's components."""
VAE_ENCODER, VAE_DECODER = VAE_PARTS = ("vae_encoder", "vae_decoder")
"""Part names of the two graphs of a diffusion pipeline's autoencoder."""
_PIPELINE_PARTS = frozenset({"unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3", *VAE_PARTS})
"""Part names of a diffusion pipeline. Specified by optimum: each is in a folder of its name."""
BUILD_CONFIG_NAME = "winml_build_config.json"
BUILD_MANIFEST_NAME = "build_manifest.json"
EVALUATION_NAME = "eval.json"
"""Evaluation result in a build folder."""
PROOF_RECORD_NAME = "proof/proof.json"
PROOF_TENSORS_NAME = "proof/proof.safetensors"
"""Files of the proof beside a model."""
BUILD_LOCK_NAME = ".winml-build.lock"
SWEEP_LOCK_NAME = ".winml-sweep.lock"
SWEEP_PLAN_NAME = "sweep.json"
SWEEP_RESULTS_NAME = "results.json"
SWEEP_TABLE_NAME = "results.csv"
SWEEP_PAGE_NAME = "results.html"
SWEEP_CELL_NAME = "cell.json"
SWEEP_LOG_NAME = "log.txt"
"""Files in the folder of a sweep: the plan, and the results in three formats; for each configuration of a model, its
result and the output of libraries."""
ADAPTER_SUFFIX = ".onnx_adapter"
"""File name suffix of an adapter that ONNX Runtime activates: ``<name>.onnx_adapter`` beside the model."""
EXPORTED_NAME = "export.onnx"
OPTIMIZED_NAME = "optimized.onnx"
QUANTIZED_NAME = "quantized.onnx"
COMPILED_NAME = "compiled.onnx"
"""Results of the stages of a build, for a model of one part."""
EXTRACT_MANIFEST_NAME = "extract_manifest.json"
"""Manifest of the models in a folder of extracted modules."""
PACKAGE_MANIFEST_NAME, PACKAGE_COMPONENT_NAME = "manifest.json", "component.json"
"""Specified by ONNX Runtime: file in the root of a model package, and file in the folder of a component."""
SIDECAR_SUFFIX = "_htp_metadata.json"
_REFIT_SUFFIX = "_refit.onnx"
_REPORT_SUFFIX = "_htp_export_report.md"
PARTIAL_PREFIX = ".winml-partial-"
"""Name prefix of a hidden folder of files being written; a leftover of a killed process is removed by the next
command that writes beside it."""
UNFINISHED_PREFIX = ".winml-unfinished-"
"""Name prefix of a hidden folder beside an output, with intermediate results; an interrupted run resumes from them."""
UNFINISHED_LOCK_NAME = "work.lock"
TEMPORARY_PREFIX = "winml-temporary-"
"""Name prefix of a folder for the system's temporary files."""
OWNER_LOCK_NAME = "owner.lock"
"""Lock in a folder of files being written: held as long as the process that made the folder lives."""
JOURNAL_NAME = "journal.json"
"""Journal in a hidden folder: files still to be moved to their final names, after all are written."""
DATA_DIGITS = 12
"""Number of hexadecimal digits of the content digest in the name of a data file."""
CHECKPOINT_CONFIG_NAME = "config.json"
"""Name used by transformers for the config of a checkpoint."""
GENERATION_CONFIG_NAME = "generation_config.json"
"""Name used by transformers for the generation settings of a checkpoint."""
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
"""Name used by transformers for the settings of a tokenizer, without its vocabulary."""
TOKENIZER_NAME = "tokenizer.json"
"""Name of a tokenizer that is complete in one file."""
GENAI_CONFIG_NAME = "genai_config.json"
"""Name used by onnxruntime-genai for the description of a model."""
AUDIO_PROCESSOR_NAME = "audio_processor_config.json"
"""Name used by onnxruntime-genai for the description of the audio feature extractor."""
IMAGE_PROCESSOR_NAME = "image_processor.json"
"""Name of the description of the image processor for onnxruntime-genai; its default is the name of a file of the
checkpoint."""
TRANSFORMERS_EXPORT_NAME = "export.json"
"""Name used by the exporters of transformers for the description of their files."""
FOUNDRY_NAME = "inference_model.json"
"""Name of the file by which Foundry Local finds a folder of onnxruntime-genai."""
MODEL_CARD_NAME = "README.md"
"""Name used by the Hub for the model card."""
TUNE_RESULT_NAME = "tune.json"
"""Result of a tuning, in its folder."""
TUNE_PAGE_NAME = "tune.html"
TUNE_STATE_NAME = "tune_state.json"
"""Measurements of a tuning; an interrupted tuning resumes from them."""
TUNE_LOCK_NAME = ".winml-tune.lock"
TUNED_NAME = "best"
"""Folder of the build that won a tuning."""
TUNE_CANDIDATES_NAME = "candidates"
"""Folder of the builds that a tuning compares."""
TUNE_EXPORT_NAME = "exported"
"""Folder of the export that a tuning starts from, if the export is not reproducible."""
TUNE_FIXED_NAME = "fixed.onnx"
"""File beside the export: the tuned model with dynamic dimensions fixed to the measured sizes."""
OPTIMIZED_SUFFIX = "_opt"
_MEASURED_SUFFIX = ".measured.json"
"""Name suffix of a file beside an unfinished result: its measurements."""


def answering_part(parts: Iterable[str]) -> str:
    """Return the name of the part whose outputs are those of the model.

    >>> answering_part(["encoder", "decoder"]), answering_part(["model"])
    ('decoder', 'model')
    """
    names = [*parts]
    return next((name for name in (DECODER, MASK_DECODER) if name in names), ONLY_PART)


def prompt_parts(parts: Iterable[str]) -> list[str]:
    """Return the names of the parts that read prompts.

    >>> prompt_parts(["prompt_16", "prompt_64", "decoder"])
    ['prompt_16', 'prompt_64']
    """
    return [name for name in parts if re.fullmatch(rf"{PROMPT}(_\d+)?", name)]


def unfinished_work_path(output: Path) -> Path:
    """Return the folder of intermediate results of an unfinished output: ``.winml-unfinished-<name>`` beside it."""
    return output.with_name(f"{UNFINISHED_PREFIX}{output.name}")


def part_path(model: Path, part: str, *, of_several: bool) -> Path:
    """Return the path of one part of a model that is written to ``model``.

    A model of one part is written to ``model`` itself, a model of several parts to ``<stem>_<part>.onnx`` beside it.
    """
    return model.with_name(f"{model.stem}_{part}{model.suffix}") if of_several else model


def built_part_name(part: str, *, of_several: bool) -> str:
    """Return the path of a finished part in a build folder, with ``/``.

    >>> built_part_name("decoder", of_several=True), built_part_name("model", of_several=False)
    ('decoder.onnx', 'model.onnx')
    >>> built_part_name("unet", of_several=True)
    'unet/model.onnx'
    """
    if part in _PIPELINE_PARTS:
        return f"{part}/{BUILT_MODEL_NAME}"
    return f"{part}.onnx" if of_several else BUILT_MODEL_NAME


def data_path(model: Path, digest: str) -> Path:
    """Return the path of the external weights of a model: ``<name>.onnx.<12 digits>.data`` beside it.

    The digits are the first digits of the content digest, so the name is unique to these weights.
    """
    return model.with_name(f"{model.name}.{digest[:DATA_DIGITS]}.data")


def unfinished_data_path(model: Path) -> Path:
    """Return the path of external weights while they are written and their digest is unknown."""
    return model.with_name(f"{model.name}.data")


def numbered_data_path(model: Path, number: int) -> Path:
    """Return the path of the external weights of a model for readers that expect a fixed name.

    >>> numbered_data_path(Path("model.onnx"), 0).name, numbered_data_path(Path("model.onnx"), 1).name
    ('model.onnx_data', 'model.onnx_data_1')
    """
    return model.with_name(f"{model.name}_data{f'_{number}' if number else ''}")


def optimized_path(model: Path) -> Path:
    """Return the path of a model that was optimized outside of a build: ``<stem>_opt.onnx`` beside it."""
    return model.with_name(f"{model.stem}{OPTIMIZED_SUFFIX}{model.suffix}")


def measured_path(output: Path) -> Path:
    """Return the path of the measurements of an unfinished result: ``<name>.measured.json``."""
    return output.with_name(f"{output.name}{_MEASURED_SUFFIX}")


def is_data_of(model: str, name: str) -> bool:
    """Return True if a file name is the name of external weights of a model.

    Earlier versions and other tools write ``<name>.onnx.data``; some tools write ``<name>.onnx_data`` and
    ``_data_1``.

    >>> is_data_of("model.onnx", "model.onnx.0123456789ab.data"), is_data_of("model.onnx", "other.onnx.data")
    (True, False)
    """
    return re.fullmatch(rf"{re.escape(model)}((\.[0-9a-f]{{{DATA_DIGITS}}})?\.data|_data(_\d+)?)", name) is not None


def proof_paths(folder: Path) -> tuple[Path, Path]:
    """Return the paths of the record and of the arrays of the proof beside a model."""
    return folder / PROOF_RECORD_NAME, folder / PROOF_TENSORS_NAME


def sidecar_path(model: Path) -> Path:
    """Return the path of the module tree and the tags of a model: ``<stem>_htp_metadata.json`` beside it."""
    return model.with_name(f"{model.stem}{SIDECAR_SUFFIX}")


def refit_path(model: Path) -> Path:
    """Return the path of the traced graph of a model, without weights: ``<stem>_refit.onnx`` beside it."""
    return model.with_name(f"{model.stem}{_REFIT_SUFFIX}")


def report_path(model: Path) -> Path:
    """Return the path of the Markdown report of an export: ``<stem>_htp_export_report.md`` beside it."""
    return model.with_name(f"{model.stem}{_REPORT_SUFFIX}")


_LONGEST_NAME = 255
"""Longest file name in bytes, on every usual file system."""


def stays_inside(name: str) -> bool:
    """Return True if a file name, with ``/`` between parts, is valid and does not lead out of its folder.

    The result is the same on every operating system.

    >>> stays_inside("1_Pooling/config.json"), stays_inside("../config.json"), stays_inside("C:config.json")
    (True, False, False)
    """
    path = PurePosixPath(name)
    is_plain = name == path.as_posix() and path.parts and not path.is_absolute() and ".." not in path.parts
    is_foreign = PureWindowsPath(name).drive or "\\" in name or "\0" in name
    try:
        is_short = all(len(part.encode()) <= _LONGEST_NAME for part in path.parts)
    except UnicodeEncodeError:
        return False  # half of a surrogate pair, which JSON can hold and a name cannot
    return bool(is_plain and not is_foreign and is_short)


def is_plain_name(name: str) -> bool:
    """Return True if a name is the name of a file or folder directly inside another folder.

    >>> is_plain_name("1_Pooling"), is_plain_name(".."), is_plain_name("a/b")
    (True, False, False)
    """
    return stays_inside(name) and "/" not in name


def is_pipeline_folder(folder: Path) -> bool:
    """Return True if a folder has the index of a diffusers pipeline."""
    return (folder / PIPELINE_INDEX_NAME).is_file()


_OUTPUT_SUFFIXES = frozenset({
    ".bin", ".bpe", ".codes", ".csv", ".data", ".dict", ".htm", ".html", ".jinja", ".json", ".md", ".model", ".npy",
    ".npz", ".onnx", ".onnx_adapter", ".safetensors", ".spm", ".tiktoken", ".tokenizer", ".txt", ".vocab",
    ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp",
})  # fmt: skip
"""Models and their data, records, reports, vocabularies and templates of tokenizers, and images."""
CARD_NAME = re.compile(r"(README|LICEN[SC]E|NOTICE|USE_POLICY|COPYING)([._-].*)?", re.IGNORECASE)
"""Names of model cards, licences and related files in checkpoints on the Hub."""


def is_output_name(name: str) -> bool:
    """Return True if commands write files of this name; False for hidden files, scripts and libraries.

    >>> is_output_name("model.onnx_data_1"), is_output_name(".bashrc"), is_output_name("conftest.py")
    (True, False, False)
    """
    if name.startswith(".") or not is_plain_name(name):
        return False
    has_suffix = PurePosixPath(name).suffix.lower() in _OUTPUT_SUFFIXES
    return has_suffix or any(re.fullmatch(pattern, name) for pattern in (r".+\.onnx_data(_\d+)?", CARD_NAME))


def files_folder(model: Path) -> Path:
    """Return the folder with the configs and the tokenizer of a model: its folder, or else the parent folder."""
    folder, parent = model.parent, model.parent.parent
    names = (CHECKPOINT_CONFIG_NAME, TOKENIZER_NAME, GENAI_CONFIG_NAME)
    has_own = any((folder / name).is_file() for name in names)
    return parent if not has_own and (parent / CHECKPOINT_CONFIG_NAME).is_file() else folder
