-- The papers' tables of Yelp, for DuckDB. prepare_yelp.py makes the views raw_business,
-- raw_user and raw_review of the official files; reviews get their vectors there.

CREATE TABLE restaurants AS
SELECT business_id, stars, review_count FROM raw_business
WHERE contains(lower(categories), 'restaurants') AND is_open = 1;

CREATE VIEW reviews AS
SELECT review_id, user_id, business_id, stars, useful, funny, cool, text
FROM raw_review SEMI JOIN restaurants USING (business_id);

-- friends are a list of names
CREATE VIEW users AS
SELECT * REPLACE (len(string_split(friends, ',')) AS friends)
FROM raw_user SEMI JOIN reviews USING (user_id);
