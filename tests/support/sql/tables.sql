-- Small tables that the SQL pairs are about, for any engine: a reader can join them by
-- hand. Every value has a reason: NULL and repeated keys, keys without a match on
-- either side, '01' beside '1' and 1, an accent written in two ways, empty texts, whole
-- and fractional numbers of different types.

CREATE TABLE customers (customer BIGINT, name VARCHAR, region VARCHAR, age INTEGER,
                        is_member BOOLEAN, joined DATE);
INSERT INTO customers VALUES
    (10, 'Zo' || chr(235), 'US', 30, true, '2020-05-17'),  -- the accent is composed
    (11, 'Bo', 'UK', NULL, false, '2021-01-01'),
    (NULL, 'Cy', 'US', 50, true, NULL),
    (13, 'Di', NULL, 70, NULL, '2019-12-31'),
    (14, '', '', 41, false, '2023-02-28');

-- orders 1, 2 and 6 are of the same item; 4 has no customer, 5 one that is unknown
CREATE TABLE orders (id INTEGER, customer BIGINT, item BIGINT, shop VARCHAR, qty INTEGER,
                     amount DECIMAL(8,2), ordered TIMESTAMP, day DATE, is_gift BOOLEAN);
INSERT INTO orders VALUES
    (1, 10, 100, '01', 2, 1, '2024-01-01', '2024-01-01', true),
    (2, 11, 100, '1', 7, 3.5, '2024-01-02 13:30:00', '2024-01-02', false),
    (3, 10, 101, '02', 1, 10.25, '2024-02-29 23:59:59', '2024-01-02', NULL),
    (4, NULL, 101, '02', 9, NULL, NULL, NULL, true),
    (5, 12, 102, NULL, 4, 0, '2023-12-31', '2024-01-01', false),
    (6, 14, 100, '01', 3, 2, '2024-01-02', '2024-01-02', false);

-- items 100 and 101 have several parts: many-to-many with orders
CREATE TABLE items (item BIGINT, part VARCHAR, price DECIMAL(6,2), weight DOUBLE);
INSERT INTO items VALUES
    (100, 'bolt', 0.5, 0.125), (100, 'nut', 0.25, NULL), (101, 'bolt', 0.5, 2.5),
    (NULL, 'gear', 1, 1), (103, 'gear', 9, -1.5);

CREATE TABLE parts (part VARCHAR, maker INTEGER, grade INTEGER);
INSERT INTO parts VALUES
    ('bolt', 1, 3), ('nut', 2, NULL), ('gear', NULL, 5), (NULL, 1, 1);

CREATE TABLE makers (maker INTEGER, country VARCHAR);
INSERT INTO makers VALUES (1, 'DE'), (3, 'FR');

CREATE TABLE payments (customer BIGINT, item BIGINT, amount DECIMAL(8,2), paid DATE,
                       method VARCHAR);
INSERT INTO payments VALUES
    (10, 100, 5, '2024-01-05', 'card'),
    (10, 101, 7.5, '2024-02-05', 'cash'),
    (10, 100, NULL, '2024-02-06', 'card'),
    (11, 100, 2.25, '2023-12-31', NULL),
    (12, 102, 4, '2024-01-01', 'cash'),
    (13, 101, -1, '2024-03-01', 'card'),
    (NULL, 100, 8, NULL, 'cash'),
    (NULL, 101, 8, NULL, 'cash');

CREATE TABLE weather (day DATE, region VARCHAR, temp DOUBLE);
INSERT INTO weather VALUES
    ('2024-01-01', 'US', 3.5), ('2024-01-02', 'US', -1), ('2024-01-02', 'UK', NULL),
    (NULL, 'US', 0);

-- '01' and '1' are two shops; `code` is the number of both
CREATE TABLE shops (shop VARCHAR, code BIGINT, size DOUBLE);
INSERT INTO shops VALUES ('01', 1, 20), ('1', 1, 50), ('02', 2, 8.5), (NULL, 3, 1);

-- item numbers that another system keeps as DOUBLE and as DECIMAL
CREATE TABLE stock (item DOUBLE, lot DECIMAL(8,2), left_over INTEGER);
INSERT INTO stock VALUES (100, 10, 5), (100.5, 11, 6), (101, NULL, 7);

CREATE TABLE nicknames (name VARCHAR, length INTEGER);
INSERT INTO nicknames VALUES
    ('Zoe' || chr(776), 3), ('Bo', 2), ('bo', 20), ('', 0);  -- the accent follows the e

CREATE TABLE visits_2023 (customer BIGINT, visits INTEGER, page VARCHAR);
INSERT INTO visits_2023 VALUES (10, 3, 'home'), (11, 1, NULL), (10, 3, 'home');

CREATE TABLE visits_2024 (customer BIGINT, visits INTEGER, page VARCHAR);
INSERT INTO visits_2024 VALUES (10, 8, 'cart'), (14, 2, 'home'), (NULL, 5, 'cart');

CREATE TABLE old_visits (client INTEGER, hits DOUBLE);
INSERT INTO old_visits VALUES (11, 0.5), (14, 1.5);

CREATE TABLE scored (customer BIGINT, label DOUBLE, points INTEGER);
INSERT INTO scored VALUES (10, 0.5, 1), (11, 1.5, 2), (13, 2.5, NULL);
