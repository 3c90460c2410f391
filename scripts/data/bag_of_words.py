"""Texts as hashed bags of words, where no embedding is at hand."""

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc


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
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    rows = len(texts)
    plain = pc.replace_substring_regex(
        pc.utf8_lower(pc.fill_null(texts, "")), r"[^\pL\pN]+", " "
    )
    words = pc.split_pattern(pc.utf8_trim_whitespace(plain), " ")
    row = np.asarray(pc.list_parent_indices(words))
    coded = pc.dictionary_encode(pc.list_flatten(words))
    distinct = coded.dictionary.to_numpy(zero_copy_only=False)
    bucket = pd.util.hash_array(distinct.astype(object)) % np.uint64(width)
    # an empty text splits into one empty word
    bucket = np.where(distinct == "", width, bucket.astype(np.int64))
    place = row * (width + 1) + bucket[np.asarray(coded.indices)]
    counts = np.bincount(place, minlength=rows * (width + 1)).astype(np.float32)
    return to_vectors(_normalised(counts.reshape(rows, width + 1)[:, :width]))


def to_vectors(matrix: npt.NDArray[np.float32]) -> pa.Array:
    """Return the rows of a matrix as a fixed-size list array."""
    flat = pa.array(np.ascontiguousarray(matrix).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])


def _normalised(counts: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    length = np.sqrt(np.square(counts).sum(axis=1, keepdims=True))
    vectors: npt.NDArray[np.float32] = counts / np.maximum(length, 1.0)
    return vectors
