"""The index: which endpoint holds which prefix."""
