"""The `zufluss` command.

`main` assembles the commands, `failures` turns errors into one line and an exit code. `session`
holds what all commands share, `servers` runs servers, `tiering` runs the tiering service.
`database`, `table`, `partition`, `location`, `lease` and `producer` administer a cluster; `status`,
`top` and `doctor` watch it, with `numbers` of its servers and `local_checks` of this machine;
`data`, `keyed`, `scan`, `count` and `sql` move and read rows. `schema_file`, `files`, `keys` and
`times` parse user input, `output` and `amounts` print. `docs` writes docs/cli.md.

Importing the package is cheap: each command imports pyarrow, numba and the client when it runs.
"""
