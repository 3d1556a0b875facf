"""Buckets whose acknowledged rows lie in the shared log (`zufluss.log.durability = remote`).

| module | what it has |
|---|---|
| `session.py` | the session of this server: appended entries become durable in it |
| `sources.py` | sessions that have ended, read once for all buckets that are taken over from them |
| `copy.py` | how a bucket comes up from a session that has ended, and continues in this one |
| `trim.py` | which objects of the session are not needed any more |
| `lease.py` | how long this server may answer lookups without word from its coordinator |
| `host.py` | these together, as the tablet server begins and ends sessions |
"""
