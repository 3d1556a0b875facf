package org.apache.fluss.flink.sink;

// Fluss's test classes are abstract; their concrete ones for Flink 1.20 are not published.

class Flink120UndoRecoveryITCase extends UndoRecoveryITCase {}

class Flink120TableSinkITCase extends FlinkTableSinkITCase {}

class Flink120ComplexTypeITCase extends FlinkComplexTypeITCase {}
