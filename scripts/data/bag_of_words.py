"""Texts as hashed bags of words, where no embedding is at hand."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.feature_extraction.text import HashingVectorizer


def hashed_words(texts: pa.Array | pa.ChunkedArray, width: int) -> pa.Array:
    """Return how often each of ``width`` buckets of words occurs, of length 1 each.

    Words are runs of letters and digits, in small letters; a missing text is zeros.

    Args:
        texts: (n,).
        width: entries of each vector.

    Returns:
        A fixed-size list array of float32, (n, width).

    >>> vector = np.array(hashed_words(pa.array(["Red red wine", None]), 4).to_pylist())
    >>> np.square(vector).sum(axis=1).round(6).tolist()
    [1.0, 0.0]
    """
    counter = HashingVectorizer(
        n_features=width, alternate_sign=False, token_pattern=r"[^\W_]+"
    )
    counts = counter.transform(pc.fill_null(texts, "").to_pylist())
    return to_vectors(counts.toarray().astype(np.float32))


def to_vectors(matrix: npt.NDArray[np.float32]) -> pa.Array:
    """Return the rows of a matrix as a fixed-size list array."""
    flat = pa.array(np.ascontiguousarray(matrix).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])
