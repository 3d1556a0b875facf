"""Full scans of primary-key tables, through real servers.

Most tests share one server (`conftest.py`) and use it through raw frames and the client. Tests
about hours run in process with a clock that they set (from `tests/tablet/scan/test_service.py`).
Details are tested next to their code.
"""
