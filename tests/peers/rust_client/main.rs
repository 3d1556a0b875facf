//! What a user of Fluss's Rust client does first, on the server that the argument names.

use fluss::client::{FlussConnection, FlussTable};
use fluss::config::Config;
use fluss::error::Result;
use fluss::metadata::{DataTypes, Schema, TableBucket, TableDescriptor, TablePath};
use fluss::record::ScanRecord;
use fluss::row::{DataGetters, GenericRow};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

const POLL: Duration = Duration::from_secs(1);

/// More silent polls than this, and the rest of the rows is missing.
const SILENT_POLLS: usize = 60;

#[tokio::main]
async fn main() -> Result<()> {
    let bootstrap_servers = std::env::args().nth(1).expect("host:port of a server");
    let connection = FlussConnection::new(Config {
        bootstrap_servers,
        ..Config::default()
    })
    .await?;
    create_tables(&connection).await?;
    let path = TablePath::new("rust_client", "events");
    log_table(&connection.get_table(&path).await?).await?;
    let path = TablePath::new("rust_client", "stock");
    primary_key_table(&connection.get_table(&path).await?).await
}

async fn create_tables(connection: &FlussConnection) -> Result<()> {
    let events = Schema::builder()
        .column("id", DataTypes::bigint())
        .column("kind", DataTypes::string())
        .build()?;
    let stock = Schema::builder()
        .column("id", DataTypes::int())
        .column("name", DataTypes::string())
        .column("pieces", DataTypes::int())
        .primary_key(vec!["id"])?
        .build()?;
    let log = TableDescriptor::builder()
        .schema(events)
        .distributed_by(Some(1), vec![])
        .build()?;
    let keys = TableDescriptor::builder()
        .schema(stock)
        .distributed_by(Some(2), vec!["id".to_string()])
        .build()?;
    let admin = connection.get_admin()?;
    admin.create_database("rust_client", None, false).await?;
    admin
        .create_table(&TablePath::new("rust_client", "events"), &log, false)
        .await?;
    admin
        .create_table(&TablePath::new("rust_client", "stock"), &keys, false)
        .await?;
    same(
        "create table",
        admin.list_tables("rust_client").await?,
        vec!["events", "stock"],
    );
    Ok(())
}

async fn log_table(events: &FlussTable<'_>) -> Result<()> {
    let writer = events.new_append()?.create_writer()?;
    for id in 1..=1000i64 {
        let kind = format!("kind {}", id % 3);
        let mut row = GenericRow::new(2);
        row.set_field(0, id);
        row.set_field(1, kind.as_str());
        writer.append(&row)?;
    }
    writer.flush().await?;
    let mut ids = BTreeSet::new();
    for record in scanned(events, None, 1000).await? {
        ids.insert(record.row().get_long(0)?);
    }
    same(
        "append and scan",
        (ids.len(), ids.first(), ids.last()),
        (1000, Some(&1), Some(&1000)),
    );
    let mut kinds = BTreeSet::new();
    for record in scanned(events, Some("kind"), 1000).await? {
        kinds.insert(record.row().get_string(0)?.to_string());
    }
    let kinds = Vec::from_iter(kinds);
    same(
        "scan of a column",
        kinds,
        vec!["kind 0", "kind 1", "kind 2"],
    );
    same("limit scan of a log", limited(events, 7).await?, 7);
    Ok(())
}

async fn primary_key_table(stock: &FlussTable<'_>) -> Result<()> {
    let writer = stock.new_upsert()?.create_writer()?;
    for id in 1..=300i32 {
        let name = format!("thing {id}");
        let mut row = key(id);
        row.set_field(1, name.as_str());
        row.set_field(2, id * 10);
        writer.upsert(&row)?;
    }
    writer.flush().await?;
    let some = stock
        .new_upsert()?
        .partial_update_with_column_names(&["id", "pieces"])?;
    let some = some.create_writer()?;
    let mut row = key(300);
    row.set_field(2, 7);
    some.upsert(&row)?;
    some.flush().await?;
    writer.delete(&key(1))?;
    writer.flush().await?;

    let mut lookuper = stock.new_lookup()?.create_lookuper()?;
    let result = lookuper.lookup(&key(300)).await?;
    let row = result.get_single_row()?.expect("a row of the key 300");
    let text = format!("{}: {}", row.get_string(1)?, row.get_int(2)?);
    same(
        "upsert and partial upsert",
        text,
        "thing 300: 7".to_string(),
    );
    let result = lookuper.lookup(&key(1)).await?;
    same("delete", result.get_single_row()?.is_none(), true);
    let mut changes = [0; 4];
    for record in scanned(stock, None, 303).await? {
        let change = record.change_type().short_string();
        changes["+I -U +U -D".find(change).expect("a change of a key") / 3] += 1;
    }
    same("changelog", changes, [300, 1, 1, 1]);
    same("limit scan of keys", limited(stock, 5).await?, 5);
    Ok(())
}

/// Read all buckets from their beginning, until this many records have come.
async fn scanned(
    table: &FlussTable<'_>,
    column: Option<&str>,
    count: usize,
) -> Result<Vec<ScanRecord>> {
    let mut scan = table.new_scan();
    if let Some(column) = column {
        scan = scan.project_by_name(&[column])?;
    }
    let scanner = scan.create_log_scanner()?;
    for bucket in 0..table.get_table_info().num_buckets {
        scanner.subscribe(bucket, 0).await?;
    }
    let mut records: Vec<ScanRecord> = Vec::new();
    let mut silent = 0;
    while records.len() < count && silent < SILENT_POLLS {
        let before = records.len();
        records.extend(scanner.poll(POLL).await?);
        silent = if records.len() > before {
            0
        } else {
            silent + 1
        };
    }
    Ok(records)
}

/// How many rows a scan of the first bucket with a limit returns.
async fn limited(table: &FlussTable<'_>, limit: i32) -> Result<usize> {
    let bucket = TableBucket::new(table.get_table_info().table_id, 0);
    let mut scanner = table
        .new_scan()
        .limit(limit)?
        .create_bucket_batch_scanner(bucket)?;
    let batches = scanner.collect_all_batches().await?;
    Ok(batches.iter().map(|batch| batch.num_records()).sum())
}

/// A row of `stock` that has its key only.
fn key(id: i32) -> GenericRow<'static> {
    let mut row = GenericRow::new(3);
    row.set_field(0, id);
    row
}

/// Print a step and its result; end with exit code 1 unless it is the expected one.
fn same<A: Debug + PartialEq<B>, B: Debug>(step: &str, result: A, expected: B) {
    if result != expected {
        println!("{step}: {result:?}, but should be {expected:?}");
        std::process::exit(1);
    }
    println!("{step}: {result:?}");
}
