package org.apache.fluss.flink.metrics;

// Fluss's test classes are abstract; their concrete ones for Flink 1.20 are not published.

class Flink120MetricsITCase extends FlinkMetricsITCase {}
