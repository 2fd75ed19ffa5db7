"""The dashboard of our runtimes: load, latency, tokens, answers."""

from __future__ import annotations

from typing import Final

from treeline_tools.boards.base import HERE, Board, Panel, Query, quantiles, rate, share

_R: Final = "treeline:"
BOARD: Final = Board(
    "treeline-engines",
    "Treeline / Engines",
    f"{_R}num_running_reqs",
    {
        "Load": (
            Panel("Running", "short", (Query(f"{_R}num_running_reqs{HERE}", "{{pod}}"),), stacked=True),
            Panel(
                "Waiting",
                "short",
                (Query(f"{_R}num_queue_reqs{HERE}", "{{pod}}"),),
            ),
            Panel(
                "Prompt tokens waiting",
                "short",
                (Query(f"{_R}num_waiting_uncached_tokens{HERE}", "{{pod}}"),),
                "That the cache does not have.",
            ),
            Panel(
                "KV cache held by running requests",
                "percentunit",
                (Query(f"{_R}token_usage{HERE}", "{{pod}}"),),
                "What prefixes fill besides can be evicted.",
            ),
        ),
        "Latency": (
            Panel("Time to first token", "s", quantiles(f"{_R}time_to_first_token_seconds", "model_name")),
            Panel("Between tokens", "s", quantiles(f"{_R}inter_token_latency_seconds", "model_name")),
            Panel("Whole requests", "s", quantiles(f"{_R}e2e_request_latency_seconds", "model_name")),
        ),
        "Tokens": (
            Panel(
                "Tokens",
                "ops",
                (
                    Query(rate(f"{_R}prompt_tokens_total", "model_name"), "prompts {{model_name}}"),
                    Query(rate(f"{_R}cached_tokens_total", "model_name"), "of these cached {{model_name}}"),
                    Query(rate(f"{_R}generation_tokens_total", "model_name"), "generated {{model_name}}"),
                ),
            ),
            Panel(
                "Prompt tokens from the cache",
                "percentunit",
                (Query(share(f"{_R}cached_tokens_total", f"{_R}prompt_tokens_total", "pod"), "{{pod}}"),),
            ),
            Panel(
                "Prefill rate",
                "ops",
                (Query(f"{_R}prefill_tokens_per_second{HERE}", "{{pod}}"),),
                "Tokens a second, as measured.",
            ),
            Panel("Decode step", "s", (Query(f"{_R}decode_step_seconds{HERE}", "{{pod}}"),)),
        ),
        "Answers": (
            Panel(
                "HTTP responses",
                "reqps",
                (Query(rate(f"{_R}http_responses_total", "path, status"), "{{status}} {{path}}"),),
                stacked=True,
            ),
            Panel(
                "Not finished",
                "ops",
                (
                    Query(rate(f"{_R}num_rejected_requests_total", "pod"), "rejected {{pod}}"),
                    Query(rate(f"{_R}num_aborted_requests_total", "pod"), "client left {{pod}}"),
                    Query(rate(f"{_R}num_retracted_requests_total", "pod"), "taken back for memory {{pod}}"),
                ),
            ),
            Panel(
                "Draining",
                "short",
                (Query(f"sum({_R}draining{HERE})", "pods that drain"),),
            ),
        ),
    },
)
