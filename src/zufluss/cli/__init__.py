"""The `zufluss` command.

`main` assembles the commands and owns the exit codes. `session` holds what all commands share,
`servers` runs servers, `tiering` runs the tiering service. `database`, `table`, `partition`,
`location`, `lease` and `producer` administer a cluster; `data` and `keyed` move rows.
`schema_file`, `files`, `keys` and `times` parse user input, `output` prints.

Importing the package is cheap: each command imports pyarrow, numba and the client when it runs.
"""
