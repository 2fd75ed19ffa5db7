"""Any other server with an OpenAI-compatible API, started as its user says."""

from __future__ import annotations

from collections.abc import Mapping

from treeline_operator.api.engine import EngineType
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import Files
from treeline_operator.plan.engines.base import Launch, probes
from treeline_operator.world import Images


class Custom:
    """See the module. Its flags are not known; it is told the model's place and name by its environment."""

    name: EngineType = "custom"
    hits_by_flag = False
    serves_tokenizer = False
    publishes = False
    untold: Mapping[str, str] = {}
    flags: Mapping[str, str] = {}

    def metrics_port(self, pool: InferencePool) -> int | None:
        """On its API's port, if anywhere."""
        return None

    def launch(self, pool: InferencePool, files: Files, images: Images) -> Launch:
        """How it is started."""
        spec = pool.spec
        tcp = {"tcpSocket": {"port": "http"}}
        return Launch(
            image=spec.engine.image or "",
            command=spec.engine.command,
            args=spec.engine.args,
            env=(
                ("TREELINE_MODEL", files.model),
                ("TREELINE_MODEL_NAME", spec.model.served_name),
                ("TREELINE_PORT", str(spec.engine.port)),
            ),
            ports=(("http", spec.engine.port),),
            probes=probes(pool, tcp, tcp, period=5),
            drains=False,
            shared_memory=spec.accelerator.is_gpu,
            fixed_user=False,
        )
