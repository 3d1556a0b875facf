"""What every part of the client stands on: the cluster, its metadata, offsets, Arrow conversion."""
