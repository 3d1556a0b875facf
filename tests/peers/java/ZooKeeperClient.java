package org.apache.fluss.server.zk;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.fluss.metadata.TablePath;
import zufluss.peers.Peer;

/** Stands in for the ZooKeeper of Fluss's cluster: what tests read there, asked of the server. */
public class ZooKeeperClient {
    public Map<Long, String> getPartitionIdAndNames(TablePath table) throws Exception {
        Map<Long, String> names = new HashMap<>();
        Peer.partitions(table).forEach((name, id) -> names.put(id, name));
        return names;
    }

    /** The leases that exist, in one string of JSON; tests look whether there are none. */
    public List<String> getKvSnapshotLeasesList() throws Exception {
        String leases = Peer.zufluss("lease", "list", "--output", "json").strip();
        return leases.equals("[]") ? List.of() : List.of(leases);
    }
}
