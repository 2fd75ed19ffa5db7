"""The errors of this room. A decoder raises only `WireError`, for a peer's malformed message."""


class WireError(ValueError):
    """A peer's bytes do not follow the format. Subclasses: `events.DecodeError`, `frames.FrameError`."""


class PromptError(ValueError):
    """A request that cannot become a prompt (400). `param` names the wrong member of the body."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(message)


class TooDeep(PromptError):
    """Objects and lists nested too deeply for any template; rendering or printing them would not be safe."""
