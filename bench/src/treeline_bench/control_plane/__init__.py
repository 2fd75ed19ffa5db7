"""A real Kubernetes control plane for benchmarks and tests: etcd, kube-apiserver, controller manager.

Without scheduler and kubelet: pods exist and never run.
"""

from treeline_bench.control_plane.flags import CONTROLLERS
from treeline_bench.control_plane.plane import ControlPlane, ControlPlaneFailed
from treeline_bench.control_plane.programs import BUILD, Missing, programs

__all__ = ["BUILD", "CONTROLLERS", "ControlPlane", "ControlPlaneFailed", "Missing", "programs"]
