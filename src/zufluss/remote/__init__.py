"""Remote storage: objects in one or many locations, and what lies where.

`layout` names things, `manifest` and `snapshot` are the two documents that say what belongs to a
bucket, `objects` speaks with one location, `locations` and `health` know all of them, `placement`
chooses one for each new file, and `storage` puts that together for a server.
"""
