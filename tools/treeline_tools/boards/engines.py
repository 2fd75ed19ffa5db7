"""The dashboard of our runtimes: load, latency, tokens, answers."""

from __future__ import annotations

from typing import Final

from treeline_tools.boards.base import (
    PROCESS,
    Board,
    Panel,
    Query,
    Variable,
    heatmap,
    processes,
    quantile,
    quantiles,
    rate,
    share,
    stat,
)

_R: Final = "treeline:"
_ALIVE: Final = f"{_R}num_running_reqs"
_POOL: Final = f'{PROCESS}, job=~"(.*/)?$pool"'
"""The monitor of a pool's pods has the pool's name, so it ends their `job`."""
_ONE: Final = f'{_POOL}, model_name=~"$model"'
_HERE: Final = f"{{{_ONE}}}"
_TTFT: Final = f"{_R}time_to_first_token_seconds"

BOARD: Final = Board(
    "treeline-engines",
    "Treeline / Engines",
    (
        *processes(_ALIVE),
        Variable("pool", "Pool", f'{_ALIVE}{{namespace=~"$namespace"}}', "job", "/([^/]+)$/"),
        Variable("model", "Model", f'{_ALIVE}{{namespace=~"$namespace"}}', "model_name"),
    ),
    {
        "Now": (
            stat("Running requests", "short", f"sum({_ALIVE}{_HERE})"),
            stat("Waiting requests", "short", f"sum({_R}num_queue_reqs{_HERE})"),
            stat("Median time to first token", "s", quantile(0.5, _TTFT, selected=_ONE)),
            stat("Output tokens a second", "short", rate(f"{_R}generation_tokens_total", selected=_ONE)),
            stat(
                "Prompt tokens from the cache",
                "percentunit",
                share(f"{_R}cached_tokens_total", f"{_R}prompt_tokens_total", selected=_ONE),
            ),
            stat(
                "Rejected requests a second",
                "reqps",
                rate(f"{_R}num_rejected_requests_total", selected=_ONE),
                "Answered with 503: the queue is full, or the server drains.",
                alarm=0.01,
            ),
        ),
        "Pods": (
            Panel(
                "Each pod now",
                "short",
                (
                    Query(f"sum by (namespace, pod, model_name) ({_ALIVE}{_HERE})", "Running"),
                    Query(f"sum by (namespace, pod, model_name) ({_R}num_queue_reqs{_HERE})", "Waiting"),
                    Query(
                        f"max by (namespace, pod, model_name) ({_R}token_usage{_HERE})",
                        "KV cache held by requests",
                        "percentunit",
                    ),
                    Query(
                        share(
                            f"{_R}cached_tokens_total",
                            f"{_R}prompt_tokens_total",
                            "namespace, pod, model_name",
                            _ONE,
                        ),
                        "Prompt tokens from the cache",
                        "percentunit",
                    ),
                    Query(
                        rate(f"{_R}generation_tokens_total", "namespace, pod, model_name", _ONE),
                        "Output tokens a second",
                    ),
                    Query(f"sum by (namespace, pod, model_name) ({_R}max_total_num_tokens{_HERE})", "KV cache, tokens"),
                ),
                kind="table",
            ),
        ),
        "Load": (
            Panel("Running", "short", (Query(f"{_ALIVE}{_HERE}", "{{pod}}"),), stacked=True),
            Panel("Waiting", "short", (Query(f"{_R}num_queue_reqs{_HERE}", "{{pod}}"),)),
            Panel(
                "Prompt tokens waiting",
                "short",
                (Query(f"{_R}num_waiting_uncached_tokens{_HERE}", "{{pod}}"),),
                "Without those that are cached.",
            ),
            Panel(
                "KV cache held by running requests",
                "percentunit",
                (Query(f"{_R}token_usage{_HERE}", "{{pod}}"),),
                "The rest is free, or holds prefixes that can be evicted.",
            ),
        ),
        "Latency": (
            heatmap(
                "Time to first token",
                "s",
                _TTFT,
                "How many requests took how long. Two bands are often hits and misses of the cache.",
                _ONE,
            ),
            Panel("Time to first token by model", "s", quantiles(_TTFT, "model_name", selected=_ONE)),
            Panel("Between tokens", "s", quantiles(f"{_R}inter_token_latency_seconds", "model_name", selected=_ONE)),
            Panel("Whole requests", "s", quantiles(f"{_R}e2e_request_latency_seconds", "model_name", selected=_ONE)),
        ),
        "Tokens": (
            Panel(
                "Tokens",
                "ops",
                (
                    Query(rate(f"{_R}prompt_tokens_total", "model_name", _ONE), "prompts {{model_name}}"),
                    Query(rate(f"{_R}cached_tokens_total", "model_name", _ONE), "of these cached {{model_name}}"),
                    Query(rate(f"{_R}generation_tokens_total", "model_name", _ONE), "generated {{model_name}}"),
                ),
            ),
            Panel(
                "Prompt tokens from the cache",
                "percentunit",
                (Query(share(f"{_R}cached_tokens_total", f"{_R}prompt_tokens_total", "pod", _ONE), "{{pod}}"),),
            ),
            Panel(
                "Prefill rate",
                "ops",
                (Query(f"{_R}prefill_tokens_per_second{_HERE}", "{{pod}}"),),
                "Tokens a second, as measured.",
            ),
            Panel("Decode step", "s", (Query(f"{_R}decode_step_seconds{_HERE}", "{{pod}}"),)),
        ),
        "Answers": (
            Panel(
                "HTTP responses",
                "reqps",
                (Query(rate(f"{_R}http_responses_total", "path, status", _POOL), "{{status}} {{path}}"),),
                "Of all models: this metric does not name them.",
                stacked=True,
            ),
            Panel(
                "Not finished",
                "ops",
                (
                    Query(rate(f"{_R}num_rejected_requests_total", "pod", _ONE), "rejected {{pod}}"),
                    Query(rate(f"{_R}num_aborted_requests_total", "pod", _ONE), "client left {{pod}}"),
                    Query(rate(f"{_R}num_retracted_requests_total", "pod", _ONE), "back to the queue {{pod}}"),
                ),
                "A request goes back to the queue when the KV cache is full.",
            ),
            Panel("Draining", "short", (Query(f"sum({_R}draining{_HERE})", "pods that drain"),)),
        ),
    },
)
