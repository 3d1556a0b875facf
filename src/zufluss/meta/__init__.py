"""The metadata store: what the cluster must remember, behind one small protocol.

`zufluss.meta.api` declares the protocol, `zufluss.meta.embedded` is the backend for one process,
`zufluss.meta.zookeeper` the one for clusters.
"""
