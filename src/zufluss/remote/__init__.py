"""Remote storage: files of buckets as objects in one or many locations.

`layout` defines paths, `manifest` and `snapshot` are the two documents that list the files of a
bucket. `objects` sends requests to one location (`local`, `cloud`). `locations` is the registry of
all locations and `registry` its changes; `health` tracks which of them work, `placement` chooses
one for new files. `storage` combines these for a server; `tokens` are credentials for clients.
"""
