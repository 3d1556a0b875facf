package org.apache.fluss.server.coordinator;

import org.apache.fluss.config.Configuration;
import org.apache.fluss.metadata.TableInfo;
import org.apache.fluss.metadata.TablePath;
import org.apache.fluss.server.zk.ZooKeeperClient;
import zufluss.peers.Peer;

/** Stands in for the coordinator's catalog, of which a test asks a table. */
public class MetadataManager {
    public MetadataManager(
            ZooKeeperClient client, Configuration config, LakeCatalogDynamicLoader loader) {}

    public TableInfo getTable(TablePath table) throws Exception {
        return Peer.admin().getTableInfo(table).get();
    }
}
