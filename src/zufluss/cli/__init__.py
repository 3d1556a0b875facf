"""The `zufluss` command.

`main` assembles the commands and owns the exit codes, `session` has what all of them share,
`servers` runs servers, `database`, `table` and `partition` change the catalog, `data` appends and
scans; `schema_file` and `files` read what users hand over, `output` prints.

Importing it is light: pyarrow, numba and the client are loaded by the command that needs them.
"""
