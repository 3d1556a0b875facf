-- Orders in Flink SQL: tables in Fluss, a lookup join, and sums that are always up to date.
-- The last statement runs until it is stopped.

CREATE CATALOG fluss WITH ('type' = 'fluss', 'bootstrap.servers' = 'localhost:9123');
DROP DATABASE IF EXISTS fluss.example_flink CASCADE;
CREATE DATABASE fluss.example_flink;
USE fluss.example_flink;

-- A primary-key table: one row for each key.
CREATE TABLE products (
  sku STRING, name STRING, price DECIMAL(10, 2),
  PRIMARY KEY (sku) NOT ENFORCED
);

-- A log table: rows are appended, and streams follow it.
CREATE TABLE orders (
  id BIGINT, sku STRING, pieces INT, ordered TIMESTAMP(3),
  seen AS PROCTIME()
) WITH ('bucket.num' = '2');

-- An aggregation table: the server sums what is put under a key, and Flink keeps no state.
CREATE TABLE revenue (
  name STRING, pieces INT, amount DECIMAL(12, 2),
  PRIMARY KEY (name) NOT ENFORCED
) WITH ('table.merge-engine' = 'aggregation', 'fields.pieces.agg' = 'sum', 'fields.amount.agg' = 'sum');

-- The other way: Flink keeps the counts, and puts each new one into a primary-key table.
CREATE TABLE orders_per_day (
  ordered DATE, orders BIGINT,
  PRIMARY KEY (ordered) NOT ENFORCED
);

-- The statements below wait until their rows are written.
SET 'table.dml-sync' = 'true';
SET 'parallelism.default' = '2';

INSERT INTO products VALUES ('pen', 'Pen', 1.20), ('ink', 'Ink', 4.50), ('pad', 'Pad', 3.00);

INSERT INTO orders VALUES
  (1, 'pen', 10, TIMESTAMP '2026-03-01 09:00:00'),
  (2, 'ink',  1, TIMESTAMP '2026-03-01 09:30:00'),
  (3, 'pen',  5, TIMESTAMP '2026-03-02 11:00:00'),
  (4, 'pad',  2, TIMESTAMP '2026-03-02 11:15:00');

-- Every order, those above and all to come: its product is looked up in the server, then it is summed.
SET 'execution.checkpointing.interval' = '1s';

EXECUTE STATEMENT SET BEGIN
  INSERT INTO revenue
  SELECT p.name, o.pieces, o.pieces * p.price
  FROM orders AS o JOIN products FOR SYSTEM_TIME AS OF o.seen AS p ON p.sku = o.sku;

  INSERT INTO orders_per_day
  SELECT CAST(ordered AS DATE), COUNT(*) FROM orders GROUP BY CAST(ordered AS DATE);
END;
