"""Small checkpoints made by transformers, and one sequence through our model, for comparing logits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from treeline_runtime.attention import ATTENTION_BACKENDS, Layout
from treeline_runtime.config import EngineConfig
from treeline_runtime.context import Context
from treeline_runtime.kvcache import KVPool
from treeline_runtime.models.adapters import Adapter
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import load_model
from treeline_runtime.models.lora import AdapterPool

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def reference(family: str, changes: dict[str, Any], kind: str = "ForCausalLM") -> Any:
    import transformers

    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    # a gap of the embedding's padding row is no part of the comparison
    config = config_class(**(SIZES | {"pad_token_id": None} | changes))
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # initialised to constants: a mistake there would not show
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save(model: Any, path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path, **options)
    return path


class Runner:
    """Feeds one sequence in pieces through model, pool and attention. Returns the logits of every new position."""

    def __init__(
        self, model: Decoder, stored: torch.dtype | None = None, adapter: Adapter | None = None, slots: int = 3
    ) -> None:
        shape = model.own
        self.adapters: AdapterPool | None = None
        self.slot = slots - 1
        if adapter is not None:
            self.adapters = AdapterPool(model.sites, slots, 64, model.rope[0].dtype, torch.device("cpu"))
            self.adapters.write(self.slot, adapter)
        self.model = model
        self.page_size = 4
        pool = KVPool(
            num_layers=shape.num_layers,
            num_pages=64,
            page_size=4,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=model.rope[0].dtype,
            device=torch.device("cpu"),
            stored=stored,
            scales=model.kv_scales,
        )
        self.attention = ATTENTION_BACKENDS.get("torch_sdpa")(pool, shape.num_heads, shape.scoring)
        self.pages = torch.randperm(64, generator=torch.Generator().manual_seed(1))
        self.length = 0

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> torch.Tensor:
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        slots = self.pages[positions // self.page_size] * self.page_size + positions % self.page_size
        row = torch.zeros(1, dtype=torch.int64)
        layout = Layout([len(ids)], [self.length], self.pages[None], row, spans=self.spans(positions))
        cos, sin = (table[:, positions].unsqueeze(2) for table in self.model.rope)
        plan = self.attention.plan(layout)
        adapters = None if self.adapters is None else self.adapters.step([self.slot], [len(ids)])
        context = Context(self.attention, plan, slots, cos, sin, adapters=adapters)
        return self.model.logits(self.model.forward(self.embed(ids, positions, context), context))

    def spans(self, positions: torch.Tensor) -> list[tuple[int, int]]:
        return []

    def embed(self, ids: list[int], positions: torch.Tensor, context: Context) -> torch.Tensor:
        return self.model.embed(torch.tensor(ids))


def ours(path: Path, **config: Any) -> Decoder:
    return load_model(EngineConfig(model=str(path), device="cpu", **config))


IDS = torch.randint(0, 128, (50,), generator=torch.Generator().manual_seed(2)).tolist()


def edit(path: Path, **changes: Any) -> Path:
    """Change keys of config.json; ... removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def config_of(path: Path, family: str, **changes: Any) -> Path:
    """Write the default configuration of a family, as transformers does, with keys changed; ... removes one."""
    import transformers

    path.mkdir(exist_ok=True)
    config = getattr(transformers, f"{family}Config")().to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    return edit(path, **changes)


def theirs_of(path: Path, ids: list[int] = IDS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return transformers' logits, from the same files."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def logits_of(theirs: Any) -> torch.Tensor:
    """Return transformers' logits of `IDS`: (tokens, vocabulary)."""
    with torch.inference_mode():
        logits: torch.Tensor = theirs(torch.tensor([IDS])).logits[0]
    assert logits.std() > 0.1
    return logits


def fed_in_pieces(model: Decoder, adapter: Adapter | None = None) -> torch.Tensor:
    """Return our model's logits of `IDS`: prompts behind a cached prefix, then one token at a time."""
    runner = Runner(model, adapter=adapter)
    pieces = [runner.feed(IDS[:16]), runner.feed(IDS[16:17]), runner.feed(IDS[17:40])]
    return torch.cat([*pieces, *(runner.feed([token]) for token in IDS[40:])])
