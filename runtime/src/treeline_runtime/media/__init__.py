"""Images of requests: fetched, decoded and turned into a model's input, before the scheduler sees the request.

    body ── `sources` ──▶ Source ── `fetch` ──▶ bytes ── `pool`, `worker` ──▶ pixels in `files` ──▶ MediaItem

`reading` drives it. Nothing here trusts the bytes: only a confined process decodes them.
"""
