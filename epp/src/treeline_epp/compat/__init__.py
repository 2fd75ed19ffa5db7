"""What users of other endpoint pickers bring along: their flags, their configuration file, their names of metrics."""
