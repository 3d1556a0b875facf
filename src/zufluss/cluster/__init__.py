"""What both roles know of the cluster: its picture in memory, and how it travels and is served."""
