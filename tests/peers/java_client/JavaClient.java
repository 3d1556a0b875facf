import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.TreeSet;
import org.apache.fluss.client.Connection;
import org.apache.fluss.client.ConnectionFactory;
import org.apache.fluss.client.admin.Admin;
import org.apache.fluss.client.lookup.Lookuper;
import org.apache.fluss.client.table.Table;
import org.apache.fluss.client.table.scanner.Scan;
import org.apache.fluss.client.table.scanner.ScanRecord;
import org.apache.fluss.client.table.scanner.batch.BatchScanner;
import org.apache.fluss.client.table.scanner.log.LogScanner;
import org.apache.fluss.client.table.scanner.log.ScanRecords;
import org.apache.fluss.client.table.writer.AppendWriter;
import org.apache.fluss.client.table.writer.UpsertWriter;
import org.apache.fluss.config.Configuration;
import org.apache.fluss.metadata.DatabaseDescriptor;
import org.apache.fluss.metadata.Schema;
import org.apache.fluss.metadata.TableBucket;
import org.apache.fluss.metadata.TableDescriptor;
import org.apache.fluss.metadata.TablePath;
import org.apache.fluss.row.BinaryString;
import org.apache.fluss.row.GenericRow;
import org.apache.fluss.row.InternalRow;
import org.apache.fluss.types.DataTypes;
import org.apache.fluss.utils.CloseableIterator;

/** What a user of Fluss's Java client does first, on the server that the argument names. */
public class JavaClient {
    private static final Duration POLL = Duration.ofSeconds(1);

    /** More silent polls than this, and the rest of the rows is missing. */
    private static final int SILENT_POLLS = 60;

    private static final TablePath EVENTS = TablePath.of("java_client", "events");
    private static final TablePath STOCK = TablePath.of("java_client", "stock");

    public static void main(String[] arguments) throws Exception {
        Configuration configuration = new Configuration();
        configuration.setString("bootstrap.servers", arguments[0]);
        try (Connection connection = ConnectionFactory.createConnection(configuration);
                Admin admin = connection.getAdmin()) {
            createTables(admin);
            try (Table events = connection.getTable(EVENTS)) {
                logTable(events);
            }
            try (Table stock = connection.getTable(STOCK)) {
                primaryKeyTable(stock, admin);
            }
        }
    }

    private static void createTables(Admin admin) throws Exception {
        admin.createDatabase("java_client", DatabaseDescriptor.EMPTY, false).get();
        Schema events =
                Schema.newBuilder()
                        .column("id", DataTypes.BIGINT())
                        .column("kind", DataTypes.STRING())
                        .build();
        Schema stock =
                Schema.newBuilder()
                        .column("id", DataTypes.INT())
                        .column("name", DataTypes.STRING())
                        .column("pieces", DataTypes.INT())
                        .primaryKey("id")
                        .build();
        TableDescriptor log = TableDescriptor.builder().schema(events).distributedBy(1).build();
        TableDescriptor keys = TableDescriptor.builder().schema(stock).distributedBy(2, "id").build();
        admin.createTable(EVENTS, log, false).get();
        admin.createTable(STOCK, keys, false).get();
        same("create table", admin.listTables("java_client").get(), List.of("events", "stock"));
    }

    private static void logTable(Table events) throws Exception {
        AppendWriter writer = events.newAppend().createWriter();
        for (long id = 1; id <= 1000; id++) {
            writer.append(GenericRow.of(id, text("kind " + id % 3)));
        }
        writer.flush();
        TreeSet<Long> ids = new TreeSet<>();
        List<ScanRecord> records = scanned(events, events.newScan(), 1000);
        records.forEach(record -> ids.add(record.getRow().getLong(0)));
        same("append and scan", List.of(ids.size(), ids.first(), ids.last()), List.of(1000, 1L, 1000L));
        TreeSet<String> kinds = new TreeSet<>();
        records = scanned(events, events.newScan().project(List.of("kind")), 1000);
        records.forEach(record -> kinds.add(record.getRow().getString(0).toString()));
        same("scan of a column", kinds, new TreeSet<>(List.of("kind 0", "kind 1", "kind 2")));
        same("limit scan of a log", limited(events, 7), 7);
    }

    private static void primaryKeyTable(Table stock, Admin admin) throws Exception {
        UpsertWriter writer = stock.newUpsert().createWriter();
        for (int id = 1; id <= 300; id++) {
            writer.upsert(GenericRow.of(id, text("thing " + id), id * 10));
        }
        writer.flush();
        UpsertWriter some = stock.newUpsert().partialUpdate("id", "pieces").createWriter();
        some.upsert(GenericRow.of(300, null, 7));
        some.flush();
        writer.delete(GenericRow.of(1, null, null));
        writer.flush();

        Lookuper lookuper = stock.newLookup().createLookuper();
        InternalRow row = lookuper.lookup(GenericRow.of(300)).get().getSingletonRow();
        same("upsert and partial upsert", row.getString(1) + ": " + row.getInt(2), "thing 300: 7");
        same("delete", lookuper.lookup(GenericRow.of(1)).get().getSingletonRow(), null);
        int[] changes = new int[4];
        for (ScanRecord record : scanned(stock, stock.newScan(), 303)) {
            changes["+I -U +U -D".indexOf(record.getChangeType().shortString()) / 3]++;
        }
        same("changelog", Arrays.toString(changes), "[300, 1, 1, 1]");
        same("limit scan of keys", limited(stock, 5), 5);
        try (BatchScanner scanner = stock.newScan().createBatchScanner()) {
            same("scan of keys", counted(scanner), 299);
        }
        same("row count", admin.getTableStats(STOCK).get().getRowCount(), 299L);
    }

    /** Read all buckets from their beginning, until this many records have come. */
    private static List<ScanRecord> scanned(Table table, Scan scan, int count) throws Exception {
        List<ScanRecord> records = new ArrayList<>();
        try (LogScanner scanner = scan.createLogScanner()) {
            for (int bucket = 0; bucket < table.getTableInfo().getNumBuckets(); bucket++) {
                scanner.subscribeFromBeginning(bucket);
            }
            for (int silent = 0; records.size() < count && silent < SILENT_POLLS; ) {
                ScanRecords polled = scanner.poll(POLL);
                polled.forEach(records::add);
                silent = polled.isEmpty() ? silent + 1 : 0;
            }
        }
        return records;
    }

    /** How many rows a scan of the first bucket with a limit returns. */
    private static int limited(Table table, int limit) throws Exception {
        TableBucket bucket = new TableBucket(table.getTableInfo().getTableId(), 0);
        try (BatchScanner scanner = table.newScan().limit(limit).createBatchScanner(bucket)) {
            return counted(scanner);
        }
    }

    private static int counted(BatchScanner scanner) throws Exception {
        int count = 0;
        for (CloseableIterator<InternalRow> rows = scanner.pollBatch(POLL);
                rows != null;
                rows = scanner.pollBatch(POLL)) {
            for (; rows.hasNext(); rows.next()) {
                count++;
            }
            rows.close();
        }
        return count;
    }

    private static BinaryString text(String value) {
        return BinaryString.fromString(value);
    }

    /** Print a step and its result; end with exit code 1 unless it is the expected one. */
    private static void same(String step, Object result, Object expected) {
        boolean right = String.valueOf(result).equals(String.valueOf(expected));
        System.out.println(step + ": " + result + (right ? "" : ", but should be " + expected));
        if (!right) {
            System.exit(1);
        }
    }
}
