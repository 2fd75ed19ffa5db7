"""The `treeline` command: thin, it starts the rooms."""
