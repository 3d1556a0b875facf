"""The log of a bucket and everything that makes it durable.

| module                                   | what it knows                                         |
|------------------------------------------|-------------------------------------------------------|
| `files`                                  | changing the file system; kill points                 |
| `segment`, `index`                       | a file of batches and its sparse indexes              |
| `writer_state`                           | idempotent writers                                    |
| `checkpoint`, `recovery`                 | what is durable; opening a log after any stop         |
| `log`                                    | one bucket's log, owned by the event loop             |
| `retention`                              | expiry and deletion                                   |
| `sync`, `worker`, `flush`                | syncing beside the loop                               |
| `commit_log`, `commit`                   | group commit through one commit log per server        |
| `manager`                                | all logs of a server                                  |
"""
