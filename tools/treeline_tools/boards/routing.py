"""The dashboard of pickers: requests, hits, endpoints, KV events."""

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

_E: Final = "treeline_epp_"
_HERE: Final = f"{{{PROCESS}}}"
_POOLS: Final = f'{{{PROCESS}, pool=~"$pool"}}'
BOARD: Final = Board(
    "treeline-routing",
    "Treeline / Routing",
    (
        *processes(f"{_E}extproc_ready"),
        Variable("pool", "Pool", f'{_E}pool_ready_endpoints{{namespace=~"$namespace"}}', "pool"),
    ),
    {
        "Now": (
            stat("Pickers that are ready", "short", f"sum({_E}extproc_ready{_HERE})"),
            stat("Requests a second", "reqps", rate(f"{_E}decisions_total")),
            stat("Refused a second", "reqps", rate(f"{_E}refusals_total"), alarm=1),
            stat(
                "Prompt tokens from the cache",
                "percentunit",
                share(f"{_E}reported_hit_tokens_total", f"{_E}reported_prompt_tokens_total"),
                "As runtimes report it.",
            ),
            stat("Median time to first token", "s", quantile(0.5, f"{_E}ttft_seconds"), "Of Treeline runtimes."),
            stat("Endpoints left out for errors", "short", f"max({_E}endpoints_failing{_HERE})", alarm=1),
        ),
        "Pools": (
            Panel(
                "Each pool now",
                "short",
                (
                    Query(f"max by (namespace, pool) ({_E}pool_ready_endpoints{_POOLS})", "Endpoints ready"),
                    Query(f"sum by (namespace, pool) ({_E}pool_in_flight_requests{_POOLS})", "Requests in flight"),
                    Query(f"sum by (namespace, pool) ({_E}pool_held_requests{_POOLS})", "Requests that wait here"),
                    Query(f"max by (namespace, pool) ({_E}pool_queued_tokens{_POOLS})", "Prompt tokens queued"),
                ),
                kind="table",
            ),
            Panel(
                "How prefixes are known",
                "short",
                (Query(f"max by (namespace, pool, way, reason) ({_E}endpoints_routed{_POOLS})", "Endpoints"),),
                "`history` with a reason can become `events`: docs/engines.md says how.",
                kind="table",
            ),
        ),
        "Requests": (
            Panel(
                "Decisions", "reqps", (Query(rate(f"{_E}decisions_total", "endpoint"), "{{endpoint}}"),), stacked=True
            ),
            Panel(
                "Refused by the picker",
                "reqps",
                (Query(rate(f"{_E}refusals_total", "code"), "{{code}}"),),
                "Answered with an error instead of a destination.",
                stacked=True,
            ),
            Panel(
                "How routed requests ended",
                "reqps",
                (
                    Query(rate(f"{_E}outcomes_total", "outcome"), "{{outcome}}"),
                    Query(rate(f"{_E}served_by_other_total", "by"), "served by {{by}}"),
                ),
            ),
        ),
        "Latency": (
            heatmap(
                "Time to decide",
                "s",
                f"{_E}pick_seconds",
                "Parsing, matching and choosing: what the picker adds to a request, without the network.",
            ),
            Panel(
                "Time to first token",
                "s",
                quantiles(f"{_E}ttft_seconds"),
                "Streams of Treeline runtimes, from the pick.",
            ),
            Panel(
                "Real time to first token ÷ predicted, by form",
                "short",
                (Query(share(f"{_E}form_seconds_total", f"{_E}form_predicted_seconds_total", "form"), "{{form}}"),),
                "Above one the form takes longer than the picker expects. Streams of Treeline runtimes.",
            ),
            Panel(
                "Open streams",
                "short",
                (Query(f"sum({_E}extproc_streams{_HERE})", "ext_proc streams"),),
                "One for each request; where the proxy shows answers, until the end of that.",
            ),
        ),
        "Prefix cache": (
            Panel(
                "Hit rate",
                "percentunit",
                (
                    Query(share(f"{_E}reported_hit_tokens_total", f"{_E}reported_prompt_tokens_total"), "reported"),
                    Query(share(f"{_E}predicted_hit_tokens_total", f"{_E}reported_prompt_tokens_total"), "predicted"),
                    Query(
                        share(f"{_E}routed_held_tokens_total", f"{_E}routed_prompt_tokens_total"),
                        "cached at the chosen endpoint",
                    ),
                ),
                "Of prompt tokens. Predicted far above reported means that the index is ahead of the caches.",
            ),
            Panel(
                "Index",
                "short",
                (
                    Query(f"sum by (pod) ({_E}tree_blocks{_HERE})", "blocks {{pod}}"),
                    Query(f"sum by (pod) ({_E}tree_orphan_blocks{_HERE})", "blocks without parent {{pod}}"),
                ),
            ),
        ),
        "Endpoints": (
            Panel(
                "Endpoints by state",
                "short",
                (
                    Query(f"max by (state) ({_E}endpoints{_HERE})", "{{state}}"),
                    Query(f"max({_E}endpoints_failing{_HERE})", "left out for errors"),
                ),
            ),
            Panel(
                "Subscriptions to KV events",
                "short",
                (Query(f"max by (state) ({_E}kv_subscriptions{_HERE})", "{{state}}"),),
                "`live` and `checking` have applied all that is published.",
            ),
            Panel(
                "Load that cannot be read",
                "short",
                (Query(f"max by (reason) ({_E}scraped_endpoints_failing{_HERE})", "{{reason}}"),),
                "Endpoints that push none, by what is wrong with their metrics page.",
            ),
            Panel(
                "Age of the oldest load that was read",
                "s",
                (Query(f"max by (pod) ({_E}scrape_age_seconds{_HERE})", "{{pod}}"),),
                "A load is used for 3 s.",
            ),
        ),
        "KV events": (
            Panel(
                "Events and load reports",
                "ops",
                (
                    Query(rate(f"{_E}events_total"), "events"),
                    Query(rate(f"{_E}event_batches_total"), "batches"),
                    Query(rate(f"{_E}load_reports_total"), "load reports"),
                ),
            ),
            Panel(
                "Blocks that are not in the index",
                "ops",
                (Query(rate(f"{_E}blocks_skipped_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                "Trouble",
                "ops",
                (
                    Query(rate(f"{_E}rejected_total", "reason"), "refused: {{reason}}"),
                    Query(rate(f"{_E}kv_disconnects_total"), "disconnects"),
                    Query(rate(f"{_E}protocol_errors_total"), "ext_proc protocol errors"),
                    Query(rate(f"{_E}internal_errors_total"), "internal errors"),
                ),
            ),
        ),
        "Clients, Envoy and Kubernetes": (
            Panel(
                "Prompt tokens by client",
                "ops",
                (Query(f"topk(10, {rate(f'{_E}client_prompt_tokens_total', 'client')})", "{{client}}"),),
                "The first hundred clients have names of their own; the others are `other`.",
                stacked=True,
            ),
            Panel(
                "Envoys",
                "short",
                (
                    Query(f"sum({_E}eds_connected{_HERE})", "connected"),
                    Query(f"sum({_E}eds_pending{_HERE})", "have not acknowledged"),
                    Query(f"sum(increase({_E}eds_rejections_total{_HERE}[$__rate_interval]))", "rejections"),
                ),
            ),
            Panel(
                "Time since the API server was last heard",
                "s",
                (Query(f"max by (kind) ({_E}kube_watch_age_seconds{_HERE})", "{{kind}}"),),
            ),
        ),
    },
)
