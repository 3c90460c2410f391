"""Write the music shop: eleven made-up tables in files and databases, and runs.

    python scripts/data/make_music_shop.py OUTPUT [--lines N] [--seed N] [--postgresql
    URI]

A till holds invoices and their lines (PostgreSQL, or CSV without a URI), a label its
catalogue of five tables (SQLite), three regions their customers (CSV shards), a radio
the playlists and an office the employees. As real shops' data do, they have artists
with one album each, rare categories, missing values and keys that are texts.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import sqlalchemy as sa

from scripts.data.run_files import print_commands, script, write_run, write_tables
from tp_flower.sources.databases.session import parse_url

FEATURES: Final = """
    t.seconds, t.composer, t.price, g.name AS genre, m.name AS medium, b.title AS album,
    a.name AS artist, a.country AS home, c.age, c.country, i.channel, i.day,
    e.title AS rep
FROM invoice_lines l
JOIN invoices i ON i.invoice_id = l.invoice_id
JOIN customers c ON c.customer_code = i.customer_code
LEFT JOIN employees e ON e.employee_code = c.rep_code
JOIN tracks t ON t.track_id = l.track_id
JOIN albums b ON b.album_id = t.album_id
JOIN artists a ON a.artist_id = b.artist_id
JOIN genres g ON g.genre_id = t.genre_id
JOIN media_types m ON m.media_type_id = t.media_type_id
"""
PLAYED: Final = """
SELECT l.paid AS label, i.channel, t.seconds, p.plays
FROM invoice_lines l JOIN invoices i USING (invoice_id)
JOIN tracks t ON t.track_id = l.track_id
LEFT JOIN (SELECT track_id, COUNT(*) AS plays FROM playlist_track GROUP BY track_id) p
    ON p.track_id = t.track_id
WHERE t.genre_id IN (SELECT genre_id FROM genres WHERE name <> 'Polka')
"""
PAID, RETURNED = (
    f"SELECT l.paid AS label,{FEATURES}",
    f"SELECT l.is_returned AS label,{FEATURES}",
)
RUNS: Final[Mapping[str, tuple[str, str, dict[str, Any]]]] = {
    "explain.toml": ("What would run, and who learns what?", PAID, {"mode": "explain"}),
    "regression.toml": ("What is paid?", PAID, {"model-name": "paid"}),
    "classification.toml": ("Is it returned?", RETURNED, {"model-name": "returned"}),
    "predict.toml": (
        "What will be paid?",
        PAID,
        {"mode": "predict", "model-name": "paid"},
    ),
    "plays.toml": ("Do plays on the radio sell?", PLAYED, {}),
}
TRAINED: Final = ("regression.toml", "classification.toml", "plays.toml")
CATALOGUE: Final = ("artists", "albums", "tracks", "genres", "media_types")
TILL: Final = ("invoices", "invoice_lines")
REGIONS: Final = {
    "europe": ["DE", "FR", "PT", "CZ"],
    "americas": ["US", "BR"],
    "asia": ["IN"],
}
GENRES: Final = [
    "Rock",
    "Pop",
    "Jazz",
    "Blues",
    "Metal",
    "Folk",
    "Soul",
    "Opera",
    "Polka",
]
MEDIA: Final = ["CD", "MP3", "FLAC", "vinyl", "tape"]
REPS: Final = ["E0", "E1", "E2", "E3"]


def make_music_shop(lines: int = 2_400, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return the tables by name; each of the ``lines`` is a row of the joined table."""
    draw = np.random.default_rng(seed)
    artists, albums, tracks = lines // 20 + 2, lines // 16 + 3, lines // 3 + 1
    customers, invoices = lines // 8 + 9, lines // 4 + 1
    genre = np.minimum(draw.geometric(0.45, tracks), len(GENRES)) - 1
    medium = draw.choice(len(MEDIA), tracks, p=[0.5, 0.3, 0.15, 0.04, 0.01])
    # four artists in five have one album
    artist = np.append(np.arange(artists), draw.integers(0, artists, albums - artists))
    album, seconds = (
        draw.integers(0, albums, tracks),
        draw.gamma(9.0, 28.0, tracks).round(),
    )
    price = draw.choice([0.99, 1.29, 1.49, 1.99, 2.49], tracks)
    country = draw.choice(
        [name for names in REGIONS.values() for name in names], customers
    )
    age = draw.integers(16, 80, customers).astype(float)
    codes = np.array([f"C-{number:04d}" for number in range(customers)])
    buyer, channel = (
        draw.integers(0, customers, invoices),
        draw.integers(0, 3, invoices),
    )
    invoice, track = draw.integers(0, invoices, lines), draw.integers(0, tracks, lines)
    fame = draw.normal(0.0, 0.4, artists)[artist[album[track]]]
    taste = 0.01 * (age[buyer] - 45) + np.array([0.0, 0.3, -0.2])[channel]
    mean = 2 * price[track] + fame + taste[invoice] + 0.004 * seconds[track]
    paid = (mean + draw.normal(0, 0.3, lines)).round(2)
    odds = 2 * fame - 2 * taste[invoice] - 1.5 + (medium[track] > 2)
    home = draw.choice(
        np.array(["US", "GB", "DE", "IS", None]), artists, p=[0.5, 0.2, 0.2, 0.02, 0.08]
    )
    composer = draw.choice(
        np.array(["Ada", "Bo", "Cleo", None]), tracks, p=[0.4, 0.2, 0.1, 0.3]
    )
    rep = draw.choice(np.array([*REPS, None]), customers)  # without one: LEFT JOIN
    known_age = np.where(draw.random(customers) < 0.08, np.nan, age)
    day = pd.Timestamp("2025-01-01") + pd.to_timedelta(
        draw.integers(0, 365, invoices), "D"
    )
    ids = np.arange(tracks)
    title = np.array([f"Song {number}" for number in ids])
    return {
        "artists": _frame(
            "artist_id name country", ids[:artists], title[:artists], home
        ),
        "albums": _frame(
            "album_id artist_id title", ids[:albums], artist, title[:albums]
        ),
        "genres": _frame("genre_id name", ids[: len(GENRES)], GENRES),
        "media_types": _frame("media_type_id name", ids[: len(MEDIA)], MEDIA),
        "tracks": _frame(
            "track_id title album_id genre_id media_type_id seconds price composer",
            *(ids, title, album, genre, medium, seconds, price, composer),
        ),
        "playlists": _frame("playlist_id name", ids[:9], title[:9]),
        "playlist_track": _frame(
            "playlist_id track_id", ids % 9, draw.integers(0, tracks, tracks)
        ),
        "employees": _frame(
            "employee_code title", REPS, ["rep", "rep", "lead", "boss"]
        ),
        "customers": _frame(
            "customer_code country age rep_code", codes, country, known_age, rep
        ),
        "invoices": _frame(
            "invoice_id customer_code day channel",
            *(
                np.arange(invoices),
                codes[buyer],
                day,
                np.array(["web", "shop", "phone"])[channel],
            ),
        ),
        "invoice_lines": _frame(
            "line_id invoice_id track_id paid is_returned",
            *(
                np.arange(lines),
                invoice,
                track,
                paid,
                odds + draw.logistic(size=lines) > 0,
            ),
        ),
    }


def _frame(names: str, *columns: object) -> pd.DataFrame:
    return pd.DataFrame(dict(zip(names.split(), columns, strict=True)))


def write(options: argparse.Namespace) -> None:
    """Write files and databases, the tables file and the runs to OUTPUT."""
    folder = options.output
    shop = make_music_shop(options.lines, options.seed)
    places: dict[str, list[tuple[str | dict[str, str], str]]] = {}
    catalogue = f"sqlite:///{folder / 'catalogue.sqlite'}"
    to_database(catalogue, {name: shop.pop(name) for name in CATALOGUE})
    for name in CATALOGUE:
        places[name] = [({"uri": "sqlite:///catalogue.sqlite", "table": name}, "label")]
    if options.postgresql:
        to_database(options.postgresql, {name: shop.pop(name) for name in TILL})
        places |= {
            name: [({"uri": "${MUSIC_URI}", "table": name}, "till")] for name in TILL
        }
    customers = shop.pop("customers")
    places["customers"] = []
    for region, countries in REGIONS.items():
        rows = customers[customers["country"].isin(countries)]
        rows.to_csv(folder / f"customers_{region}.csv", index=False)
        places["customers"].append((f"customers_{region}.csv", region))
    for name, rows in shop.items():
        rows.to_csv(folder / f"{name}.csv", index=False)
        site = "till" if name in TILL else "office" if name == "employees" else "radio"
        places[name] = [(f"{name}.csv", site)]
    write_tables(folder, places)
    runs = [write_run(folder / file, *run) for file, run in RUNS.items()]
    print_commands(
        "The music shop", folder, [run for run in runs if run.name in TRAINED]
    )


def to_database(uri: str, tables: Mapping[str, pd.DataFrame]) -> None:
    """Replace tables of a database."""
    engine = sa.create_engine(parse_url(uri, {}, Path.cwd(), "the database").url)
    with engine.begin() as connection:
        for name, rows in tables.items():
            rows.to_sql(name, connection, if_exists="replace", index=False)
    engine.dispose()


OPTIONS = {
    "lines": (int, 2_400, "invoice lines, which are the joined rows"),
    "seed": (int, 0, "of the random numbers"),
    "postgresql": (
        str,
        "",
        "URI of a database for the till, which sites read as ${MUSIC_URI}",
    ),
}
main = script(__doc__, write, options=OPTIONS)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
