package org.apache.fluss.server.zk;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.fluss.metadata.PartitionSpec;
import org.apache.fluss.metadata.TablePath;
import org.apache.fluss.server.zk.data.PartitionAssignment;
import zufluss.peers.Peer;

/** Stands in for the ZooKeeper of Fluss's cluster: what tests read there, asked of the server. */
public class ZooKeeperClient {
    public Map<Long, String> getPartitionIdAndNames(TablePath table) throws Exception {
        Map<Long, String> names = new HashMap<>();
        Peer.partitions(table).forEach((name, id) -> names.put(id, name));
        return names;
    }

    /** No id: the server gives one to the partition that is registered next. */
    public long getPartitionIdAndIncrement() {
        return -1;
    }

    public void registerPartitionAssignmentAndMetadata(
            long id, String name, PartitionAssignment assignment, TablePath table, long tableId)
            throws Exception {
        Peer.admin().createPartition(table, spec(table, name), false).get();
    }

    public void deletePartition(TablePath table, String name) throws Exception {
        Peer.admin().dropPartition(table, spec(table, name), false).get();
    }

    /** Tests do this with tables of one partition key only. */
    private static PartitionSpec spec(TablePath table, String name) throws Exception {
        String key = Peer.admin().getTableInfo(table).get().getPartitionKeys().get(0);
        return new PartitionSpec(Map.of(key, name));
    }

    /** The leases that exist, in one string of JSON; tests look whether there are none. */
    public List<String> getKvSnapshotLeasesList() throws Exception {
        String leases = Peer.zufluss("lease", "list", "--output", "json").strip();
        return leases.equals("[]") ? List.of() : List.of(leases);
    }

    /** A lease, if it exists, as the JSON of all. */
    public Optional<Object> getKvSnapshotLeaseMetadata(String id) throws Exception {
        return Optional.of((Object) Peer.zufluss("lease", "list", "--output", "json"))
                .filter(leases -> leases.toString().contains(id));
    }
}
