"""Write crm.db, a SQLite database, from customers.sql beside this file."""

import sqlite3
from contextlib import closing
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Write the database anew."""
    (FOLDER / "crm.db").unlink(missing_ok=True)
    with closing(sqlite3.connect(FOLDER / "crm.db")) as database:
        database.executescript((FOLDER / "customers.sql").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
