"""The acceptance list of full scans of primary-key tables, line by line.

One real server serves most of it (`conftest.py`), by the raw wire and by the client. Lines about
hours are proven in process, with a clock that the test moves (`tests/tablet/scan/test_service.py`
has it). Details of the same things are tested next to their code.
"""
