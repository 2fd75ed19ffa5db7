"""The errors of this room. What a peer sent wrong is a `WireError`; nothing else leaves a decoder."""


class WireError(ValueError):
    """A peer's bytes do not follow the contract. Subclasses: `events.DecodeError`, `frames.FrameError`."""


class PromptError(ValueError):
    """A request that cannot be turned into a prompt: a 400. `param` names the offending member of the body."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(message)


class TooDeep(PromptError):
    """Objects and lists nested beyond what any template could mean; nothing that renders or prints them is safe."""
