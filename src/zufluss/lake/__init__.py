"""Lake formats behind one seam: `base.py` is the seam, every sub-package one format."""
