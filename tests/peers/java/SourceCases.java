package org.apache.fluss.flink.source;

// Fluss's test classes are abstract; their concrete ones for Flink 1.20 are not published.

class Flink120TableSourceITCase extends FlinkTableSourceITCase {}

class Flink120TableSourceBatchITCase extends FlinkTableSourceBatchITCase {}

class Flink120ChangelogVirtualTableITCase extends ChangelogVirtualTableITCase {}

class Flink120BinlogVirtualTableITCase extends BinlogVirtualTableITCase {}

class Flink120TableSourceFailOverITCase extends FlinkTableSourceFailOverITCase {}
