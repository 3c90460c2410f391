"""Second moments that the label's site reads: no word is the server's to alter."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.tables.random_joins import PASSES, Joined, added_up, aligned
from tp_flower.errors import SiteError
from tp_flower.methods.moments.exchange import Assembly, PassRows
from tp_flower.methods.moments.reading.label_site import (
    ReaderPads,
    check_weights,
    checked_widths,
    read_blocks,
)

KEY = b"c" * 32
PADS = ReaderPads(b"z" * 32)


def weights_of(joined: Joined) -> dict[str, np.ndarray]:
    return {
        table: check_weights(KEY, table, block.shape[1])
        for table, block in joined.values.items()
    }


def padded_sums(joined: Joined, number: int, shards=None):
    """What the tables send, the first as the label's, and what is told of the rows."""
    rows = joined.count()
    weights = weights_of(joined)
    columns = checked_widths({table: len(each) for table, each in weights.items()})
    contributions = {}
    for table, in_exchange in joined.summed(rows, shards).items():
        contributions[table] = added_up(
            [
                aligned(
                    replace(
                        shard,
                        columns=columns,
                        check=weights[table],
                        reader=PADS if table == joined.tree.tables[0] else None,
                    )
                    .in_pass(number, PASSES[number])
                    .contribution(),
                    shard.rows,
                    rows[table],
                    number,
                )
                for shard in in_exchange
            ]
        )
    of_pass = {name: PassRows.of(each, number) for name, each in rows.items()}
    return Assembly(joined.tree, of_pass, contributions)


def read(joined: Joined, number: int, blocks) -> dict[tuple[str, str], np.ndarray]:
    return read_blocks(blocks, PADS, PASSES[number], weights_of(joined))


@pytest.mark.cases("0")
@pytest.mark.parametrize("seed", range(6))
def test_the_label_s_site_reads_the_moments_of_the_built_join(seed):
    rng = np.random.default_rng(seed)
    for _ in range(4):
        joined = Joined.draw(rng)
        shards = joined.cut(rng)
        # one site reads
        first = joined.tree.tables[0]
        shards[first] = [slice(0, len(joined.values[first]))]
        for number in range(len(PASSES)):
            found = read(joined, number, padded_sums(joined, number, shards).blocks())
            for pair, block in joined.expected(number).items():
                np.testing.assert_array_equal(found[pair], block, err_msg=str(pair))


def altered(words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Words of which one has another bit, of the lower 48."""
    changed = words.copy()
    place = tuple(rng.integers(size) for size in words.shape)
    changed[place] ^= np.uint64(1 << int(rng.integers(48)))
    return changed


@pytest.mark.parametrize("seed", range(12))
def test_a_block_of_which_the_server_has_altered_a_word_is_refused(seed):
    rng = np.random.default_rng(seed)
    joined = Joined.draw(rng, most_tables=3)
    blocks = padded_sums(joined, 0).blocks()
    assert read(joined, 0, blocks)
    pair = list(blocks)[rng.integers(len(blocks))]
    with pytest.raises(SiteError, match="it has altered words, or told a site other"):
        read(joined, 0, {**blocks, pair: altered(blocks[pair], rng)})


def test_a_sum_by_key_of_which_a_word_is_altered_is_noticed():
    rng = np.random.default_rng(4)
    joined = Joined.draw(rng, most_tables=2)
    assembly = padded_sums(joined, 0)
    assert read(joined, 0, assembly.blocks())
    table, *_ = joined.tree.tables
    sent = assembly.contributions[table]
    (place,) = sent.sums
    assert sent.sums[place].size
    sums = {place: altered(sent.sums[place], rng)}
    lied = {**assembly.contributions, table: replace(sent, sums=sums)}
    with pytest.raises(SiteError, match="it has altered words"):
        read(joined, 0, replace(assembly, contributions=lied, _padded={}).blocks())


def test_no_two_blocks_have_a_pad_of_the_reader_in_common():
    pads = [
        PADS.of_block(pass_name, pair, (2, 3)).ravel()
        for pass_name in ("training", "test")
        for pair in (("a", "a"), ("a", "b"), ("b", "b"))
    ]
    words = np.concatenate([*pads, ReaderPads(b"y" * 32).of_block("test", "aa", (6,))])
    assert len(np.unique(words)) == len(words)
