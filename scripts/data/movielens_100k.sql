-- The papers' tables of MovieLens-100K, for DuckDB; the variable folder has its files.

CREATE TABLE ratings AS
FROM read_csv(getvariable('folder') || '/u.data', delim = '\t',
    header = false, quote = '', escape = '', encoding = 'latin-1', auto_detect = false,
    columns = {user_id: 'INTEGER', movie_id: 'INTEGER', rating: 'INTEGER',
        rated: 'BIGINT'});

CREATE TABLE raw_users AS
FROM read_csv(getvariable('folder') || '/u.user', delim = '|',
    header = false, quote = '', escape = '', encoding = 'latin-1', auto_detect = false,
    columns = {user_id: 'INTEGER', age: 'INTEGER', sex: 'VARCHAR',
        occupation: 'VARCHAR', zip: 'VARCHAR'});

CREATE TABLE raw_movies AS
FROM read_csv(getvariable('folder') || '/u.item', delim = '|',
    header = false, quote = '', escape = '', encoding = 'latin-1', auto_detect = false,
    columns = {movie_id: 'INTEGER', title: 'VARCHAR', released: 'VARCHAR',
        video: 'VARCHAR', url: 'VARCHAR', "unknown": 'INTEGER', "Action": 'INTEGER',
        "Adventure": 'INTEGER', "Animation": 'INTEGER', "Children's": 'INTEGER',
        "Comedy": 'INTEGER', "Crime": 'INTEGER', "Documentary": 'INTEGER',
        "Drama": 'INTEGER', "Fantasy": 'INTEGER', "Film-Noir": 'INTEGER',
        "Horror": 'INTEGER', "Musical": 'INTEGER', "Mystery": 'INTEGER',
        "Romance": 'INTEGER', "Sci-Fi": 'INTEGER', "Thriller": 'INTEGER',
        "War": 'INTEGER', "Western": 'INTEGER'});

-- a row per genre
CREATE TABLE movies AS
SELECT movie_id, title, CAST(nullif(right(released, 4), '') AS INTEGER) AS year, genre
FROM (UNPIVOT raw_movies ON COLUMNS(* EXCLUDE (movie_id, title, released, video, url))
    INTO NAME genre VALUE flag)
WHERE flag = 1;
