"""Tokenizer of a ``tokenizer.json`` with the calls of a transformers tokenizer that this package uses.

Used if transformers is not installed. The ``tokenizers`` library does the work, as it does inside transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

_UNLIMITED = 10**30
"""Specified: ``model_max_length`` of a tokenizer that states no maximum."""

_DEFAULT_TOKENS: Mapping[str, Sequence[str]] = {"pad_token": ("[PAD]", "<pad>"), "mask_token": ("[MASK]", "<mask>")}
"""Specified by transformers: kind of a special token → its spellings in tokenizer classes, for configs that omit it."""
_WITHOUT_DEFAULTS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes whose special tokens are those of the config alone."""
_PADDED_AT_THE_LEFT = ("CodeLlama", "Cohere", "Gemma", "Llama", "Siglip2", "XLNet")
"""Specified by transformers: beginnings of the tokenizer classes that pad at the left unless the config differs."""


class TokenRows(dict[str, Any]):
    """Tokens of one text, or of several, by name: ``input_ids``, ``attention_mask``, ``token_type_ids``.

    Attributes:
        encodings: Encoding of each row, by the ``tokenizers`` library.
    """

    def __init__(self, values: Mapping[str, Any], encodings: Sequence[tokenizers.Encoding]) -> None:
        """Store the values by name, and the encodings."""
        super().__init__(values)
        self.encodings = encodings

    def word_ids(self, row: int = 0) -> list[int | None]:
        """Return the word of each token of a row; None for special tokens."""
        return self.encodings[row].word_ids

    def sequence_ids(self, row: int = 0) -> list[int | None]:
        """Return 0 for tokens of the first text of a pair, 1 for tokens of the second; None for special tokens."""
        return self.encodings[row].sequence_ids


class FileTokenizer:
    """Tokenizer of a ``tokenizer.json``.

    Attributes:
        model_max_length: Maximum number of tokens of a text.
        tokens: Kind of a special token, such as ``pad_token`` → its text.
    """

    is_fast = True
    """Specified by transformers: the tokenizer provides offsets."""
    model_input_names: Sequence[str] = ("input_ids", "token_type_ids", "attention_mask")

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Read a file.

        Args:
            path: The file.
            config: Content of the ``tokenizer_config.json`` next to it, and special tokens.
        """
        self.name_or_path = str(path.parent)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.model_max_length = int(config.get("model_max_length") or _UNLIMITED)
        is_left = str(config.get("tokenizer_class")).startswith(_PADDED_AT_THE_LEFT)
        self._sides = {
            "truncation": config.get("truncation_side", "right"),
            "padding": config.get("padding_side", "left" if is_left else "right"),
        }
        texts = {key: value for key, value in config.items() if key.endswith("_token")}
        texts = {key: value["content"] if isinstance(value, dict) else value for key, value in texts.items()}
        self.tokens = {key: value for key, value in texts.items() if isinstance(value, str)}
        for kind in (
            () if config.get("tokenizer_class") in _WITHOUT_DEFAULTS else _DEFAULT_TOKENS.keys() - config.keys()
        ):
            known = (token for token in _DEFAULT_TOKENS[kind] if self._tokenizer.token_to_id(token) is not None)
            if (token := next(known, None)) is not None:
                self.tokens[kind] = token

    def __getattr__(self, name: str) -> Any:
        """Return a special token (``pad_token``) or its number (``pad_token_id``); None if the model has none."""
        if name.endswith("_token"):
            return self.tokens.get(name)
        if name.endswith("_token_id"):
            token = self.tokens.get(name.removesuffix("_id"))
            return None if token is None else self._tokenizer.token_to_id(token)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, or the text of a special token."""
        if name.endswith("_token"):
            self.tokens[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def all_special_ids(self) -> list[int]:
        """Numbers of the special tokens."""
        return [number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]

    def get_vocab(self) -> dict[str, int]:
        """Return the number of each token."""
        return self._tokenizer.get_vocab()

    def num_special_tokens_to_add(self, **options: bool) -> int:
        """Return the number of special tokens around a text; with ``pair=True``, around two texts."""
        return self._tokenizer.num_special_tokens_to_add(options.get("pair", False))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, not truncated."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, number: int) -> str | None:
        """Return the token of a number; None if no token has it."""
        return self._tokenizer.id_to_token(number)

    def __call__(
        self,
        text: Any,
        text_pair: Any = None,
        *,
        add_special_tokens: bool = True,
        truncation: bool | str = False,
        max_length: int | None = None,
        padding: bool | str = False,
        stride: int = 0,
        is_split_into_words: bool = False,
        return_tensors: str | None = None,
        return_token_type_ids: bool = True,
        return_offsets_mapping: bool = False,
        return_special_tokens_mask: bool = False,
        return_overflowing_tokens: bool = False,
        verbose: bool = True,  # noqa: ARG002  # of transformers; nothing is printed here
    ) -> TokenRows:
        """Tokenize one text or several; see the tokenizers of transformers for the arguments."""
        is_one = isinstance(text, str)
        texts = [text] if is_one else list(text)
        pairs = [text_pair] if is_one and text_pair is not None else text_pair
        longest = max_length or self.model_max_length
        if truncation and longest < _UNLIMITED:
            strategy = truncation if isinstance(truncation, str) else "longest_first"
            direction = self._sides["truncation"]
            self._tokenizer.enable_truncation(longest, stride=stride, strategy=strategy, direction=direction)
        if padding and self.pad_token is not None:
            length = longest if padding == "max_length" else None
            pad = {"pad_id": self.pad_token_id, "pad_token": self.pad_token, "length": length}
            self._tokenizer.enable_padding(direction=self._sides["padding"], **pad)
        try:
            encoded = self._tokenizer.encode_batch(
                texts if pairs is None else list(zip(texts, pairs, strict=True)),
                is_pretokenized=is_split_into_words,
                add_special_tokens=add_special_tokens,
            )
        finally:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        rows, sources = list(encoded), list(range(len(encoded)))
        if return_overflowing_tokens:
            windows = [(row, number) for number, first in enumerate(encoded) for row in (first, *first.overflowing)]
            rows, sources = [row for row, _ in windows], [number for _, number in windows]
        values: dict[str, Any] = {"input_ids": [row.ids for row in rows]}
        if return_token_type_ids:
            values["token_type_ids"] = [row.type_ids for row in rows]
        values["attention_mask"] = [row.attention_mask for row in rows]
        if return_special_tokens_mask:
            values["special_tokens_mask"] = [row.special_tokens_mask for row in rows]
        if return_offsets_mapping:
            values["offset_mapping"] = [row.offsets for row in rows]
        if return_overflowing_tokens:
            values["overflow_to_sample_mapping"] = sources
        if return_tensors is not None:
            values = {name: np.asarray(value) for name, value in values.items()}
        elif is_one and not return_overflowing_tokens:
            values = {name: value[0] for name, value in values.items()}
        return TokenRows(values, rows)
