package org.apache.fluss.flink.catalog;

// Fluss's test classes are abstract; their concrete ones for Flink 1.20 are not published.

class Flink120CatalogITCase extends FlinkCatalogITCase {}
