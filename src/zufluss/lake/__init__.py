"""Lake formats: `base.py` is the interface, every sub-package implements one format."""
