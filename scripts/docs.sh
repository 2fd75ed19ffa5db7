#!/usr/bin/env bash
# The documentation as a site.
#   scripts/docs.sh                     serve it on a free port, and show changes as they are saved
#   scripts/docs.sh --build [FOLDER]    write it to a folder (default: dist/site); a link or an anchor that leads nowhere is an error
#   scripts/docs.sh --release VERSION   add this version to the branch gh-pages, for a host of static pages; nothing is pushed
set -euo pipefail
cd "$(dirname "$0")/.."
export NO_MKDOCS_2_WARNING=1 PATH=$PWD/.venv/bin:$PATH

case ${1:-} in
  "")
    port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
    exec mkdocs serve --dev-addr "127.0.0.1:$port" --watch README.md --watch mkdocs.yml ;;
  --build) exec mkdocs build --site-dir "$(realpath -m "${2:-dist/site}")" ;;
  --release)
    [ $# = 2 ] || { echo "docs: name the version: scripts/docs.sh --release 0.2.0" >&2; exit 2; }
    exec mike deploy --update-aliases "$2" latest ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
