"""Programs as graphs: recorded, rewritten, and run without their functions."""
