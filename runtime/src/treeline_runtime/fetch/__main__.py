"""`python -m treeline_runtime.fetch`: the command line.

Standard output is read by others: a JSON object per line, `{"bytes_done": …, "bytes_total": …}`, with
`"commits": {URI: …}` once some commit of the Hub is known. A failure ends with
status 1 and one line, `Reason: text`, on standard error and in the termination log. Reasons: DownloadFailed,
ModelTooLarge, WeightsMissing. After a success the termination log has a line `URI COMMIT` for each model of the Hub;
such lines in the environment, as `TREELINE_COMMITS`, say which commits to take.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from treeline_wire.command_line import Parser
from treeline_wire.models import commits_of, commits_text

from treeline_runtime.fetch.bucket import Bucket
from treeline_runtime.fetch.folder import PROGRESS_S, FetchError, Progress, Wanted, fetch
from treeline_runtime.fetch.hub import HubRepo

TERMINATION_LOG: Final = "/dev/termination-log"
_LONGEST_REASON: Final = 1000
COMMITS: Final = "TREELINE_COMMITS"

logger = logging.getLogger("treeline.fetch")


def wanted(uri: str, to: str, *, weights: bool = True, files: Sequence[str] = ()) -> Wanted:
    """`files`: all that is fetched, if not a model's. Raises FetchError."""
    if uri.startswith(("s3://", "gs://")):
        return Wanted(Bucket(uri, weights=weights, files=files), Path(to), weights)
    commit = commits_of(os.environ.get(COMMITS, "")).get(uri)
    origin = HubRepo(uri, weights=weights, files=files, commit=commit)
    return Wanted(origin, Path(to), weights, uri)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m treeline_runtime.fetch",
        description="Download models into folders; s3:// and gs:// read their credentials from the environment.",
    )
    parser.add_argument(
        "--uri",
        action="append",
        default=[],
        help="hf://org/name[@revision], s3://bucket/folder or gs://bucket/folder; may be repeated",
    )
    parser.add_argument("--to", action="append", default=[], help="folder for the --uri of the same place")
    parser.add_argument("--tokenizer-uri", help="a model of which only the tokenizer is needed")
    parser.add_argument("--tokenizer-to", help="folder for it")
    parser.add_argument("--progress-seconds", type=float, default=PROGRESS_S, help="how often progress is printed")
    parser.add_argument("--termination-log", default=TERMINATION_LOG, help="file that gets the reason of a failure")
    args = parser.parse_args(argv)
    if len(args.uri) != len(args.to) or bool(args.tokenizer_uri) != bool(args.tokenizer_to):
        parser.error("every --uri needs its --to, and --tokenizer-uri its --tokenizer-to")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches everything; returns the exit status."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    progress = Progress(sys.stdout)
    began = time.monotonic()
    try:
        everything = [wanted(uri, to) for uri, to in zip(args.uri, args.to, strict=True)]
        if args.tokenizer_uri:
            everything.append(wanted(args.tokenizer_uri, args.tokenizer_to, weights=False))
        for one in everything:
            fetch(one, progress, every_s=args.progress_seconds)
    except FetchError as error:
        line = " ".join(f"{error.reason}: {error}".split())[:_LONGEST_REASON]
        sys.stderr.write(f"{line}\n")
        with contextlib.suppress(OSError):
            Path(args.termination_log).write_text(line)
        return 1
    with contextlib.suppress(OSError):
        Path(args.termination_log).write_text(commits_text(progress.commits))
    logger.info("complete after %.0f s", time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
