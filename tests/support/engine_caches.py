"""Caches of vLLM and SGLang, in their own code, used as an engine does: `support.engine_wheels` loads them.

Both are asked alike: requests come (`serve`), room is made, all is dropped, and `batch` takes the events of a step in a
batch of the engine's own type. What the cache holds is read from the engine's own structures, never from its events.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

from treeline_wire.keys import PrefixKeys

from support.engine_wheels import load

_U64 = (1 << 64) - 1


class ThreeBytes:
    """Prefix keys of a vocabulary of 900 tokens with texts of three bytes, so that no two prompts have the same
    text."""

    token_bytes = tuple(b"%03d" % token for token in range(100, 1000))


KEYS = cast(PrefixKeys, ThreeBytes())


def key_of(tokens: Sequence[int]) -> bytes:
    return b"".join(ThreeBytes.token_bytes[token] for token in tokens)


class EngineCache(Protocol):
    """`width`: tokens of a block. Hashes are u64."""

    width: int
    events: Any

    def serve(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> None: ...

    def make_room(self, tokens: int) -> None: ...

    def drop_all(self) -> None: ...

    def batch(self) -> Any: ...

    def blocks(self) -> set[int]: ...

    def cached(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> int: ...


class SglangCache:
    """SGLang's RadixCache without memory pools. `pairs`: of tokens and their successors, as EAGLE needs them."""

    def __init__(self, version: str, width: int = 4, *, pairs: bool = False) -> None:
        modules = load("sglang", version)
        self.events = modules["srt/disaggregation/kv_events"]
        self.width = width
        self._base = modules["srt/mem_cache/base_prefix_cache"]
        self._radix = modules["srt/mem_cache/radix_cache"]
        freed = SimpleNamespace(device="cpu", free=lambda _: None, free_segment=lambda *_, **__: None)
        more: dict[str, Any] = {"page_size": width, "enable_kv_cache_events": True}
        self._lora_names: Any = None
        if hasattr(modules.get("srt/mem_cache/events"), "KvEventLoraNames"):
            self._lora_names = more["kv_event_lora_names"] = modules["srt/mem_cache/events"].KvEventLoraNames()
        if hasattr(self._radix.RadixCache, "create_simulated"):
            self._cache = self._radix.RadixCache.create_simulated(mock_allocator=freed, **more)
        else:
            self._cache = self._radix.RadixCache(None, freed, **more)
        self._cache.is_eagle = pairs

    def serve(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> None:
        key = self._key(tokens, salt, lora)
        if hasattr(self._base, "InsertParams"):
            self._cache.insert(self._base.InsertParams(key=key))
        else:
            self._cache.insert(key)

    def make_room(self, tokens: int) -> None:
        if hasattr(self._base, "EvictParams"):
            self._cache.evict(self._base.EvictParams(num_tokens=tokens))
        else:
            self._cache.evict(tokens)

    def drop_all(self) -> None:
        self._cache.reset()

    def batch(self) -> Any:
        return self.events.KVEventBatch(ts=1.5, events=self._cache.take_events())

    def blocks(self) -> set[int]:
        return {int(digest[:16], 16) for node in self._nodes() for digest in self._hashes(node)}

    def cached(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> int:
        key = self._key(tokens, salt, lora)
        if hasattr(self._base, "MatchPrefixParams"):
            found = self._cache.match_prefix(self._base.MatchPrefixParams(key=key))
        else:
            found = self._cache.match_prefix(key)
        indices = getattr(found, "device_indices", None)
        return int(found.device_prefix_len) if indices is None else len(indices)

    def _key(self, tokens: Sequence[int], salt: str | None, lora: str | None) -> Any:
        whole = list(tokens)
        if not getattr(self._cache, "is_eagle", False):
            whole = whole[: len(whole) // self.width * self.width]
        if "cache_salt" not in getattr(self._radix.RadixKey, "__slots__", ()):
            return self._radix.RadixKey(whole, (salt or "") + (lora or "") or None)
        if lora is not None:
            self._lora_names.register(SimpleNamespace(extra_key=lora, lora_id=lora), lora)
        return self._radix.RadixKey(array("q", whole), lora, cache_salt=salt)

    def _nodes(self) -> Iterator[Any]:
        waiting = list(self._cache.root_node.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    @staticmethod
    def _hashes(node: Any) -> list[str]:
        """Return the hashes of a node's pages, as events name them without an adapter."""
        if getattr(node.key, "cache_salt", None) is not None:
            return cast(list[str], node.event_hash_value)
        return cast(list[str], node.hash_value)


class SglangTree(SglangCache):
    """SGLang's UnifiedTreeCore, its default since it has replaced RadixCache (there in Rust, of which this is the other
    form), driven as UnifiedRadixCache drives it: one component for full attention, no tier below the device."""

    def __init__(self, version: str, width: int = 4) -> None:
        super().__init__(version, width)
        modules = load("sglang", version)
        unified = "srt/mem_cache/unified_cache"
        self._full = modules[f"{unified}/component_type"].ComponentType.FULL
        pools = {"req_to_token_pool": None, "token_to_kv_pool_allocator": None}
        params = modules["srt/mem_cache/cache_init_params"].CacheInitParams(
            disable=False, page_size=width, enable_kv_cache_events=True, kv_event_lora_names=self._lora_names, **pools
        )
        component = modules[f"{unified}/components/full"].FullComponent(
            SimpleNamespace(enable_session_radix_cache=False), params
        )
        self._cache = modules[f"{unified}/unified_tree_core"].UnifiedTreeCore(params, {self._full: component})

    def serve(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> None:
        step = self._cache.begin_insert(self._base.InsertParams(key=self._key(tokens, salt, lora)))
        while step.result is None:
            step = self._cache.resume_insert()
        self._cache.end_insert()

    def make_room(self, tokens: int) -> None:
        evicted = {self._full: 0}
        self._cache.evict_device_start(self._full, tokens)
        steps = [self._cache.evict_device_next_node(self._full, evicted)]
        while steps[-1].made_progress:
            if steps[-1].node_id is not None:
                steps.append(self._cache.evict_device_leaf(steps[-1].node_id, False))
            for step in steps:
                evicted[self._full] += step.tracker.get(self._full, 0)
                for kept in (step.device_frees, step.host_frees, step.cache_actions):
                    kept.clear()  # what its owner would free
            steps = [self._cache.evict_device_next_node(self._full, evicted)]
        self._cache.evict_device_end(self._full)

    def drop_all(self) -> None:
        self._cache.reset()
        self._cache.kv_events.record_all_cleared()

    def batch(self) -> Any:
        return self.events.KVEventBatch(ts=1.5, events=self._cache.kv_events.take())

    def cached(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> int:
        return int(self._cache.match_full_device_prefix(self._key(tokens, salt, lora))[0])


class VllmCache:
    """vLLM's BlockPool with requests that hold their blocks for a while, as its managers use it (full attention, one
    group): the last token of a prompt is always computed, so the last block of a prompt that ends with one is too, and
    is in the cache twice."""

    BLOCKS = 96
    AT_ONCE = 4

    def __init__(self, version: str, width: int = 4) -> None:
        modules = load("vllm", version)
        self.events = modules["distributed/kv_events"]
        self.width = width
        self._utils: Any = modules["v1/core/kv_cache_utils"]
        self._old = "utils/hashing" not in modules
        pool: Any = modules["v1/core/block_pool"].BlockPool
        if self._old:
            self._pool = pool(self.BLOCKS, True, True)
        else:
            sha256: Any = modules["utils/hashing"].sha256
            self._utils.init_none_hash(sha256)
            self._hasher = self._utils.get_request_block_hasher(width, sha256)
            self._pool = pool(self.BLOCKS, True, width, enable_kv_cache_events=True)
        self._running: deque[list[Any]] = deque()

    def serve(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> None:
        request = self._request(tokens, salt, lora)
        full = len(tokens) // self.width
        while len(self._running) >= self.AT_ONCE or (self._running and self._pool.get_num_free_blocks() < full):
            self._finish()
        hits = self._hits(request, (len(tokens) - 1) // self.width)
        if hits:
            self._touch(hits)
        blocks = [*hits, *self._pool.get_new_blocks(full - len(hits))]
        if self._old:
            self._pool.cache_full_blocks(request, blocks, request.block_hashes, len(hits), full, self.width, hash)
        else:
            self._pool.cache_full_blocks(request, blocks, len(hits), full, self.width, 0)
        self._running.append(blocks)

    def make_room(self, tokens: int) -> None:
        """Evict blocks by allocating them for other requests."""
        while self._running:
            self._finish()
        taken = self._pool.get_new_blocks(min(tokens // self.width, self._pool.get_num_free_blocks()))
        self._pool.free_blocks(reversed(taken))

    def drop_all(self) -> None:
        while self._running:
            self._finish()
        assert self._pool.reset_prefix_cache()

    def batch(self) -> Any:
        return self.events.KVEventBatch(ts=1.5, events=self._pool.take_events())

    def blocks(self) -> set[int]:
        found = self._pool.cached_block_hash_to_block
        if self._old:
            return {block.hash_value & _U64 for block in found}
        return {int.from_bytes(self._utils.get_block_hash(key)[-8:], "big") for key in found._cache}

    def cached(self, tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> int:
        return len(self._hits(self._request(tokens, salt, lora), len(tokens) // self.width)) * self.width

    def _request(self, tokens: Sequence[int], salt: str | None, lora: str | None) -> Any:
        adapter = lora and SimpleNamespace(
            lora_int_id=7, id=7, adapter_id=7, lora_name=lora, name=lora, lora_path="/adapters", path="/adapters"
        )
        request = SimpleNamespace(
            request_id="r", all_token_ids=list(tokens), num_tokens=len(tokens), block_hashes=[], mm_features=[],
            mm_positions=[], mm_hashes=[], lora_request=adapter, cache_salt=salt, prompt_embeds=None, session_id=None,
        )  # fmt: skip
        if self._old:
            request.block_hashes = self._utils.hash_request_tokens(hash, self.width, request)
        else:
            request.block_hashes = self._hasher(request)
        return request

    def _hits(self, request: Any, most: int) -> list[Any]:
        hits: list[Any] = []
        for value in request.block_hashes[:most]:
            block = self._pool.get_cached_block(value) if self._old else self._pool.get_cached_block(value, [0])
            if not block:
                break
            hits += [block] if self._old else block
        return hits

    def _touch(self, hits: list[Any]) -> None:
        self._pool.touch(hits)

    def _finish(self) -> None:
        self._pool.free_blocks(reversed(self._running.popleft()))


class Traffic:
    """Prompts that share beginnings, as conversations do: most continue an earlier one, cut off anywhere."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._prompts: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        rng = self.rng
        begin = rng.choice(self._prompts[-12:])
        whole = begin[: rng.randrange(len(begin) + 1)] if rng.random() < 0.5 else begin
        whole = [*whole[:60], *(rng.randrange(20) for _ in range(rng.randrange(1, 30)))]
        self._prompts.append(whole)
        return whole

    def step(self, cache: EngineCache) -> None:
        """Make one change of the cache between two batches: empty it, evict, or serve prompts."""
        what = self.rng.random()
        if what < 0.02:
            cache.drop_all()
        elif what < 0.2:
            cache.make_room(self.rng.randrange(4, 80))
        else:
            for _ in range(self.rng.randrange(1, 4)):
                cache.serve(self.prompt())


RELEASES: dict[str, Callable[[], EngineCache]] = {
    "vllm-0.9.0": lambda: VllmCache("0.9.0"),
    "vllm-0.23.0": lambda: VllmCache("0.23.0"),
    "vllm-0.33.0": lambda: VllmCache("0.33.0"),
    "sglang-0.5.7": lambda: SglangCache("0.5.7"),
    "sglang-0.5.19": lambda: SglangCache("0.5.19"),
    "sglang-0.5.23": lambda: SglangCache("0.5.23"),
}
"""The compared releases' caches, by engine and version."""
