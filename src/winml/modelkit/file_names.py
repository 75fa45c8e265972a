"""How are the files named that winml writes? Every name is defined here and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath, PureWindowsPath

MODEL_SUFFIX = ".onnx"
BUILT_MODEL_NAME = "model.onnx"
"""The result of the last stage of a build of one part."""
ONLY_PART = "model"
"""The name of the part of a model that has one only; files do not bear it."""
ENCODER, DECODER = "encoder", "decoder"
"""The names of the parts of an encoder-decoder."""
PROMPT = "prompt"
"""The name of the part that reads a prompt, of a decoder of fixed sizes; what reads a token then is the decoder."""
VISION, EMBEDDING = "vision", "embedding"
"""The names of the parts before the decoder, in a model that is shown images."""
BUILD_CONFIG_NAME = "winml_build_config.json"
BUILD_MANIFEST_NAME = "build_manifest.json"
EVALUATION_NAME = "eval.json"
"""What a build that judges its result found."""
BUILD_LOCK_NAME = ".winml-build.lock"
SWEEP_LOCK_NAME = ".winml-sweep.lock"
SWEEP_PLAN_NAME = "sweep.json"
SWEEP_RESULTS_NAME = "results.json"
SWEEP_TABLE_NAME = "results.csv"
SWEEP_PAGE_NAME = "results.html"
SWEEP_CELL_NAME = "cell.json"
SWEEP_LOG_NAME = "log.txt"
"""In the folder of a sweep: what is asked for, what was found in three forms; and of each
model in each configuration, what was found and what libraries printed."""
ADAPTER_SUFFIX = ".onnx_adapter"
"""End of the name of an adapter that ONNX Runtime switches on: ``<name>.onnx_adapter`` beside the model."""
EXPORTED_NAME = "export.onnx"
OPTIMIZED_NAME = "optimized.onnx"
QUANTIZED_NAME = "quantized.onnx"
COMPILED_NAME = "compiled.onnx"
"""What each stage of a build writes, for a model of one part."""
EXTRACT_MANIFEST_NAME = "extract_manifest.json"
"""Names the models in a folder of cut out modules."""
SIDECAR_SUFFIX = "_htp_metadata.json"
_REPORT_SUFFIX = "_htp_export_report.md"
PARTIAL_PREFIX = ".winml-partial-"
"""Start of the name of a hidden folder of files being written; the next command that writes beside it removes one that
a killed process left."""
UNFINISHED_PREFIX = ".winml-unfinished-"
"""Start of the name of a hidden folder beside an output: what was found for it; with it, an interrupted run goes on."""
UNFINISHED_LOCK_NAME = "work.lock"
TEMPORARY_PREFIX = "winml-temporary-"
"""Start of the name of a folder of the system's temporary files."""
OWNER_LOCK_NAME = "owner.lock"
"""In a folder of files being written: locked as long as the process that made it lives."""
JOURNAL_NAME = "journal.json"
"""In a hidden folder: what is still to be put in place, once all of it is written."""
DATA_DIGITS = 12
"""Hexadecimal digits of a digest of its content in the name of a data file."""
CHECKPOINT_CONFIG_NAME = "config.json"
"""The name transformers gives the config of a checkpoint."""
GENERATION_CONFIG_NAME = "generation_config.json"
"""The name transformers gives what decides how a checkpoint generates."""
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
"""The name transformers gives what it knows of a tokenizer besides its vocabulary."""
TOKENIZER_NAME = "tokenizer.json"
"""The name of a tokenizer that is whole in one file."""
GENAI_CONFIG_NAME = "genai_config.json"
"""The name onnxruntime-genai gives the description of a model."""
AUDIO_PROCESSOR_NAME = "audio_processor_config.json"
"""The name onnxruntime-genai gives the description of what makes features of recordings."""
MODEL_CARD_NAME = "README.md"
"""The name the Hub gives the card of a model."""
TUNE_RESULT_NAME = "tune.json"
"""The answer of a tuning, in its folder."""
TUNE_PAGE_NAME = "tune.html"
TUNE_STATE_NAME = "tune_state.json"
"""What a tuning has measured so far; with it, an interrupted one goes on."""
TUNE_LOCK_NAME = ".winml-tune.lock"
TUNED_NAME = "best"
"""The folder of the build that won a tuning."""
TUNE_CANDIDATES_NAME = "candidates"
"""The folder of the builds that a tuning compares."""
TUNE_EXPORT_NAME = "exported"
"""The folder of the export that a tuning starts from, where it cannot be made the same again."""
TUNE_FIXED_NAME = "fixed.onnx"
"""Beside it: the file that is tuned, with the dynamic dimensions fixed at which it is run."""
OPTIMIZED_SUFFIX = "_opt"
_MEASURED_SUFFIX = ".measured.json"
"""End of the name of a file beside an answer that is not finished: what was measured for it."""


def unfinished_work_path(output: Path) -> Path:
    """Return the folder of what was found for a file that is not finished: ``.winml-unfinished-<name>`` beside it."""
    return output.with_name(f"{UNFINISHED_PREFIX}{output.name}")


def part_path(model: Path, part: str, *, of_several: bool) -> Path:
    """Return where one part of a model is written that as a whole would go to ``model``.

    A model of one part goes there itself, one of several to ``<stem>_<part>.onnx`` beside it.
    """
    return model.with_name(f"{model.stem}_{part}{model.suffix}") if of_several else model


def built_part_name(part: str, *, of_several: bool) -> str:
    """Return the name of a finished part in the folder of a build: ``<part>.onnx``, ``model.onnx`` for the only one."""
    return f"{part}.onnx" if of_several else BUILT_MODEL_NAME


def data_path(model: Path, digest: str) -> Path:
    """Return where the weights of a model go when they are kept outside: ``<name>.onnx.<12 digits>.data`` beside it.

    The digits are the first of a digest of the content, so no other weights have this name, whatever is written here.
    """
    return model.with_name(f"{model.name}.{digest[:DATA_DIGITS]}.data")


def unfinished_data_path(model: Path) -> Path:
    """Return where weights are kept outside while they are written, and their digest is not known."""
    return model.with_name(f"{model.name}.data")


def numbered_data_path(model: Path, number: int) -> Path:
    """Return where weights of a model go for readers that look for them by name.

    >>> numbered_data_path(Path("model.onnx"), 0).name, numbered_data_path(Path("model.onnx"), 1).name
    ('model.onnx_data', 'model.onnx_data_1')
    """
    return model.with_name(f"{model.name}_data{f'_{number}' if number else ''}")


def optimized_path(model: Path) -> Path:
    """Return where a model goes that was optimized outside of a build: ``<stem>_opt.onnx`` beside it."""
    return model.with_name(f"{model.stem}{OPTIMIZED_SUFFIX}{model.suffix}")


def measured_path(output: Path) -> Path:
    """Return where measurements are kept until the answer made of them is written: ``<name>.measured.json``."""
    return output.with_name(f"{output.name}{_MEASURED_SUFFIX}")


def is_data_of(model: str, name: str) -> bool:
    """Say whether a file has the name of weights of a model.

    Earlier versions wrote ``<name>.onnx.data``, as other tools do; some write ``<name>.onnx_data``, and ``_data_1``.

    >>> is_data_of("model.onnx", "model.onnx.0123456789ab.data"), is_data_of("model.onnx", "other.onnx.data")
    (True, False)
    """
    return re.fullmatch(rf"{re.escape(model)}((\.[0-9a-f]{{{DATA_DIGITS}}})?\.data|_data(_\d+)?)", name) is not None


def sidecar_path(model: Path) -> Path:
    """Return where the module tree and the tags of a model are written: ``<stem>_htp_metadata.json`` beside it."""
    return model.with_name(f"{model.stem}{SIDECAR_SUFFIX}")


def report_path(model: Path) -> Path:
    """Return where the Markdown report of an export is written: ``<stem>_htp_export_report.md`` beside it."""
    return model.with_name(f"{model.stem}{_REPORT_SUFFIX}")


_LONGEST_NAME = 255
"""Bytes: the longest name of a file on every usual file system."""


def stays_inside(name: str) -> bool:
    """Say whether the name of a file, ``/`` between parts, is one, and does not lead out of the folder it is in.

    The answer is the same on every system.

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
    """Say whether a name is that of a file or folder right inside another.

    >>> is_plain_name("1_Pooling"), is_plain_name(".."), is_plain_name("a/b")
    (True, False, False)
    """
    return stays_inside(name) and "/" not in name


_OUTPUT_SUFFIXES = frozenset({
    ".bin", ".bpe", ".codes", ".csv", ".data", ".dict", ".htm", ".html", ".jinja", ".json", ".md", ".model", ".npy",
    ".npz", ".onnx", ".onnx_adapter", ".safetensors", ".spm", ".tiktoken", ".tokenizer", ".txt", ".vocab",
    ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp",
})  # fmt: skip
"""Models and their data, records, reports, vocabularies and templates of tokenizers, and images."""
CARD_NAME = re.compile(r"(README|LICEN[SC]E|NOTICE|USE_POLICY|COPYING)([._-].*)?", re.IGNORECASE)
"""How the Hub's checkpoints name their card, licence and what goes with it."""


def is_output_name(name: str) -> bool:
    """Return True if commands write files of this name; hidden files, scripts and libraries are none of them.

    >>> is_output_name("model.onnx_data_1"), is_output_name(".bashrc"), is_output_name("conftest.py")
    (True, False, False)
    """
    if name.startswith(".") or not is_plain_name(name):
        return False
    has_suffix = PurePosixPath(name).suffix.lower() in _OUTPUT_SUFFIXES
    return has_suffix or any(re.fullmatch(pattern, name) for pattern in (r".+\.onnx_data(_\d+)?", CARD_NAME))


def files_folder(model: Path) -> Path:
    """Return the folder with the configs and the tokenizer of a model: its own, or the one above where it has none."""
    own, above = model.parent, model.parent.parent
    names = (CHECKPOINT_CONFIG_NAME, TOKENIZER_NAME, GENAI_CONFIG_NAME)
    has_own = any((own / name).is_file() for name in names)
    return above if not has_own and (above / CHECKPOINT_CONFIG_NAME).is_file() else own
