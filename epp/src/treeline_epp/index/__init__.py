"""Which endpoint holds which prefix."""
