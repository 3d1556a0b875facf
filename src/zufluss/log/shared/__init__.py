"""The shared log: appended batches become durable as objects that every server can read.

| module | what it has |
|---|---|
| `api.py` | what a shared log promises, and the nouns |
| `gather.py`, `pace.py` | which entries go into an object, and when it may start; pure |
| `writer.py` | the session of a server: puts under way, acknowledged in order |
| `ending.py` | the end of a session that somebody else decides |
| `reading.py`, `tails.py` | the objects of a session, and what they have of each bucket |
| `probe.py` | whether a location can be trusted to create an object once |
| `objects.py` | these over a location |
"""
