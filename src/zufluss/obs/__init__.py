"""What operators see: log events and metrics.

`zufluss.obs.logging.configure` is called once by a process that owns its output (the CLI, a
server). As a library zufluss configures nothing.
"""
