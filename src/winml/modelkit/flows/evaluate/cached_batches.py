"""Keeps the arrays of samples that are run again and again, where they fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from winml.modelkit.evaluate.preprocessing import Batch, Preprocessor, Sample

__all__ = ["CachedBatches"]

KEPT_BYTES = 512_000_000
"""Arrays and pictures that are kept. Chosen: small beside the forms that are judged on them."""


class CachedBatches(Preprocessor):
    """A preprocessor for one list of samples: the second run over them takes what the first one made."""

    _kept: list[Batch] | None = None

    @classmethod
    def keeping(cls, preprocessor: Preprocessor) -> CachedBatches:
        """Return one that makes what another makes.

        Args:
            preprocessor: It stays as it is.
        """
        created = cls.__new__(cls)
        vars(created).update(vars(preprocessor))
        return created

    def batches(self, samples: Iterable[Sample], batch_size: int | None = None) -> Iterator[Batch]:
        """Yield what each run takes; see :meth:`Preprocessor.batches`. Samples and batch size are those of each time.

        Raises:
            UsageError: another batch size than the graph takes, a role is missing, or the arrays are not what the
                graph takes.
            InputError: a processor fails on a sample.
        """
        if self._kept is not None:
            yield from _in_step(self._kept, iter(samples))
            return
        created: list[Batch] = []
        held = 0
        for batch in super().batches(samples, batch_size):
            held += _held_bytes(batch)
            if held <= KEPT_BYTES:
                created.append(batch)
            else:
                created.clear()
            yield batch
        if held <= KEPT_BYTES:
            self._kept = created


def _in_step(retained: Iterable[Batch], samples: Iterator[Sample]) -> Iterator[Batch]:
    """Yield batches, each when its samples were read: who gives them waits for that."""
    taken = -1
    for batch in retained:
        while taken < batch.rows[-1].number:
            next(samples, None)
            taken += 1
        yield batch


def _held_bytes(batch: Batch) -> int:
    """Return what a batch takes: its arrays, and its pictures with four bytes a pixel."""
    sizes = (row.image_size for row in batch.rows if row.image_size is not None)
    return sum(array.nbytes for array in batch.feeds.values()) + sum(4 * height * width for height, width in sizes)
