-- The papers' tables of MIMIC-III, for DuckDB. prepare_mimic.py makes views of the
-- official files (in the schema official) and a table of mimic_items.csv, and sets the
-- variables first_stay and last_stay: the view of the events has those stays alone.

-- adults without a transfer, one stay per admission; dates of birth of the oldest are
-- moved to 300 years before, so that age is hidden
CREATE TABLE cohort AS
SELECT row_number() OVER (ORDER BY icustay_id) AS number, icustay_id,
    i.subject_id, i.hadm_id, dbsource, first_careunit, first_wardid,
    least(date_diff('day', dob, intime) / 365.25, 90) AS age, intime,
    24.0 * los AS hours, date_diff('second', intime, deathtime) / 3600.0 AS lived
FROM official.ICUSTAYS AS i JOIN official.ADMISSIONS AS a USING (hadm_id)
JOIN official.PATIENTS AS p ON i.subject_id = p.subject_id
WHERE first_careunit = last_careunit AND first_wardid = last_wardid
    AND date_diff('day', dob, intime) / 365.25 >= 18 AND los IS NOT NULL
QUALIFY count(*) OVER (PARTITION BY i.hadm_id) = 1;

CREATE VIEW stays AS
SELECT icustay_id, subject_id, hadm_id, dbsource, first_careunit, first_wardid, age
FROM cohort;

CREATE VIEW patients AS SELECT subject_id, gender FROM official.PATIENTS;

CREATE VIEW admissions AS SELECT hadm_id, ethnicity FROM official.ADMISSIONS;

-- which of the most frequent codes an admission has
CREATE TABLE codes AS
SELECT icd9_code, 'diagnosis_' || icd9_code AS diagnosis FROM official.DIAGNOSES_ICD
WHERE icd9_code IS NOT NULL GROUP BY ALL ORDER BY count(*) DESC, icd9_code LIMIT 128;

CREATE TABLE diagnoses AS
SELECT hadm_id, COLUMNS(* EXCLUDE hadm_id) > 0
FROM (PIVOT (FROM official.DIAGNOSES_ICD LEFT JOIN codes USING (icd9_code))
    ON diagnosis USING count(*) GROUP BY hadm_id);

-- the vital signs in the unit that is used
CREATE TABLE measured AS
SELECT stay, variable, hour, CASE unit
    -- brisk or not: a text in the files
    WHEN 'refill' THEN
        CASE WHEN value IN ('Brisk', 'Normal <3 secs', 'Normal <3 Seconds') THEN 0.0
        WHEN value IN ('Delayed', 'Abnormal >3 secs', 'Abnormal >3 Seconds') THEN 1.0 END
    -- in both units under the same item
    WHEN 'share' THEN CASE WHEN number > 1.0 THEN number / 100.0 ELSE number END
    WHEN 'percent' THEN CASE WHEN number <= 1.0 THEN number * 100.0 ELSE number END
    WHEN 'inch' THEN number * 2.54
    WHEN 'fahrenheit' THEN (number - 32.0) * 5.0 / 9.0
    WHEN 'pound' THEN number * 0.45359237
    ELSE number END AS x
FROM (
    SELECT c.number AS stay, variable, unit, value, valuenum AS number, hours,
        date_diff('second', intime, charttime) / 3600.0 AS hour
    FROM official.CHARTEVENTS JOIN items ON itemid = item
    JOIN cohort AS c USING (icustay_id)
    WHERE error IS DISTINCT FROM 1)
WHERE hour >= 0 AND hour <= hours AND x IS NOT NULL
ORDER BY stay;

-- of the time between a variable's first value and its last before the hour, the parts
-- from one share of it to another
CREATE TABLE periods AS
FROM (VALUES ('all', 0.0, 1.0),
    ('first_10', 0.0, 0.1), ('first_25', 0.0, 0.25), ('first_50', 0.0, 0.5),
    ('last_10', 0.9, 1.0), ('last_25', 0.75, 1.0), ('last_50', 0.5, 1.0)
) AS periods(period, earliest, latest);

-- hour h from the fifth on is predicted from the values until h; it is one of the stay
-- and of the patient's life, and the stay has a value before it
CREATE VIEW events AS
WITH e AS (
    FROM measured
    WHERE stay BETWEEN getvariable('first_stay') AND getvariable('last_stay')),
hours AS (
    SELECT stay, unnest(range(5, CAST(
        floor(least(hours, coalesce(lived, hours)) + 1e-6) AS BIGINT) + 1)) AS h
    FROM cohort JOIN (SELECT DISTINCT stay FROM e) ON stay = number),
starts AS (SELECT stay, variable, min(hour) AS start FROM e GROUP BY ALL),
spans AS (
    SELECT s.stay, h, s.variable, start, e.hour AS stop
    FROM (SELECT * FROM hours JOIN starts USING (stay) WHERE start < h) AS s
    ASOF JOIN e ON e.stay = s.stay AND e.variable = s.variable AND s.h >= e.hour),
functions AS (
    SELECT stay, h, variable, period, min(x) AS least, max(x) AS largest,
        avg(x) AS mean, stddev_pop(x) AS deviation,
        -- of the population, as the deviation; DuckDB's is that of a sample
        CASE WHEN count(x) > 2 AND stddev_pop(x) > 1e-6 THEN skewness(x)
            * (count(x) - 2) / sqrt(count(x) * (count(x) - 1)) ELSE 0.0 END AS skewness,
        count(x) AS count
    FROM spans JOIN e USING (stay, variable), periods
    WHERE hour <= stop AND hour BETWEEN start + earliest * (stop - start) - 1e-6
        AND start + latest * (stop - start) + 1e-6
    GROUP BY ALL),
features AS (
    FROM functions PIVOT (
        CAST(first(least) AS FLOAT) AS least, CAST(first(largest) AS FLOAT) AS largest,
        CAST(first(mean) AS FLOAT) AS mean,
        CAST(first(deviation) AS FLOAT) AS deviation,
        CAST(first(skewness) AS FLOAT) AS skewness,
        CAST(first(count) AS FLOAT) AS count
        FOR variable IN (
            'capillary_refill', 'diastolic_pressure', 'inspired_oxygen',
            'coma_eye_opening', 'coma_motor_response', 'coma_total',
            'coma_verbal_response', 'glucose', 'heart_rate', 'height',
            'mean_pressure', 'oxygen_saturation', 'respiratory_rate',
            'systolic_pressure', 'temperature', 'weight', 'ph')
        period IN ('all', 'first_10', 'first_25', 'first_50',
            'last_10', 'last_25', 'last_50')
        GROUP BY stay, h))
SELECT icustay_id, CAST(h AS INTEGER) AS hour,
    coalesce(lived - h < 24, false) AS label, features.* EXCLUDE (stay, h)
FROM features JOIN cohort ON stay = number
ORDER BY stay, h;
