"""The frontend language. Nothing here yet: the room holds its place in the import rule."""
