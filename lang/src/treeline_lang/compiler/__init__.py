"""Programs as graphs: recorded, rewritten, stored, drawn, and run without their functions."""
