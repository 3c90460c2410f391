"""Shards in PostgreSQL, MySQL, MariaDB and SQLite, and the work done there."""
