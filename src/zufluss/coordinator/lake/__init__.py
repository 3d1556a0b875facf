"""The lake side of tables: the tiering queue and committed lake snapshots."""
