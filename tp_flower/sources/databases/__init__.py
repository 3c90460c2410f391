"""Shards in PostgreSQL, MySQL, MariaDB and SQLite, and what runs there."""
