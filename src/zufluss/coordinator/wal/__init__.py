"""Sessions of the shared log as the coordinator keeps them (`zufluss.log.durability = remote`).

| module | what it has |
|---|---|
| `book.py` | every session, durable: whose it is, its floor, whether and where it ended |
| `keeper.py` | begins and seals sessions; knows which of them has the end of a bucket |
| `takeover.py` | buckets of lost servers get other leaders |
| `cleaner.py` | deletes objects of sessions that no bucket needs any more |
| `service.py` | the handlers |
"""
