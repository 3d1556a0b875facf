"""Aggregation tables, exactly-once producers and undo, through real servers.

Most tests share one server (`conftest.py`) and use it through the client, pyfluss and raw frames.
`reference.py` computes the expected results in plain Python from whole lists of inputs, without
any code of the engine. Details are tested next to their code.
"""
