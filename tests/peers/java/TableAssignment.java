package org.apache.fluss.server.zk.data;

import java.util.Map;

/** The servers of a table's buckets, which the server chooses: empty. */
public class TableAssignment {
    public Map<Integer, Object> getBucketAssignments() {
        return Map.of();
    }
}
