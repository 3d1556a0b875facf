"""The acceptance list of aggregation tables, producers and undo, line by line.

One real server serves most of it (`conftest.py`), by the client, by pyfluss and by the raw wire.
What the functions have to give says `reference.py`, in plain Python and from whole lists of inputs;
nothing of the engine is used there. Details of the same things are tested next to their code.
"""
