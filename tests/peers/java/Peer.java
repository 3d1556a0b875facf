package zufluss.peers;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.fluss.client.Connection;
import org.apache.fluss.client.ConnectionFactory;
import org.apache.fluss.client.admin.Admin;
import org.apache.fluss.config.Configuration;
import org.apache.fluss.metadata.PartitionInfo;
import org.apache.fluss.metadata.TablePath;

/**
 * The server under test, as the stubs of this directory reach it.
 *
 * <p>Fluss's tests reach into their server's objects and its ZooKeeper. The stubs answer from here
 * instead: by the Java client where it can, else by a command of `zufluss`.
 */
public final class Peer {
    private static Connection connection;

    private Peer() {}

    /** Where the server listens: the system property that scripts/peers.py sets. */
    public static String bootstrap() {
        return System.getProperty("peer");
    }

    public static Configuration clientConfig() {
        Configuration config = new Configuration();
        config.setString("bootstrap.servers", bootstrap());
        return config;
    }

    /** One connection for all stubs of the process, which ends with it. */
    public static synchronized Admin admin() {
        if (connection == null) {
            connection = ConnectionFactory.createConnection(clientConfig());
        }
        return connection.getAdmin();
    }

    /** The partitions of a table that exist now. */
    public static Map<String, Long> partitions(TablePath table) throws Exception {
        Map<String, Long> partitions = new HashMap<>();
        for (PartitionInfo partition : admin().listPartitionInfos(table).get()) {
            partitions.put(partition.getPartitionName(), partition.getPartitionId());
        }
        return partitions;
    }

    /** Run a command of `zufluss` on the server, and return what it prints. */
    public static String zufluss(String... arguments) throws Exception {
        List<String> command =
                new ArrayList<>(
                        List.of(System.getProperty("peer.python"), "-m", "zufluss.cli.main"));
        command.addAll(List.of(arguments));
        command.addAll(List.of("--bootstrap", bootstrap()));
        Process process = new ProcessBuilder(command).redirectErrorStream(true).start();
        String printed =
                new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        if (process.waitFor() != 0) {
            throw new IllegalStateException(command + " failed: " + printed);
        }
        return printed;
    }
}
