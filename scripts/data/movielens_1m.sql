-- The papers' tables of MovieLens-1M, for DuckDB; the variable folder has its files.

CREATE TABLE ratings AS
FROM read_csv(getvariable('folder') || '/ratings.dat', delim = '::',
    header = false, quote = '', escape = '', encoding = 'latin-1', auto_detect = false,
    columns = {user_id: 'INTEGER', movie_id: 'INTEGER', rating: 'INTEGER',
        rated: 'BIGINT'});

CREATE TABLE raw_users AS
FROM read_csv(getvariable('folder') || '/users.dat', delim = '::',
    header = false, quote = '', escape = '', encoding = 'latin-1', auto_detect = false,
    columns = {user_id: 'INTEGER', sex: 'VARCHAR', age: 'INTEGER',
        occupation: 'VARCHAR', zip: 'VARCHAR'});

CREATE TABLE raw_movies AS
FROM read_csv(getvariable('folder') || '/movies.dat', delim = '::',
    header = false, quote = '', escape = '', encoding = 'latin-1', auto_detect = false,
    columns = {movie_id: 'INTEGER', title: 'VARCHAR', genres: 'VARCHAR'});

-- a row per genre
CREATE TABLE movies AS
SELECT movie_id, regexp_replace(title, ' \(\d{4}\)$', '') AS title,
    CAST(nullif(regexp_extract(title, '\((\d{4})\)$', 1), '') AS INTEGER) AS year,
    unnest(string_split(genres, '|')) AS genre
FROM raw_movies;
