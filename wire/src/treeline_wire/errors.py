"""The errors of this room. What a peer sent wrong is a `WireError`; nothing else leaves a decoder."""


class WireError(ValueError):
    """A peer's bytes do not follow the contract. Subclasses: `events.DecodeError`, `frames.FrameError`."""
