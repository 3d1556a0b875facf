package org.apache.fluss.server.testutils;

import static org.apache.fluss.testutils.common.CommonTestUtils.waitUntil;
import static org.apache.fluss.testutils.common.CommonTestUtils.waitValue;

import java.time.Duration;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.fluss.cluster.ServerNode;
import org.apache.fluss.config.ConfigOptions;
import org.apache.fluss.config.Configuration;
import org.apache.fluss.metadata.TablePath;
import org.apache.fluss.server.zk.ZooKeeperClient;
import org.apache.fluss.utils.clock.Clock;
import org.junit.jupiter.api.extension.AfterEachCallback;
import org.junit.jupiter.api.extension.ExtensionContext;
import zufluss.peers.Peer;

/**
 * Stands in for Fluss's mini cluster, under its name: a server that runs already.
 *
 * <p>It has the methods that Fluss's test classes call. What they configure is not passed on: the
 * properties of a class's server are in scripts/peers.py. A second cluster is refused.
 */
public class FlussClusterExtension implements AfterEachCallback {
    private static final Duration PATIENCE = Duration.ofMinutes(1);

    public static Builder builder() {
        return new Builder();
    }

    /** Drops what a test left, as Fluss's own does: many tests use the same names. */
    @Override
    public void afterEach(ExtensionContext context) throws Exception {
        for (String database : Peer.admin().listDatabases().get()) {
            if (!database.equals("fluss")) {
                Peer.admin().dropDatabase(database, true, true).get();
                continue;
            }
            for (String table : Peer.admin().listTables(database).get()) {
                Peer.admin().dropTable(TablePath.of(database, table), true).get();
            }
        }
    }

    public Configuration getClientConfig() {
        return Peer.clientConfig();
    }

    /** A second listener of the server, if it has one. */
    public Configuration getClientConfig(String listener) {
        Configuration config = Peer.clientConfig();
        config.setString("bootstrap.servers", System.getProperty("peer." + listener));
        return config;
    }

    public String getBootstrapServers() {
        return Peer.bootstrap();
    }

    public ServerNode getCoordinatorServerNode(String listener) {
        throw refused("a listener of its own");
    }

    public ZooKeeperClient getZooKeeperClient() {
        return new ZooKeeperClient();
    }

    public void start() {
        throw refused("a second cluster");
    }

    public void close() {}

    public void triggerAndWaitSnapshot(TablePath table) throws Exception {
        Peer.zufluss("snapshot", "now", table.getDatabaseName() + "." + table.getTableName());
    }

    /** A table of zufluss has leaders when CREATE TABLE returns. */
    public void waitUntilTableReady(long tableId) {}

    public Map<String, Long> waitUntilPartitionAllReady(TablePath table) {
        return waitUntilPartitionsCreated(
                table, ConfigOptions.TABLE_AUTO_PARTITION_NUM_PRECREATE.defaultValue());
    }

    public Map<String, Long> waitUntilPartitionsCreated(TablePath table, int count) {
        return waitValue(
                () -> Optional.of(Peer.partitions(table)).filter(found -> found.size() == count),
                PATIENCE,
                "no " + count + " partitions");
    }

    public void waitUntilPartitionsDropped(TablePath table, List<String> dropped) {
        waitUntil(
                () -> Collections.disjoint(Peer.partitions(table).keySet(), dropped),
                PATIENCE,
                "partitions are still there");
    }

    private static UnsupportedOperationException refused(String what) {
        return new UnsupportedOperationException("not against a running server: " + what);
    }

    public static class Builder {
        public Builder setClusterConf(Configuration config) {
            return this;
        }

        public Builder setNumOfTabletServers(int count) {
            return this;
        }

        public Builder setCoordinatorServerListeners(String listeners) {
            return this;
        }

        public Builder setTabletServerListeners(String listeners) {
            return this;
        }

        public Builder setClock(Clock clock) {
            return this;
        }

        public FlussClusterExtension build() {
            return new FlussClusterExtension();
        }
    }
}
