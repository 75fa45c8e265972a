"""Opens image and audio cells of a dataset.

The source is a file or bytes. A cell that cannot be opened becomes a value with the reason: one damaged image does
not end an evaluation.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below, refuse_special_file
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.host import available_bytes
from winml.modelkit.version import install_command
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Allowed formats of Pillow, independent of the file name. Another format starts a program (EPS)."""
_ORIENTATION = 0x0112
"""Specified by Exif: tag of the orientation of an image; 1 means upright."""
_SAMPLE_BYTES = 4
_MAX_SAMPLE = (1 << 15) - 1
"""Largest sample of 16 bits."""
_PIXEL_BYTES = 24
"""Memory per pixel, from decoding to the values of a processor, in bytes. Measured: 20."""
_MAX_PIXELS = 89_478_485
"""Maximum number of pixels of an image: the size from which Pillow warns of decompression bombs."""
_RATES_HZ = (1000, 1_000_000)
"""Accepted sampling rates. Chosen: telephones record at 8 kHz, ultrasound at 500 kHz. Resampling a lower rate would
multiply the number of samples."""


_FILE_KEY = "file_name"
"""Entry of the ``info`` of an opened image: the name of its file."""


@dataclass(frozen=True)
class Recording:
    """Audio, mixed to one channel."""

    samples: NDArray[np.float32]
    """Shape [samples], between -1 and 1."""
    rate_hz: int
    name: str = ""
    """Name of its file; empty if it comes from an array."""


def fit_to_grid(image: Image, inputs: Iterable[InputTensorSpec], processor: Any) -> Image:
    """Return an image resized to the fixed grid of patches of a graph; unchanged if the graph has none.

    Args:
        image: The image.
        inputs: Inputs of the graph.
        processor: Image processor that cuts the image into patches.
    """
    grid = next((spec.fixed_grid for spec in inputs if spec.fixed_grid), None)
    return image if grid is None else image.resize((grid[2] * processor.patch_size, grid[1] * processor.patch_size))


@dataclass(frozen=True)
class Unreadable:
    """An image or audio cell that cannot be opened."""

    name: str
    """File name, or location in the data."""
    reason: str
    """Message of the library that opens it."""


def install_hint() -> str:
    """Return the installation command of the libraries for datasets, media and metrics."""
    return f"Install the packages for datasets: {install_command('eval')}"


def require_pillow(user: str = "") -> None:
    """Refuse images without Pillow.

    Raises:
        UsageError: begins with the option or the input that reads images.
    """
    try:
        import PIL.Image  # noqa: F401  # checks the import
    except ImportError as error:
        message = f"{user}images require Pillow, which is not installed"
        raise UsageError(message, hint="Install it: pip install pillow") from error


def open_image(cell: object, folders: Sequence[Path] | None, label: str) -> Image | Unreadable:
    """Open the image of a cell, decoded and in upright orientation, or return why it cannot be opened.

    Args:
        cell: An image, a path, bytes, or a record of ``bytes`` and ``path`` as in datasets.
        folders: Allowed folders of a path; a relative path is relative to the first. None: the path comes from the
            user and may lead to any regular file.
        label: Name of a cell without a file name.

    Raises:
        UsageError: Pillow is missing.
    """
    require_pillow()
    import PIL.Image
    import PIL.ImageOps

    source, name = (cell, label) if isinstance(cell, PIL.Image.Image) else _find_source(cell, folders, label)
    if isinstance(source, Unreadable):
        return source
    try:
        with foreign_parser(""):
            try:
                with warnings.catch_warnings():
                    # The size is checked below, with a winml message.
                    warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
                    if not isinstance(source, PIL.Image.Image):
                        source = PIL.Image.open(source, formats=_IMAGE_FORMATS)
                    image = source
            except PIL.UnidentifiedImageError:
                return Unreadable(name, f"the format is none of {', '.join(_IMAGE_FORMATS)}")
            if problem := _size_problem(image.width, image.height):
                image.close()
                return Unreadable(name, problem)
            image.load()
            if image.getexif().get(_ORIENTATION, 1) != 1:
                # Cameras store the orientation beside the pixels; transformers pipelines apply it, too.
                image = PIL.ImageOps.exif_transpose(image)
    except InputError as error:
        return Unreadable(name, error.message)
    if name != label:
        image.info[_FILE_KEY] = name
    return image


def media_name(value: object) -> str:
    """Return the name of the file of an image or a recording; empty if it comes from another source."""
    if isinstance(value, Recording):
        return value.name
    info = getattr(value, "info", None)
    return str(info.get(_FILE_KEY, "")) if isinstance(info, dict) else ""


def _size_problem(width: int, height: int) -> str:
    """Return why an image of this size is not decoded; empty if it is decoded."""
    pixels, free = width * height, available_bytes()
    if pixels > _MAX_PIXELS:
        return f"its header declares {width} x {height} pixels; the maximum is {_MAX_PIXELS:_} pixels"
    if pixels * _PIXEL_BYTES > free // 2:
        return f"its header declares {width} x {height} pixels; {size_words(free)} of memory are free"
    return ""


def open_recording(cell: object, folders: Sequence[Path] | None, label: str) -> Recording | Unreadable:
    """Open the audio of a cell, or return why it cannot be opened.

    Args:
        cell: A recording, a path, bytes, or a record as in datasets: ``bytes`` and ``path``, or ``array`` and
            ``sampling_rate``.
        folders: Allowed folders of a path; a relative path is relative to the first. None: the path comes from the
            user and may lead to any regular file.
        label: Name of a cell without a file name.

    Raises:
        UsageError: soundfile is missing.
    """
    if isinstance(cell, Recording):
        return cell
    if isinstance(cell, Mapping) and cell.get("array") is not None:
        import numpy as np

        return Recording(_mix_channels(np.asarray(cell["array"], np.float32).T), int(cell["sampling_rate"]))
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise UsageError(f"audio files require soundfile: {error}", hint="Install it: pip install soundfile") from error
    source, name = _find_source(cell, folders, label)
    if isinstance(source, Unreadable):
        return source
    try:
        with foreign_parser(""), soundfile.SoundFile(source) as file:
            if not _RATES_HZ[0] <= file.samplerate <= _RATES_HZ[1]:
                return Unreadable(
                    name,
                    f"its sampling rate is {file.samplerate} Hz, expected {_RATES_HZ[0]} to {_RATES_HZ[1]} Hz",
                )
            sample_bytes, free = file.frames * file.channels * _SAMPLE_BYTES, available_bytes()
            if sample_bytes > free // 2:
                return Unreadable(
                    name,
                    f"its header declares {size_words(sample_bytes)} of samples; {size_words(free)} of memory are free",
                )
            samples, rate_hz = file.read(dtype="float32"), file.samplerate
    except InputError as error:
        return Unreadable(name, error.message)
    return Recording(_mix_channels(samples), int(rate_hz), name)


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording as a WAVE file with samples of 16 bits, which every player reads; samples beyond 1 are cut."""
    import wave

    samples = (recording.samples.clip(-1, 1) * _MAX_SAMPLE).round().astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(samples.itemsize)
        file.setframerate(recording.rate_hz)
        file.writeframes(samples.tobytes())


def resampled(recording: Recording, rate_hz: int) -> NDArray[np.float32]:
    """Resample audio to another rate, with an anti-aliasing filter.

    Raises:
        UsageError: scipy is missing.
    """
    if recording.rate_hz == rate_hz:
        return recording.samples
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise UsageError(
            f"resampling audio from {recording.rate_hz} Hz to {rate_hz} Hz requires scipy, which is not installed",
            hint="Install it: pip install scipy",
        ) from error
    common = math.gcd(recording.rate_hz, rate_hz)
    samples: NDArray[np.float32] = resample_poly(
        recording.samples, rate_hz // common, recording.rate_hz // common
    ).astype("float32")
    return samples


def _mix_channels(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of the channels of ``[samples]`` or ``[samples, channels]``."""
    return samples if samples.ndim == 1 else samples.mean(axis=-1, dtype="float32")


def _find_source(cell: object, folders: Sequence[Path] | None, label: str) -> tuple[Any, str]:
    """Return the source to open, or why the cell has none; and its name without folders.

    Args:
        cell: The cell: bytes, a path, or an object with both.
        folders: Folders that files must lie in; `None`: any regular file.
        label: Name of a cell without a path.
    """
    content, path = cell, None
    if isinstance(cell, Mapping):
        content, path = cell.get("bytes"), cell.get("path")
    elif isinstance(cell, (str, Path)):
        content, path = None, cell
    if isinstance(content, (bytes, bytearray)):
        return io.BytesIO(content), Path(path).name if isinstance(path, (str, Path)) else label
    if not isinstance(path, (str, Path)):
        return Unreadable(label, f"contains {type(cell).__name__}, neither a file nor bytes"), label
    path, name = Path(path), Path(path).name
    try:
        if folders is None:
            refuse_special_file(path)
            return path, name
        # datasets makes paths absolute.
        folder = next((allowed for allowed in folders if path.is_relative_to(allowed.absolute())), folders[0])
        relative_path = path.relative_to(folder.absolute()) if path.is_relative_to(folder.absolute()) else path
        name = name if relative_path.is_absolute() else relative_path.as_posix()
        return file_below(folder, relative_path), name
    except ForeignNameError as error:
        return Unreadable(name, str(error)), name
