"""`python -m e2e.cluster up|down|status|fit`: the cluster as words of the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys

from e2e.cluster.place import ClusterError
from e2e.cluster.progress import Progress
from e2e.cluster.providers import Provider, choose, every


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Return the exit status: 1 for a reported failure, 3 if `status` or `fit` finds no cluster."""
    args = _parser().parse_args(arguments)
    progress = Progress()
    try:
        offered = every(progress, nodes=args.nodes, images=args.images, install=args.install)
        provider = choose(args.provider, offered)
        words = {"up": _up, "down": _down, "status": _status, "fit": _fit}
        return words[args.word](provider, progress, args)
    except ClusterError as error:
        progress.say(f"cluster: {error}")
        return 1
    except KeyboardInterrupt:
        progress.say("cluster: interrupted; `python -m e2e.cluster down` removes what there is")
        return 130


def _up(provider: Provider, progress: Progress, args: argparse.Namespace) -> int:
    kubeconfig = provider.up()
    progress.say("the cluster is yours with:")
    sys.stdout.write(f"export KUBECONFIG={kubeconfig}\n")
    if folders := provider.commands():
        # Behind those of the user: an own kubectl stays the own one.
        sys.stdout.write(f'export PATH="$PATH:{":".join(map(str, folders))}"\n')
    return 0


def _down(provider: Provider, progress: Progress, args: argparse.Namespace) -> int:
    if os.environ.get("CLUSTER_KEEP") == "1" and not args.force:
        progress.say("kept, as CLUSTER_KEEP=1 asks; `down --force` removes it")
        return 0
    with progress.step("removing the cluster"):
        provider.down()
    return 0


def _status(provider: Provider, progress: Progress, args: argparse.Namespace) -> int:
    status = provider.status()
    sys.stdout.write(json.dumps(status, indent=2) + "\n")
    return 0 if status["state"] == "up" else 3


def _fit(provider: Provider, progress: Progress, args: argparse.Namespace) -> int:
    """Print why this machine cannot have the cluster; nothing if it can."""
    reason = provider.unfit()
    if reason:
        sys.stdout.write(f"{reason}\n")
    return 3 if reason else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A cluster to test on.")
    parser.add_argument("word", choices=["up", "down", "status", "fit"])
    parser.add_argument(
        "--provider",
        default=os.environ.get("PROVIDER", "auto"),
        help="auto, existing, kind or local (default: $PROVIDER, else auto)",
    )
    parser.add_argument("--nodes", type=int, choices=range(1, 4), help="how many (default: those there are, else 1)")
    parser.add_argument("--without-images", dest="images", action="store_false", help="do without the project's images")
    parser.add_argument(
        "--no-install",
        dest="install",
        action="store_false",
        help="name missing packages instead of installing them",
    )
    parser.add_argument("--force", action="store_true", help="down: also with CLUSTER_KEEP=1")
    return parser


if __name__ == "__main__":
    sys.exit(main())
