"""Namespaces → trees (placeholder while the tree is being built: no prefix is known anywhere)."""

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Pod:
    """One publisher's place in the index."""

    name: str
    scope: str


class Index:
    """Where prefixes live."""

    def add_pod(self, name: str, scope: str) -> Pod:
        """A new pod, holding nothing."""
        return Pod(name, scope)

    def remove_pod(self, pod: Pod) -> None:
        """Forget a pod."""
