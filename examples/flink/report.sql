-- What became of the orders, in batch. Fluss's connector wants a LIMIT, a key, or COUNT(*) of a batch read.

CREATE CATALOG fluss WITH ('type' = 'fluss', 'bootstrap.servers' = 'localhost:9123');
USE fluss.example_flink;
SET 'execution.runtime-mode' = 'batch';
SET 'sql-client.execution.result-mode' = 'tableau';

SELECT * FROM revenue LIMIT 10;

SELECT price FROM products WHERE sku = 'pen';

SELECT COUNT(*) AS orders FROM orders;
