"""Generated sentences for tokenizers of every kind."""

from __future__ import annotations

from transformers import ByT5Tokenizer, CanineTokenizer

from winml.modelkit.samples.generated_samples import vocabulary


def test_tokenizer_of_letters_gets_common_words() -> None:
    """A vocabulary of bytes or characters has no words; words of its letters make texts."""
    for tokenizer in (ByT5Tokenizer(), CanineTokenizer()):
        words = vocabulary(tokenizer, None)
        assert len(words) > 50
        assert "people" in words
