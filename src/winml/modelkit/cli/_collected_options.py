"""Options that other tools spell as several: sizes, shapes of inputs, and bits of weights and activations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import click

from winml.modelkit.cli import _synonyms as synonyms
from winml.modelkit.cli._meant_options import choices_of, is_named_shape

_SHAPE = re.compile(r"(?:(?P<name>[\w.]+?)[:=]?)??\[?(?P<sizes>\d+(?:[x,]\d+)*)\]?")
"""Shape of an input: ``input_ids:1x128``, ``input_ids[1,128]``, ``1,3,224,224``."""
_BETWEEN_SHAPES = re.compile(r",(?=[A-Za-z])|;")
_BITS = re.compile(r"\D*(\d{1,2})(bits?)?")
_KEYS: Mapping[int, tuple[str, ...]] = {
    1: ("batch_size",),
    2: ("batch_size", "sequence_length"),
    4: ("batch_size", "", "height", "width"),
}
"""Number of axes of an input without a name → keys of ``--shape-config``: of a text, or of an image."""


def _size_keys(name: str) -> list[str]:
    """Return the keys of ``--shape-config`` that a name means; empty if it is no size."""
    from winml.modelkit.models.inputs.modalities.pipeline import SHAPE_KEYS

    named = next((keys.split() for names, keys in synonyms.SIZES.items() if name in names.split()), [])
    own = name.replace("-", "_")
    return named or [key for key in (own, f"num_{own}") if key in SHAPE_KEYS][:1]


def is_size(name: str) -> bool:
    """Return True for the plain name of an option with a size or with shapes."""
    return bool(_size_keys(name)) or name in synonyms.SHAPES.split()


class CollectedOptions:
    """Sizes, shapes and bits of a command line: the last of several options would apply alone."""

    def __init__(self, parameters: Mapping[str, click.Option]) -> None:
        """Start without any; ``parameters`` are the options of the command by name."""
        self._precisions = choices_of(parameters["precision"]) if "precision" in parameters else []
        self._has_sizes = not {"shape_config", "sizes"}.isdisjoint(parameters)
        self._has_specs = "input_specs" in parameters
        self._sizes, self._shapes, self._bits = dict[str, str](), dict[str, list[str]](), dict[str, str]()

    def collect_bits(self, name: str, value: str) -> str | None:
        """Collect an option with bits of weights or activations.

        Returns:
            The precision of all bits so far, empty if there is none of these bits; ``None`` for another option.
        """
        kind = "w" if name in synonyms.WEIGHT_BITS.split() else "a" if name in synonyms.ACTIVATION_BITS.split() else ""
        bits = _BITS.fullmatch(value.lower())
        if not kind or bits is None or not self._precisions:
            return None
        self._bits[kind] = bits[1]
        weights, activations = self._bits.get("w", "8"), self._bits.get("a")
        names = [f"w{weights}a{activations}"] if activations else [f"int{weights}", f"fp{weights}"]
        return next((name for name in names if name in self._precisions), "")

    def collect(self, name: str, values: Sequence[str]) -> int:
        """Collect an option with sizes or shapes; return how many of the values belong to it, 0 if it is none.

        Args:
            name: Plain name of the option.
            values: Value, and the words behind it.
        """
        value, *others = values
        if not self._has_sizes:
            return 0
        sizes = re.split(r"[x,]", value)
        if (keys := _size_keys(name)) and all(map(str.isdecimal, sizes)):
            count = len(keys)
            more = [word for word in others[: count - len(sizes)] if word.isdecimal()]  # --image-size 224 224
            sizes = [*sizes, *more][-count:] if len(sizes) + len(more) >= count else sizes[:1] * count  # 3,224,224
            self._sizes.update(zip(keys, (f"{int(size)}" for size in sizes), strict=True))
            return 1 + len(more)
        pairs = [pair.split("=") for pair in value.split(",")]
        if all(len(pair) == 2 and _size_keys(pair[0]) and pair[1].isdecimal() for pair in pairs):  # batch=1,seq=32
            self._sizes.update((key, size) for short, size in pairs for key in _size_keys(short))
            return 1
        if name in synonyms.SHAPES.split() or is_named_shape(value):
            return int(all(map(self._collect_shape, _BETWEEN_SHAPES.split(value))))
        is_shape = re.fullmatch(r"\[?\d+(?:[x,]\d+)+\]?", value) is not None  # --input_ids 1x128
        return int(is_shape and self._collect_shape(f"{name.replace('-', '_')}:{value}"))

    def _collect_shape(self, text: str) -> bool:
        """Collect the shape of an input, with its name or without; return False if it is none."""
        shape = _SHAPE.fullmatch(text.strip())
        sizes = re.split(r"[x,]", shape["sizes"]) if shape is not None else []
        if shape is None or not (shape["name"] or len(sizes) in _KEYS):
            return False
        if shape["name"]:
            self._shapes[shape["name"]] = sizes
        else:
            self._sizes.update((key, size) for key, size in zip(_KEYS[len(sizes)], sizes, strict=True) if key)
        return True

    def differ_from(self, inputs: Mapping[str, Sequence[str]]) -> bool:
        """Return True if a collected size is another than that of the inputs, by name → sizes."""
        places = {key: axis for keys in _KEYS.values() for axis, key in enumerate(keys)}
        by_axis = [{size for shape in inputs.values() for size in shape[axis : axis + 1]} for axis in range(max(_KEYS))]
        is_same = all(key in places and size in by_axis[places[key]] for key, size in self._sizes.items())
        return not is_same or any([*inputs.get(name, ())] != shape for name, shape in self._shapes.items())

    def sizes(self, *, is_of_file: bool) -> Iterator[tuple[str, str]]:
        """Yield flag and value of the collected sizes and shapes; those of an ONNX file are set by axis."""
        sizes, specs = dict(self._sizes), dict[str, str]()
        for name, shape in self._shapes.items():
            if self._has_specs and not is_of_file:
                specs[name] = f"[{','.join(shape)}]"
            else:
                sizes.update({f"{name}:{axis}": size for axis, size in enumerate(shape)})
        for flag, given in (("--shape-config", sizes), ("--input-specs", specs)):
            if given:
                yield flag, ",".join(f"{name}={size}" for name, size in given.items())
