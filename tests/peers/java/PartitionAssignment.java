package org.apache.fluss.server.zk.data;

import java.util.Map;

/** The servers of a partition's buckets, which the server chooses: empty. */
public class PartitionAssignment {
    public PartitionAssignment(long tableId, Map<Integer, Object> assignments) {}
}
