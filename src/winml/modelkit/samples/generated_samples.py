"""Generation of realistic samples for a model, if the user provides none.

Sentences of words of its tokenizer, and images and audio with natural spectra, are converted to arrays by the
processors beside the model. A decoder with a KV cache runs as in ``winml generate``, and the inputs of each run are a
sample: a cache of random numbers has other ranges than keys and values of a text. The encoder of a decoder is the
file of the encoder part at the same stage, found by its name; so is the other part of a prompt graph and a step. One
sample of a decoder is in memory at a time.

for: Llama, and decoders behind an encoder as in Whisper.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.file_names import DECODER, EMBEDDING, ENCODER, VISION, prompt_parts
from winml.modelkit.onnx.bundle import PartDescription, read_part_description
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.ort.decoding.inputs import TOKEN_IDS, inputs_of_file
from winml.modelkit.ort.decoding.parts import EncoderDecoder, TokenEmbedder, VisionLanguageDecoder
from winml.modelkit.ort.default_sizes import IMAGE_EDGE, SAMPLING_RATE_HZ
from winml.modelkit.ort.graph_inputs import graph_inputs, sizes_by_key
from winml.modelkit.ort.opened_model import RunOptions, Values, random_values
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.media import Recording
from winml.modelkit.samples.preprocessing import Preprocessor, SampleFeeds
from winml.modelkit.samples.processors import kinds_for, missing_processors, open_processor

if TYPE_CHECKING:
    from PIL.Image import Image


GENERATED_KINDS = ("decoding", "processor", "random")
"""Kinds of generated samples, as in the record of a calibration: runs of a decoder, a processor, or random values."""
_FEWEST_WORDS = 8
"""Minimum size of a vocabulary for making sentences."""
_SENTENCE_WORDS = (2.8, 0.5)
"""Mean and deviation of the logarithm of the number of words in a sentence. Chosen: 16 words in the median, 7 to 37
in 90 % of the sentences."""
_SHORTEST, _LONGEST = 3, 60
_WORD_STARTS = ("\u0120", "\u2581")
"""Specified by byte-level BPE and by SentencePiece: prefix of a token at the start of a word."""
_PIECE_PREFIX = "##"
"""Specified by WordPiece: prefix of a token inside a word."""
_COMMON_WORDS = (
    "the of and to in a is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
"""Common English words, the most frequent first, for tokenizers without words."""
_RECORDING_SECONDS = 2.0
"""Length of a generated audio sample in seconds. Chosen: a few words."""


def vocabulary(tokenizer: Any, value_range: tuple[float, float] | None) -> list[str]:
    """Return the whole words among the tokens of the model, the most frequent first.

    If its tokens are letters or bytes, return common words of these letters. For: ByT5, CANINE.
    """
    top_id = math.inf if value_range is None else value_range[1]
    special = set(tokenizer.all_special_ids)
    tokens = sorted(
        (number, token) for token, number in tokenizer.get_vocab().items() if number <= top_id and number not in special
    )
    starts = [token[1:] for _, token in tokens if token.startswith(_WORD_STARTS)]
    words = starts or [token for _, token in tokens if not token.startswith(_PIECE_PREFIX)]
    whole = [word for word in words if word.isascii() and word.isalpha() and (len(word) > 1 or word in "aI")]
    if len(whole) >= _FEWEST_WORDS:
        return whole
    letters = {token for _, token in tokens}
    return [word for word in _COMMON_WORDS.split() if letters.issuperset(word)] or whole


def sentence(generator: np.random.Generator, words: Sequence[str]) -> str:
    """Return a sentence with natural word frequencies: the second word is half as frequent as the first, and so on."""
    mean, deviation = _SENTENCE_WORDS
    length = int(np.clip(round(float(generator.lognormal(mean, deviation))), _SHORTEST, _LONGEST))
    shares = 1 / np.arange(1, len(words) + 1)
    numbers = generator.choice(len(words), length, p=shares / shares.sum())
    return f"{' '.join(words[number] for number in numbers).capitalize()}."


def picture(generator: np.random.Generator) -> Image:
    """Return an image with amplitudes that decrease with the frequency, as in photographs."""
    import PIL.Image

    edge = IMAGE_EDGE
    frequencies = np.hypot(np.fft.fftfreq(edge)[:, None], np.fft.rfftfreq(edge)[None, :])
    gray, *colours = (_shaped_noise(generator, frequencies, (edge, edge)) for _ in range(4))
    # The channels of a photograph are strongly correlated.
    channels = np.stack([0.9 * gray + 0.4 * colour for colour in colours], axis=-1)
    centre = generator.uniform(90, 160)
    return PIL.Image.fromarray(np.clip(centre + generator.uniform(35, 65) * channels, 0, 255).astype(np.uint8))


def recording(generator: np.random.Generator, rate_hz: int) -> Recording:
    """Return audio with amplitudes that decrease with the frequency, and with an envelope like that of syllables."""
    length = int(_RECORDING_SECONDS * rate_hz)
    noise = _shaped_noise(generator, np.fft.rfftfreq(length, 1 / rate_hz), (length,))
    times = np.arange(length) / rate_hz
    envelope = 0.55 + 0.45 * np.sin(2 * np.pi * (generator.uniform(3, 5) * times + generator.random()))
    return Recording((0.1 * noise * envelope).clip(-1, 1).astype(np.float32), rate_hz)


def _shaped_noise(generator: np.random.Generator, frequencies: Array, shape: tuple[int, ...]) -> Array:
    """Return noise of unit variance with amplitudes inverse to the frequency."""
    spectrum = np.fft.rfftn(generator.standard_normal(shape), axes=range(len(shape)))
    noise = np.fft.irfftn(
        spectrum / np.maximum(frequencies, frequencies[frequencies > 0].min()), shape, axes=range(len(shape))
    )
    noise -= noise.mean()
    result: Array = noise / noise.std()
    return result


def has_processors(inputs: Sequence[InputTensorSpec], folder: Path) -> bool:
    """Return True if a folder has all processors for the inputs; states of a cache need no processor."""
    names = [spec.name for spec in inputs if spec.cache is None]
    return bool(kinds_for(names)) and not missing_processors(names, folder)


def with_fixed_sizes(inputs: Sequence[InputTensorSpec], sizes: Mapping[str, int]) -> list[InputTensorSpec]:
    """Return inputs with the specified sizes of dynamic dimensions."""
    by_key = sizes_by_key(inputs, sizes)
    return [
        spec.model_copy(update={"shape": tuple(by_key.get(str(size), size) for size in spec.shape)}) for spec in inputs
    ]


def generate_samples(
    inputs: Sequence[InputTensorSpec], folder: Path, count: int, run: RunOptions
) -> tuple[Values, ...]:
    """Return samples: generated sentences, images and recordings as arrays of the processors in a folder.

    Raises:
        UsageError: the processors provide no input of the graph, or the tokenizer has no words for sentences.
        InputError: files of the processors are damaged.
    """
    fixed_inputs = with_fixed_sizes(inputs, run.sizes)
    preprocessor = Preprocessor.of(folder, fixed_inputs, option="samples generated for the comparison")
    rows = preprocessor.fixed_batch or run.batch_size or 1
    ids = next((spec for spec in inputs if spec.name == "input_ids"), None)
    tokenizer = preprocessor.processors.get("tokenizer")
    words = [] if tokenizer is None else vocabulary(tokenizer, None if ids is None else ids.value_range)
    if tokenizer is not None and len(words) < _FEWEST_WORDS:
        limit_words = "" if ids is None or ids.value_range is None else f" with ids up to {ids.value_range[1]:g}"
        raise UsageError(
            f"the tokenizer beside the model has {len(words)} usable words{limit_words}",
            hint=f"Pass values with {opt.input_data} file.npz.",
        )

    def make_sample(number: int) -> dict[str, Any]:
        generator = np.random.Generator(np.random.PCG64([run.seed, number]))
        values: dict[str, Any] = {}
        for kind, processor in preprocessor.processors.items():
            if kind == "tokenizer":
                values["text"] = sentence(generator, words)
            elif kind == "image processor":
                values["image"] = picture(generator)
            else:
                values["audio"] = recording(generator, int(getattr(processor, "sampling_rate", SAMPLING_RATE_HZ)))
        return values

    samples = map(make_sample, range(count * rows))
    batches = preprocessor.batches(samples, None if preprocessor.fixed_batch else rows)
    return tuple(Values(tuple(inputs), batch.feeds) for batch in batches)


_PROMPT_TOKENS = 24
NEW_TOKENS = 8
"""Numbers of read and of generated tokens of a text. Chosen: keys and values for 32 positions. Generated tokens tend
to repeat, so most tokens are read."""


class _RecordingSession(Session):
    """A session that records the inputs of its last runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.recorded: list[dict[str, Array]] = []

    @property
    def takes_states_in_place(self) -> bool:
        # Recorded states must not have spare capacity.
        return False

    def run_with_states(
        self, feeds: Arrays, states: Mapping[str, ort.OrtValue], retained: Collection[str]
    ) -> tuple[dict[str, Array], dict[str, ort.OrtValue]]:
        # Copied, because numpy() returns a view of memory owned by the ONNX Runtime value.
        self.recorded.append({**feeds, **{name: np.array(value.numpy()) for name, value in states.items()}})
        return super().run_with_states(feeds, states, retained)


def decoding_samples(
    source: Path,
    processors: Path,
    sizes: Mapping[str, int],
    count: int | None,
    seed: int,
    *,
    every: int = 1,
    data: Iterable[Arrays] | None = None,
) -> Iterator[dict[str, Array]]:
    """Yield the inputs of each run of a decoder graph.

    A graph with a cache of a fixed length reads prompts or steps. The part for the other is found beside it, and both
    read each text together, as in ``winml generate``.

    Args:
        source: File of the decoder.
        processors: Folder of tokenizer, feature extractor and configs; without a tokenizer, tokens are random.
        sizes: Sizes of dynamic dimensions of the encoder.
        count: Number of samples; None: all of ``data``.
        every: Step between sampled runs.
        seed: Seed of texts and random tokens.
        data: The user's samples, each as inputs of the encoder, or as ``input_ids`` of the decoder, [1, tokens]; None:
            generated texts, without an end.

    Raises:
        InputError: the file is no decoder with a cache, or its encoder is missing.
        UsageError: its values cannot be made.
        StageError: ONNX Runtime fails.
    """
    session = _RecordingSession(source)
    readers = _open_texts(session, source, processors, sizes, seed, data)
    samples = _read_texts(readers, session)
    yield from itertools.islice(samples, 0, None if count is None else count * every, every)


def _read_texts(texts: Iterator[_Text], session: _RecordingSession) -> Iterator[dict[str, Array]]:
    """Yield the inputs of each run of the texts, without runs with an empty cache; empties the record of the session.

    Raises:
        InputError: a text yields no sample; later texts would not either, and generated texts are endless.
    """
    for text in texts:
        is_empty = True
        for _ in text.read():
            runs, session.recorded = session.recorded, []
            for feeds in runs:
                # An empty cache has no values to measure.
                if all(array.size for array in feeds.values()):
                    is_empty = False
                    yield feeds
        if is_empty:
            raise InputError(f"{session.name}: no run of the decoder fills every tensor of its KV cache")


class _Text:
    """A text that a decoder reads, with a prompt graph or without, and continues."""

    def __init__(self, decoder: DecoderGraph, tokens: Array, *, cache: GraphCache | None = None) -> None:
        """Take the tokens of a prompt, integers [rows, tokens], and the state before them; None: an empty cache."""
        self.decoder, self.tokens, self.cache = decoder, tokens, cache
        self.steps = tokens[:, :0]
        """Tokens after the prompt that are read one by one, [rows, tokens]."""
        self.new_tokens = NEW_TOKENS
        """Number of tokens that the decoder generates after them."""

    def read(self) -> Iterator[None]:
        """Run the decoder, one or several runs per step of the iterator."""
        decoder, cache = self.decoder, self.cache or self.decoder.empty_cache(len(self.tokens))
        read_steps = self.steps.shape[1]
        max_tokens = decoder.most_tokens or self.tokens.shape[1] + read_steps + self.new_tokens
        single_tokens = min(read_steps + self.new_tokens, max_tokens - 1)
        # Texts are truncated, so that every text can be read and continued.
        tokens = self.tokens[:, : max(max_tokens - single_tokens, 1)]
        if decoder.length is None and tokens.shape[1] > 1:
            # So that one run reads several tokens with a non-empty cache.
            decoder.run(tokens[:, :1], cache=cache)
            yield
            tokens = tokens[:, 1:]
        for step in range(single_tokens + 1):
            logits = decoder.run(tokens, cache=cache)
            yield
            if step < read_steps:
                tokens = self.steps[:, step : step + 1]
            else:
                tokens = logits[:, -1:].argmax(axis=-1).astype(np.int64)


def _open_texts(
    session: _RecordingSession,
    source: Path,
    processors: Path,
    sizes: Mapping[str, int],
    seed: int,
    data: Iterable[Arrays] | None,
) -> Iterator[_Text]:
    """Yield the texts with their decoder; an endless sequence if ``data`` is None."""
    part = read_part_description(source)
    names = part.part_names if part is not None else ()
    if part is not None and ENCODER in names and part.name != ENCODER:
        encoder = Session(_find_part(source, part, ENCODER))
        model = EncoderDecoder(encoder, session)
        start = model.text.first if model.text is not None else _first_token(processors)
        inputs = model.encoder.inputs
        sources = data or (encoder_feeds(inputs, processors, sizes, seed + number) for number in itertools.count())
        for feeds, tokens in zip(sources, token_texts(model.inputs, processors, seed), strict=False):
            rows = len(next(iter(feeds.values())))
            started = np.tile([start, *tokens[: _PROMPT_TOKENS - 1]], (rows, 1))
            yield _Text(model, started, cache=model.start(feeds, rows))
        return
    if part is not None and EMBEDDING in names and part.name == DECODER:
        vision, embedding = (Session(_find_part(source, part, name)) for name in (VISION, EMBEDDING))
        seeing = VisionLanguageDecoder(vision, embedding, session)
        for features, ids in _read_images(seeing.embedder, embedding, processors, sizes, seed, data):
            yield _Text(seeing, ids, cache=seeing.empty_cache(1, features))
        return
    texts = None if data is None else (feeds[TOKEN_IDS][0] for feeds in data)
    decoder = DecoderGraph(session)
    run_length = decoder.length or 1
    is_prompt = decoder.held is not None and run_length > 1
    if part is not None and (prompts := prompt_parts(names)):
        with contextlib.suppress(InputError):  # a file alone reads texts without the other parts
            others = [Session(_find_part(source, part, name)) for name in ([DECODER] if is_prompt else prompts)]
            decoder = DecoderGraph(others[0], prompts=[session]) if is_prompt else DecoderGraph(session, prompts=others)
    batch = next(spec.shape[0] for spec in decoder.inputs if spec.name == TOKEN_IDS)
    rows = batch if isinstance(batch, int) else 1
    generated = token_texts(decoder.inputs, processors, seed)
    if is_prompt:
        # Without padding, for which a model returns anything. The cache is empty in the first run of a text only.
        most = max((decoder.most_tokens or 0) // run_length, 1)
        blocks = _blocks(generated, 2 * run_length, 1) if texts is None else _blocks(texts, run_length, most)
    elif (decoder.longest_run or 1) > 1:
        blocks = _blocks(generated, _PROMPT_TOKENS + NEW_TOKENS, 1) if texts is None else iter(texts)
    else:
        longest = None if decoder.length is None and texts is not None else _PROMPT_TOKENS
        blocks = (tokens[:longest] for tokens in (generated if texts is None else texts))
    for tokens in blocks:
        text = _Text(decoder, np.tile(tokens, (rows, 1)))
        if is_prompt:
            text.new_tokens = 0
        elif (decoder.longest_run or 1) > 1:
            count = max(len(tokens) - NEW_TOKENS, 1)
            text.tokens, text.steps = text.tokens[:, :count], text.tokens[:, count:]
        yield text


def _read_images(
    embedder: TokenEmbedder,
    embedding: Session,
    processors: Path,
    sizes: Mapping[str, int],
    seed: int,
    data: Iterable[Arrays] | None,
) -> Iterator[tuple[Arrays, Array]]:
    """Yield the image features of each image, and token ids of a text with its placeholders, [1, tokens].

    Args:
        embedder: The vision encoder and the embedding.
        embedding: The graph of the embedding.
        processors: Folder of tokenizer and image processor.
        sizes: Sizes of dynamic dimensions of the vision encoder.
        seed: Seed of texts and generated images.
        data: Inputs of the vision encoder for each image of the user; None: generated images, without an end.
    """
    generated = (encoder_feeds(embedder.image_inputs, processors, sizes, seed + number) for number in itertools.count())
    for feeds, tokens in zip(data or generated, token_texts(graph_inputs(embedding), processors, seed), strict=False):
        encoded = embedder.encode_images(feeds)
        features = next(iter(encoded.values()))
        places = np.full(features.size // features.shape[-1], embedder.places[0])
        yield encoded, np.concatenate([tokens[:1], places, tokens[1:_PROMPT_TOKENS]])[None]


def embedding_samples(
    source: Path, processors: Path, sizes: Mapping[str, int], seed: int, data: SampleFeeds | None = None
) -> Iterator[dict[str, Array]] | None:
    """Return samples of the embedding of a vision-language model: image features and tokens, one row of any length.

    None for another graph, and for other sizes.

    Args:
        source: File of the embedding; the vision encoder is read beside it.
        processors: Folder of tokenizer and image processor.
        sizes: Sizes of dynamic dimensions of the vision encoder.
        seed: Seed of texts and generated images.
        data: The user's images; None: generated images, without an end.

    Raises:
        InputError: the vision encoder is missing.
        UsageError: the data has no images.
    """
    part = read_part_description(source)
    if part is None or part.name != EMBEDDING or VISION not in part.part_names:
        return None
    embedding = Session(source)
    rows, length = next(spec.shape for spec in graph_inputs(embedding) if spec.name == TOKEN_IDS)
    is_of_rows = isinstance(rows, int) and rows != 1
    if [*embedding.inputs] == [TOKEN_IDS] or is_of_rows or isinstance(length, int):
        return None
    vision = Session(_find_part(source, part, VISION))
    images = None if data is None else data.read(graph_inputs(vision))
    pairs = _read_images(TokenEmbedder(vision, embedding), embedding, processors, sizes, seed, images)
    return ({TOKEN_IDS: tokens, **encoded} for encoded, tokens in pairs)


def _blocks(texts: Iterable[Array], length: int, most: int) -> Iterator[Array]:
    """Yield texts as multiples of a length; shorter texts are joined.

    Args:
        texts: Token ids of each text.
        length: The length.
        most: Maximum number of lengths of a result.
    """
    text = np.zeros(0, np.int64)
    is_short = True
    for tokens in texts:
        text = np.concatenate([text, tokens])
        if count := min(len(text) // length, most):
            yield text[: count * length]
            text, is_short = text[:0], False
    if is_short and len(text):
        yield text  # all texts together are shorter


def _find_part(source: Path, part: PartDescription, name: str) -> Path:
    """Return the file of another part: by the file name at the same stage, else by the description in its metadata.

    Args:
        source: The file of a part.
        part: Its description.
        name: Name of the other part.

    Raises:
        InputError: there is no such file.
    """
    named_file = source.with_name(source.name.replace(part.name, name))
    if named_file != source and named_file.is_file():
        return named_file
    for path in sorted(source.parent.glob("*.onnx")):
        other = read_part_description(path)
        if other is not None and (other.name, other.part_names) == (name, part.part_names):
            return path
    raise InputError(f"{source}: no {name} beside this part", hint="Pass the folder of a build.")


def _decodes_texts(inputs: Sequence[InputTensorSpec]) -> bool:
    """Return True for the inputs of a decoder with a cache that reads token ids without the outputs of an encoder."""
    names = [spec.name for spec in inputs]
    is_alone = not any(ENCODER in name for name in names)
    return is_alone and TOKEN_IDS in names and any(spec.cache for spec in inputs)


def note_on_steps(path: Path) -> str:
    """Return a note on texts of which a decoder reads only the start; ``""`` for a decoder that reads whole texts.

    Args:
        path: File of a decoder.
    """
    inputs, part = inputs_of_file(path), read_part_description(path)
    tokens = next((spec for spec in inputs if spec.name == TOKEN_IDS), None)
    is_prompt_read = part is not None and prompt_parts(part.part_names)
    if tokens is None or not _decodes_texts(inputs) or tokens.shape[1] != 1 or is_prompt_read:
        return ""
    return (
        f"The decoder reads one token per run: it read the first {_PROMPT_TOKENS} tokens of each text, and generated "
        f"{NEW_TOKENS}. Build it with {opt.prompt_length} 64 to read whole texts."
    )


def decoder_data(data: SampleFeeds, source: Path) -> Iterator[Arrays] | None:
    """Return the user's data as :func:`decoding_samples` takes it; None if the graph is no decoder with a cache.

    Args:
        data: The data.
        source: File of the decoder. The encoder of an encoder-decoder, and the vision encoder of a vision-language
            model, are read beside it.

    Raises:
        UsageError: a column, a file or a package is missing.
        InputError: files are damaged, or the encoder is missing.
    """
    inputs, part = inputs_of_file(source), read_part_description(source)
    if part is not None and part.name == DECODER and ENCODER in part.part_names:
        return data.read(inputs_of_file(_find_part(source, part, ENCODER)))
    if part is not None and part.name == DECODER and EMBEDDING in part.part_names:
        return data.read(inputs_of_file(_find_part(source, part, VISION)))
    if not _decodes_texts(inputs):
        return None
    tokens = next(spec for spec in inputs if spec.name == TOKEN_IDS)
    return data.read([tokens.model_copy(update={"shape": ("batch_size", "sequence_length")})])


def encoder_feeds(inputs: Sequence[InputTensorSpec], processors: Path, sizes: Mapping[str, int], seed: int) -> Arrays:
    """Return the inputs of an encoder: a generated sample if its processor exists, else random values."""
    run = RunOptions("", sizes=sizes, seed=seed)
    if has_processors(inputs, processors):
        return generate_samples(inputs, processors, 1, run)[0].feeds
    return random_values(inputs, run).feeds


def token_texts(inputs: Sequence[InputTensorSpec], processors: Path, seed: int) -> Iterator[Array]:
    """Yield token ids of generated sentences; random token ids without a tokenizer.

    Raises:
        UsageError: a package is missing.
        InputError: the files of the tokenizer are damaged.
    """
    words: list[str] = []
    spec = next(spec for spec in inputs if spec.name == TOKEN_IDS)
    if has_processors([spec], processors):
        tokenizer = open_processor("tokenizer", processors, "calibration samples")
        words = vocabulary(tokenizer, spec.value_range)
    low, high = spec.value_range or (0, 1)
    for number in itertools.count():
        generator = np.random.Generator(np.random.PCG64([seed, number]))
        if len(words) < _FEWEST_WORDS:
            yield generator.integers(int(low), int(high) + 1, _PROMPT_TOKENS)
        else:
            yield np.asarray(tokenizer(sentence(generator, words))["input_ids"], np.int64)


def _first_token(folder: Path) -> int:
    """Return the start token of a decoder, as stated in the configs beside the model; 0 if not stated."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for key in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(token := record.get(key), int):
                return token
    return 0
