"""The words of every status: condition types, and reasons with their meaning and fix."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, Self

Status = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """The conditions of an InferencePool; `ACCEPTED` and `ADAPTER_LOADED` of an InferenceModel."""

    polarity: Status
    """The healthy status."""
    summary: str

    def __new__(cls, value: str, polarity: Status = "True", summary: str = "") -> Self:
        kind = str.__new__(cls, value)
        kind._value_, kind.polarity, kind.summary = value, polarity, summary
        return kind

    READY = (
        "Ready",
        "True",
        "A request for the model to status.url succeeds, also while pods are added or replaced.",
    )
    PROGRESSING = "Progressing", "False", "A rollout, a change of replicas or a drain is in progress."
    WORKLOADS_READY = "WorkloadsReady", "True", "All wanted pods run the current spec and are ready."
    MODEL_READY = "ModelReady", "True", "The weights are loaded."
    ENDPOINT_PICKER_READY = "EndpointPickerReady", "True", "The picker is ready and lists the pool's pods."
    GATEWAY_READY = (
        "GatewayReady",
        "True",
        "The gateway is ready; with Gateway API its parents have the route.",
    )
    ROUTE_ACCEPTED = "RouteAccepted", "True", "Every parent accepts the route. Only with gateway.parentRefs."
    SCALING_ACTIVE = "ScalingActive", "True", "The operator sets the replicas by the demand that the pickers report."
    CACHES_TRUSTED = (
        "CachesTrusted",
        "True",
        "No pod has switched a cache off because an audit found wrong pages there. Only with engine treeline.",
    )
    WARNINGS = "Warnings", "False", "Part of the spec has no effect or will not work."
    ACCEPTED = "Accepted", "True", "The InferenceModel's name is served."
    ADAPTER_LOADED = (
        "AdapterLoaded",
        "True",
        "The wanted pods have the InferenceModel's adapter. Only with spec.adapter.",
    )


class ReasonInfo(NamedTuple):
    """The meaning of a reason. `good` is False if somebody must act, None for transient or neutral states.

    `patience_s` is how long it may last in a normal start or change; a Warning follows when it lasts longer.
    """

    good: bool | None
    summary: str
    fix: str = ""
    """The remedy, in one line; empty if nobody has to act."""
    patience_s: int = 0


def _well(value: str, summary: str) -> tuple[str, ReasonInfo]:
    return value, ReasonInfo(True, summary)


def _passes(value: str, summary: str, fix: str) -> tuple[str, ReasonInfo]:
    return value, ReasonInfo(None, summary, fix)


def _needs_you(value: str, summary: str, fix: str, *, patience_s: int = 0) -> tuple[str, ReasonInfo]:
    return value, ReasonInfo(False, summary, fix, patience_s)


class Reason(StrEnum):
    """Why a condition is as it is. Conditions, Events and metrics use the same words."""

    info: ReasonInfo

    def __new__(cls, value: str, info: ReasonInfo = ReasonInfo(None, "")) -> Self:  # noqa: B008
        reason = str.__new__(cls, value)
        reason._value_, reason.info = value, info
        return reason

    @property
    def fix(self) -> str:
        return self.info.fix

    # The pool as a whole
    SERVING = _well("Serving", "Pods serve the model and the picker lists them.")
    PENDING = _passes(
        "Pending",
        "The operator is still reading the cluster.",
        "Wait some seconds; if it lasts, see the operator's log.",
    )
    SPEC_NOT_UNDERSTOOD = _needs_you(
        "SpecNotUnderstood",
        "This version of the operator cannot read the stored spec.",
        "Upgrade the operator to the version of the CRDs, or correct the named field.",
    )
    PRESET_MISSING = _needs_you(
        "PresetMissing",
        "No such preset; running pods stay unchanged.",
        "Correct spec.preset, or add the preset to the chart's values.",
    )
    PRESET_CONFLICT = _needs_you(
        "PresetConflict",
        "Spec and preset together are invalid; running pods stay unchanged.",
        "Correct the named fields in the preset or in the spec.",
    )
    RECONCILE_FAILED = _needs_you(
        "ReconcileFailed",
        "The API server refuses a write, or planning failed.",
        "Correct what the message names (a quota, a policy, a right), or report a bug. The operator retries.",
        patience_s=10,
    )
    DELETING = _passes(
        "Deleting",
        "The object is being deleted.",
        "Wait for the pods to drain, at most drain.timeoutSeconds.",
    )
    # Rollouts
    ROLLING_OUT = _passes(
        "RollingOut", "Pods of a new revision replace the old ones.", "Wait; the old pods serve meanwhile."
    )
    ROLLOUT_COMPLETE = _well("RolloutComplete", "All pods have the current revision and are in the picker's list.")
    ROLLOUT_STALLED = _needs_you(
        "RolloutStalled",
        "New pods do not become ready; the old ones keep serving.",
        "See WorkloadsReady for the cause, or restore the previous spec.",
    )
    PAUSED = _passes("Paused", "The rollout is paused.", "Set rollout.paused to false to continue.")
    SCALING = _passes("Scaling", "Pods are being added or removed.", "Wait; pods drain before they are removed.")
    DRAINING = _passes("Draining", "Old pods finish their requests.", "Wait, at most drain.timeoutSeconds.")
    # Pods
    PODS_READY = _well("PodsReady", "All pods are ready.")
    PODS_STARTING = _passes("PodsStarting", "Pods are starting.", "Wait; `kubectl describe pod` shows the progress.")
    INSUFFICIENT_CAPACITY = _needs_you(
        "InsufficientCapacity",
        "No node has room for a pod.",
        "Add nodes, lower replicas or engine.resources, or correct accelerator.class, count and tolerations. A "
        "rollout waits rollout.surgeTimeoutSeconds, then replaces pods one by one if they fit; "
        "rollout.maxUnavailable 1 or strategy Replace makes room at once.",
        patience_s=60,
    )
    NODES_TOO_SMALL = _needs_you(
        "NodesTooSmall",
        "Not even an empty eligible node has room for the pod.",
        "Lower accelerator.count, engine.tensorParallel or engine.resources; add larger nodes; or correct "
        "accelerator.class, nodeSelector and tolerations. With a node autoscaler, wait.",
        patience_s=60,
    )
    DEVICES_MISSING = _needs_you(
        "DevicesMissing",
        "No eligible node offers the requested device.",
        "Install the vendor's device plugin or GPU operator, or correct accelerator.type, resourceName, class"
        " and tolerations. With a node autoscaler, wait.",
        patience_s=60,
    )
    IMAGE_PULL_FAILING = _needs_you(
        "ImagePullFailing",
        "An image cannot be pulled.",
        "Correct the image name, or set a pull secret in template.spec.imagePullSecrets.",
        patience_s=15,
    )
    CRASH_LOOPING = _needs_you(
        "CrashLooping",
        "A container exits repeatedly; the message quotes its last line.",
        "Act on the quoted line, or see `kubectl logs --previous`.",
    )
    OUT_OF_MEMORY = _needs_you(
        "OutOfMemory",
        "A container exceeded its memory limit.",
        "Raise the memory limit in engine.resources, or lower engine.contextLength, memoryFraction or maxTotalTokens.",
    )
    PROBE_FAILING = _needs_you(
        "ProbeFailing",
        "A container runs but its probe fails.",
        "See the pod's log; set engine.port if the server listens elsewhere. A start may take 30 minutes, or 20 s "
        "per GiB of model.size if longer; change it in template.spec.containers[runtime].startupProbe.",
        patience_s=60,
    )
    CONFIG_ERROR = _needs_you(
        "ConfigError",
        "A container cannot be created from its configuration.",
        "Create the Secret or ConfigMap that the message names, or correct the reference.",
        patience_s=15,
    )
    KEYS_PENDING = _passes(
        "KeysPending",
        "Pods wait for the Secret with the keys of KV events.",
        "Wait some seconds; if it lasts, see GatewayReady and EndpointPickerReady.",
    )
    LEADER_WORKER_SET_MISSING = _needs_you(
        "LeaderWorkerSetMissing",
        "The cluster has no LeaderWorkerSet, the operator may not read it, or its controller does not run: replicas of "
        "several pods need it.",
        "Install LeaderWorkerSet (sigs.k8s.io/lws) and see that its controller runs, grant the rights of the chart, or "
        "set accelerator.nodes to 1.",
        patience_s=60,
    )
    KEY_SECRET_MISSING = _needs_you(
        "KeySecretMissing",
        "The Secret with the keys of KV events was deleted.",
        "Wait for the new one, then delete the pods that hold the old keys.",
        patience_s=30,
    )
    VOLUME_NOT_READY = _needs_you(
        "VolumeNotReady",
        "A volume is not bound or cannot be mounted.",
        "Correct model.cache or engine.cache as the message says.",
        patience_s=60,
    )
    QUOTA_EXCEEDED = _needs_you(
        "QuotaExceeded",
        "A quota does not allow more pods.",
        "Raise the ResourceQuota or lower replicas or resources.",
    )
    POD_REJECTED = _needs_you(
        "PodRejected",
        "An admission policy rejects the pods.",
        "Remove what the message names from template, or use a namespace whose policy allows it.",
    )
    TEMPLATE_INVALID = _needs_you(
        "TemplateInvalid",
        "A template of the pool or of the chart makes invalid pods.",
        "Correct the field that the message names.",
    )
    SCALED_TO_ZERO = _passes(
        "ScaledToZero",
        "replicas is 0.",
        "Set replicas to 1 or more, or let an autoscaler do it.",
    )
    # The model
    MODEL_LOADED = _well("ModelLoaded", "The model is loaded.")
    MODEL_LOADING = _passes(
        "ModelLoading",
        "The engine loads the model.",
        "Wait, up to 30 minutes, or 20 s per GiB of model.size if longer; change it in "
        "template.spec.containers[runtime].startupProbe. engine.cache saves compiling in later pods.",
    )
    WEIGHTS_DOWNLOADING = _passes(
        "WeightsDownloading",
        "The weights are being downloaded.",
        "Wait; with model.cache later pods need not download.",
    )
    WEIGHTS_MISSING = _needs_you(
        "WeightsMissing",
        "There are no weights at model.uri.",
        "Correct model.uri, or put the files (config.json, *.safetensors, tokenizer.json) there.",
    )
    DOWNLOAD_FAILED = _needs_you(
        "DownloadFailed",
        "The download fails.",
        "Correct model.uri, model.tokenSecretRef (gated models) or model.credentialsSecretRef, or allow egress to "
        "the source.",
    )
    MODEL_TOO_LARGE = _needs_you(
        "ModelTooLarge",
        "The model does not fit into memory or volume.",
        "Use more or larger accelerators, more memory or cache.size, or a smaller model.",
    )
    MODEL_NOT_SERVED = _needs_you(
        "ModelNotServed",
        "The pods serve other model names.",
        "Set model.name to a name that the engine serves; for engine custom set the name in engine.args.",
        patience_s=15,
    )
    # The picker
    PICKER_SYNCED = _well("PickerSynced", "The picker is ready and lists the pool's pods.")
    PICKER_NOT_READY = _needs_you(
        "PickerNotReady",
        "No pod of the picker is ready.",
        "See its pods (`kubectl get pods -l treeline.dev/component=epp`); with FailOpen requests are served meanwhile.",
        patience_s=60,
    )
    PICKER_NOT_SYNCED = _passes(
        "PickerNotSynced",
        "The picker has not read the cluster yet.",
        "Wait some seconds; if it lasts, see the picker's log.",
    )
    PICKER_UNREACHABLE = _passes(
        "PickerUnreachable",
        "The operator cannot reach the picker.",
        "Allow the operator to reach port 9004 of the picker's pods (NetworkPolicy).",
    )
    ENDPOINTS_MISSING = _passes(
        "EndpointsMissing",
        "Ready pods are not in the picker's list yet.",
        "Wait some seconds; if it lasts, see the picker's log and its Role.",
    )
    # The gateway
    GATEWAY_SERVING = _well("GatewayServing", "The gateway serves at status.url.")
    GATEWAY_NOT_READY = _needs_you(
        "GatewayNotReady",
        "No Envoy of the gateway is ready.",
        "See its pods (`kubectl get pods -l treeline.dev/component=edge`).",
        patience_s=60,
    )
    GATEWAY_CONFLICT = _needs_you(
        "GatewayConflict",
        "Other pools of the gateway set other values: the oldest pool's settings and the strictest protections hold.",
        "Make the named settings equal to the other pool's, or use another gateway.name.",
    )
    PROTECTION_RETAINED = _needs_you(
        "ProtectionRetained",
        "The gateway keeps protections of a deleted pool.",
        "Set them in a pool of the gateway to keep them, or list them in gateway.unprotected to drop them.",
    )
    GATEWAY_OPEN = _needs_you(
        "GatewayOpen",
        "The load balancer serves everybody, or without encryption.",
        "Set gateway.standalone.apiKeysSecretRef and tls, or use serviceType ClusterIP behind your own proxy.",
    )
    FAIL_CLOSE_FORCED = _passes(
        "FailCloseForced",
        "Despite FailOpen requests are refused while there is no picker: only the picker isolates clients of this "
        "engine.",
        "Set endpointPicker.failureMode to FailClose, or gateway.isolation to Shared.",
    )
    GATEWAY_API_MISSING = _needs_you(
        "GatewayApiMissing",
        "The cluster has no Gateway API, or the operator may not read it.",
        "Install the Gateway API CRDs and a controller, grant the rights of the chart, or remove gateway.parentRefs.",
        patience_s=60,
    )
    INFERENCE_EXTENSION_MISSING = _needs_you(
        "InferenceExtensionMissing",
        "The cluster has no Gateway API Inference Extension, or the operator may not read it.",
        "Install the InferencePool CRD of inference.networking.k8s.io/v1, grant the rights of the chart, or remove "
        "gateway.parentRefs.",
        patience_s=60,
    )
    ADDRESS_PENDING = _passes(
        "AddressPending",
        "The load balancer has no address yet.",
        "Wait; without load balancers in the cluster set gateway.standalone.serviceType to ClusterIP or NodePort.",
    )
    ROUTE_ACCEPTED = _well("RouteAccepted", "Every parent accepts the route.")
    ROUTE_PENDING = _passes(
        "RoutePending",
        "No controller has processed the route yet.",
        "Check that the parent Gateway exists and its controller runs.",
    )
    ROUTE_NOT_ACCEPTED = _needs_you(
        "RouteNotAccepted",
        "A parent rejects the route; the message quotes it.",
        "Allow this namespace and these host names in the Gateway's listener, or correct gateway.parentRefs.",
        patience_s=30,
    )
    UNSUPPORTED_BY_PARENT = _needs_you(
        "UnsupportedByParent",
        "The parent's controller does not support inference pools.",
        "Use a gateway that supports the Inference Extension, or remove gateway.parentRefs.",
        patience_s=30,
    )
    GATEWAY_NOT_PROGRAMMED = _needs_you(
        "GatewayNotProgrammed",
        "A Gateway of gateway.parentRefs has no working data plane; the message quotes it.",
        "See `kubectl describe gateway` for what is missing (an address, a certificate, a port).",
        patience_s=120,
    )
    # Scaling
    AUTOSCALER_ACTIVE = _well(
        "AutoscalerActive", "The operator sets spec.replicas by the demand that the pickers report."
    )
    SCALED_BY_ANOTHER = _needs_you(
        "ScaledByAnother",
        "Another autoscaler sets spec.replicas, so the operator does not.",
        "Delete that autoscaler, or set autoscaling.type to None.",
        patience_s=60,
    )
    SIGNALS_MISSING = _passes(
        "SignalsMissing",
        "No picker reports its demand; the replicas stay unchanged.",
        "See EndpointPickerReady.",
    )
    # Audits
    CACHES_IN_USE = _well("CachesInUse", "The pods use all their caches.")
    CACHE_WRONG = _needs_you(
        "CacheWrong",
        "An audit found wrong pages in a pod's cache, which the pod does not use any more: its answers are right, and "
        "slower.",
        "Keep the pod's log and delete the pod: the next one uses its caches. If the alarm comes back, report the bug; "
        "if on one node only, drain that.",
    )
    # Warnings
    CLAIM_NOT_SHAREABLE = _needs_you(
        "ClaimNotShareable",
        "Pods on several nodes share a claim that only one node can mount.",
        "Set accessModes of the named cache to [ReadWriteMany] with a storage class that supports it, or keep one "
        "replica.",
    )
    DEVICES_UNUSED = _needs_you(
        "DevicesUnused",
        "Pods request more devices than the engine uses.",
        "Remove engine.tensorParallel (it follows accelerator.count), or lower accelerator.count.",
    )
    VERSIONS_DIFFER = _needs_you(
        "VersionsDiffer",
        "Pods have different commits of the model, whose branch moved.",
        "Delete the named pods: their successors use the pool's commit; or pin one (hf://org/name@COMMIT).",
    )
    ROUTED_BY_HISTORY = _needs_you(
        "RoutedByHistory",
        "The picker cannot use the pods' KV events, usually because it has no tokenizer.",
        "Set model.tokenizer to an hf:// uri with the model's tokenizer, or model.pickerReadsClaim for a pvc:// "
        "model on a claim that several nodes can mount; docs/engines.md has other causes.",
        patience_s=120,
    )
    ARGS_UNTOLD = _needs_you(
        "ArgsUntold",
        "engine.args contain settings that the picker does not see.",
        "Remove them from engine.args and use the fields that the message names.",
    )
    ARGS_OVERRIDE = _needs_you(
        "ArgsOverride",
        "A setting is both in a field and in engine.args; the arguments win.",
        "Remove the named flags from engine.args, or the fields.",
    )
    TEMPLATE_OVERRULED = _needs_you(
        "TemplateOverruled",
        "spec.template sets labels, ports, or a drain time that is too short.",
        "Remove the named fields from spec.template; drain.timeoutSeconds and engine.port set these.",
    )
    # InferenceModels
    ACCEPTED = _well("Accepted", "The name is served.")
    POOL_NOT_FOUND = _needs_you(
        "PoolNotFound",
        "poolRef or a fallback names no existing pool.",
        "Create the InferencePool in this namespace, or correct poolRef.name.",
        patience_s=15,
    )
    MODEL_NAME_IN_USE = _needs_you(
        "ModelNameInUse",
        "An older pool or InferenceModel has the name.",
        "Choose another modelName (for a pool: model.name), or delete the older object.",
    )
    WEIGHTS_INVALID = _needs_you(
        "WeightsInvalid",
        "The weights of targetModels are invalid.",
        "Give every target a weight of 1 or more, or give none.",
    )
    ADAPTER_LOADED = _well("AdapterLoaded", "The wanted pods have loaded the adapter.")
    ADAPTER_LOADING = _passes(
        "AdapterLoading",
        "Pods load the adapter; an earlier version serves meanwhile.",
        "Wait; a pod that stays silent says more in `kubectl logs POD -c adapters`.",
    )
    ADAPTER_FAILING = _needs_you(
        "AdapterFailing",
        "Pods cannot load the adapter; an earlier version serves meanwhile. It is tried again.",
        "Correct spec.adapter, the files, or the credentials in engine.lora of the pool, as the message says.",
        patience_s=15,
    )
    ADAPTER_REFUSED = _needs_you(
        "AdapterRefused",
        "The pool cannot load the adapter.",
        "Correct poolRef, or engine.lora of the pool as the message says.",
        patience_s=15,
    )
    # Actions of the operator (Events only)
    CREATED = _well("Created", "The operator created an object.")
    APPLIED = _well("Applied", "The operator changed an object of its own.")
    AUTOSCALED = _well("Autoscaled", "The operator set spec.replicas by the demand that the pickers report.")
    SCALED = _well("Scaled", "The operator changed the number of pods of a revision.")
    DELETED = _well("Deleted", "The operator deleted an object that is no longer needed.")
    DRIFT_CORRECTED = _passes(
        "DriftCorrected",
        "The operator reverted a manual change to fields that it owns.",
        "Change the InferencePool; use spec.template for changes to pods.",
    )
    DRAIN_CANCELLED = _passes("DrainCancelled", "Pods that were draining are kept.", "Nothing; they serve again.")
    DRAIN_TIMEOUT = _needs_you(
        "DrainTimeout",
        "Pods still have requests after drain.timeoutSeconds; they get that time once more.",
        "Raise drain.timeoutSeconds if requests take longer.",
    )
