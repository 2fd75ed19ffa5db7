"""Owns the words of every status: condition types, and reasons with what each means and how it is fixed."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, NamedTuple

Status = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """The conditions of an InferencePool, and ``ACCEPTED`` of an InferenceModel."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    WORKLOADS_READY = "WorkloadsReady"
    MODEL_READY = "ModelReady"
    ENDPOINT_PICKER_READY = "EndpointPickerReady"
    GATEWAY_READY = "GatewayReady"
    ROUTE_ACCEPTED = "RouteAccepted"
    SCALING_ACTIVE = "ScalingActive"
    SECURITY_EXCEPTIONS = "SecurityExceptions"
    ACCEPTED = "Accepted"


class Reason(StrEnum):
    """Why a condition is as it is. Conditions, Events and metrics use the same words."""

    # The pool as a whole
    SERVING = "Serving"
    PENDING = "Pending"
    SPEC_NOT_UNDERSTOOD = "SpecNotUnderstood"
    RECONCILE_FAILED = "ReconcileFailed"
    DELETING = "Deleting"
    # Rollouts
    ROLLING_OUT = "RollingOut"
    ROLLOUT_COMPLETE = "RolloutComplete"
    ROLLOUT_STALLED = "RolloutStalled"
    PAUSED = "Paused"
    SCALING = "Scaling"
    DRAINING = "Draining"
    # Pods
    PODS_READY = "PodsReady"
    PODS_STARTING = "PodsStarting"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    IMAGE_PULL_FAILING = "ImagePullFailing"
    CRASH_LOOPING = "CrashLooping"
    OUT_OF_MEMORY = "OutOfMemory"
    PROBE_FAILING = "ProbeFailing"
    CONFIG_ERROR = "ConfigError"
    KEYS_PENDING = "KeysPending"
    KEY_SECRET_MISSING = "KeySecretMissing"
    VOLUME_NOT_READY = "VolumeNotReady"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_REJECTED = "PodRejected"
    TEMPLATE_INVALID = "TemplateInvalid"
    SCALED_TO_ZERO = "ScaledToZero"
    # The model
    MODEL_LOADED = "ModelLoaded"
    MODEL_LOADING = "ModelLoading"
    WEIGHTS_DOWNLOADING = "WeightsDownloading"
    WEIGHTS_MISSING = "WeightsMissing"
    DOWNLOAD_FAILED = "DownloadFailed"
    MODEL_TOO_LARGE = "ModelTooLarge"
    MODEL_NOT_SERVED = "ModelNotServed"
    # The picker
    PICKER_SYNCED = "PickerSynced"
    PICKER_NOT_READY = "PickerNotReady"
    PICKER_NOT_SYNCED = "PickerNotSynced"
    PICKER_UNREACHABLE = "PickerUnreachable"
    ENDPOINTS_MISSING = "EndpointsMissing"
    # The gateway
    GATEWAY_SERVING = "GatewayServing"
    GATEWAY_NOT_READY = "GatewayNotReady"
    GATEWAY_CONFLICT = "GatewayConflict"
    GATEWAY_API_MISSING = "GatewayApiMissing"
    INFERENCE_EXTENSION_MISSING = "InferenceExtensionMissing"
    ADDRESS_PENDING = "AddressPending"
    ROUTE_ACCEPTED = "RouteAccepted"
    ROUTE_PENDING = "RoutePending"
    ROUTE_NOT_ACCEPTED = "RouteNotAccepted"
    UNSUPPORTED_BY_PARENT = "UnsupportedByParent"
    # Scaling
    NOT_AUTOSCALED = "NotAutoscaled"
    AUTOSCALER_ACTIVE = "AutoscalerActive"
    AUTOSCALER_NOT_READY = "AutoscalerNotReady"
    KEDA_MISSING = "KedaMissing"
    METRICS_API_MISSING = "MetricsApiMissing"
    # Security
    POD_SECURITY_RESTRICTED = "PodSecurityRestricted"
    POD_SECURITY_EXCEPTION = "PodSecurityException"
    # InferenceModels
    ACCEPTED = "Accepted"
    POOL_NOT_FOUND = "PoolNotFound"
    MODEL_NAME_IN_USE = "ModelNameInUse"
    WEIGHTS_INVALID = "WeightsInvalid"
    # What the operator did (Events only)
    CREATED = "Created"
    APPLIED = "Applied"
    SCALED = "Scaled"
    DELETED = "Deleted"
    DRIFT_CORRECTED = "DriftCorrected"
    DRAIN_CANCELLED = "DrainCancelled"
    DRAIN_TIMEOUT = "DrainTimeout"

    @property
    def info(self) -> ReasonInfo:
        return INFO[self]

    @property
    def fix(self) -> str:
        """One line that says what to do; empty where nothing is to be done."""
        return INFO[self].fix


class ReasonInfo(NamedTuple):
    """What a reason means. ``good`` is False for what needs somebody, None for what passes or is neither."""

    good: bool | None
    summary: str
    fix: str = ""


_R = Reason
INFO: Final[dict[Reason, ReasonInfo]] = {
    _R.SERVING: ReasonInfo(
        True, "Pods of this generation serve, the picker has them, a request would succeed."
    ),
    _R.PENDING: ReasonInfo(
        None,
        "The operator has not seen enough yet to judge.",
        "Wait some seconds; if it stays, look at the operator's log.",
    ),
    _R.SPEC_NOT_UNDERSTOOD: ReasonInfo(
        False,
        "The stored spec does not fit this version of the operator.",
        "Upgrade the operator to the version of the CRDs, or set the named field to a value that this version knows.",
    ),
    _R.RECONCILE_FAILED: ReasonInfo(
        False,
        "The API server refuses what the operator writes (the message quotes it), or no plan could be made.",
        "Correct what the message names (a quota, a policy, a right); report a defect. It is tried again by itself.",
    ),
    _R.DELETING: ReasonInfo(
        None, "The object is being deleted.", "Wait for the pods to drain; drain.timeoutSeconds bounds it."
    ),
    _R.ROLLING_OUT: ReasonInfo(
        None, "Pods of a new revision replace the old ones.", "Wait; the old pods serve meanwhile."
    ),
    _R.ROLLOUT_COMPLETE: ReasonInfo(True, "All pods are of the current revision, and the picker has them."),
    _R.ROLLOUT_STALLED: ReasonInfo(
        False,
        "The new revision's pods do not become ready; the old ones serve on.",
        "Look at WorkloadsReady for the cause; going back to the former spec ends the rollout.",
    ),
    _R.PAUSED: ReasonInfo(None, "The rollout is paused.", "Set rollout.paused to false to go on."),
    _R.SCALING: ReasonInfo(None, "Pods are added or taken away.", "Wait; pods that go drain first."),
    _R.DRAINING: ReasonInfo(None, "Old pods finish their requests.", "Wait; drain.timeoutSeconds bounds it."),
    _R.PODS_READY: ReasonInfo(True, "All pods are ready."),
    _R.PODS_STARTING: ReasonInfo(None, "Pods start.", "Wait; `kubectl describe pod` shows how far they are."),
    _R.INSUFFICIENT_CAPACITY: ReasonInfo(
        False,
        "No node has room for a pod.",
        "Add nodes, lower replicas or engine.resources, or correct accelerator.class, count and tolerations.",
    ),
    _R.IMAGE_PULL_FAILING: ReasonInfo(
        False,
        "An image cannot be pulled.",
        "Correct the image's name, or give the pods a pull secret by template.spec.imagePullSecrets.",
    ),
    _R.CRASH_LOOPING: ReasonInfo(
        False,
        "A container ends again and again; the message has its last words.",
        "Act on the quoted last line, or see `kubectl logs --previous`.",
    ),
    _R.OUT_OF_MEMORY: ReasonInfo(
        False,
        "A container was killed for its memory.",
        "Raise the memory limit in engine.resources, or lower engine.contextLength, memoryFraction or maxTotalTokens.",
    ),
    _R.PROBE_FAILING: ReasonInfo(
        False,
        "A container runs but its probe fails.",
        "See the pod's log; set model.size if loading takes longer, engine.port if the server listens elsewhere.",
    ),
    _R.CONFIG_ERROR: ReasonInfo(
        False,
        "A container cannot be made from its configuration.",
        "Create the Secret or ConfigMap that the message names, or correct the reference to it.",
    ),
    _R.KEYS_PENDING: ReasonInfo(
        None,
        "The pods are made when the gateway has made the Secret with the keys of the cache events.",
        "Wait some seconds; if it stays, see GatewayReady and EndpointPickerReady.",
    ),
    _R.KEY_SECRET_MISSING: ReasonInfo(
        False,
        "The Secret with the keys of the cache events is gone.",
        "Wait: the operator makes a new one; then delete the pods that hold the old keys.",
    ),
    _R.VOLUME_NOT_READY: ReasonInfo(
        False,
        "A volume is not bound or cannot be mounted.",
        "Correct model.cache (claimName, storageClassName, accessModes) as the message says.",
    ),
    _R.QUOTA_EXCEEDED: ReasonInfo(
        False,
        "A quota of the namespace forbids more pods.",
        "Raise the ResourceQuota or lower replicas or resources.",
    ),
    _R.POD_REJECTED: ReasonInfo(
        False,
        "An admission policy refuses the pods.",
        "Remove from template what the message names, or run the pool in a namespace whose policy allows it.",
    ),
    _R.TEMPLATE_INVALID: ReasonInfo(
        False,
        "The pods rendered with spec.template are no valid pods.",
        "Correct the field of spec.template that the message names.",
    ),
    _R.SCALED_TO_ZERO: ReasonInfo(
        None,
        "The pool has no pods because none are asked for.",
        "Set replicas to 1 or more, or let an autoscaler do it.",
    ),
    _R.MODEL_LOADED: ReasonInfo(True, "The model is loaded."),
    _R.MODEL_LOADING: ReasonInfo(
        None, "The engine loads the model.", "Wait; set model.size if the start-up budget is too short."
    ),
    _R.WEIGHTS_DOWNLOADING: ReasonInfo(
        None,
        "The weights are being downloaded; status.download has the figures.",
        "Wait; with model.cache the next pods need not download again.",
    ),
    _R.WEIGHTS_MISSING: ReasonInfo(
        False,
        "There are no weights where model.uri points.",
        "Correct model.uri, or put the files (config.json, *.safetensors, tokenizer.json) there.",
    ),
    _R.DOWNLOAD_FAILED: ReasonInfo(
        False,
        "The download of the weights fails; the message says why.",
        "Correct model.uri or model.tokenSecretRef (gated models need a token), or allow egress to the source.",
    ),
    _R.MODEL_TOO_LARGE: ReasonInfo(
        False,
        "The model does not fit into the memory or the volume.",
        "Take a larger accelerator or more of them, more memory or cache.size, or a smaller model.",
    ),
    _R.MODEL_NOT_SERVED: ReasonInfo(
        False,
        "The pods answer to other model names than the pool's.",
        "Set model.name to a name that the engine serves, or tell the engine the name by engine.args.",
    ),
    _R.PICKER_SYNCED: ReasonInfo(True, "The picker is ready and lists the pool's pods."),
    _R.PICKER_NOT_READY: ReasonInfo(
        False,
        "No pod of the picker is ready.",
        "See its pods (`kubectl get pods -l treeline.dev/component=epp`); with FailOpen requests are served meanwhile.",
    ),
    _R.PICKER_NOT_SYNCED: ReasonInfo(
        None,
        "The picker has not read the cluster yet.",
        "Wait some seconds; if it stays, look at the picker's log.",
    ),
    _R.PICKER_UNREACHABLE: ReasonInfo(
        None,
        "The operator cannot ask the picker for its list.",
        "Allow the operator to reach port 9090 of the picker's pods (NetworkPolicy).",
    ),
    _R.ENDPOINTS_MISSING: ReasonInfo(
        None,
        "Ready pods are not in the picker's list yet.",
        "Wait some seconds; if it stays, look at the picker's log and its Role.",
    ),
    _R.GATEWAY_SERVING: ReasonInfo(True, "The gateway serves at status.url."),
    _R.GATEWAY_NOT_READY: ReasonInfo(
        False,
        "No Envoy of the gateway is ready.",
        "See its pods (`kubectl get pods -l treeline.dev/component=edge`).",
    ),
    _R.GATEWAY_CONFLICT: ReasonInfo(
        False,
        "Another, older pool of the same gateway asks for other settings; those hold.",
        "Make the named settings equal to the older pool's, or give this pool another gateway.name.",
    ),
    _R.GATEWAY_API_MISSING: ReasonInfo(
        False,
        "The cluster has no Gateway API.",
        "Install the Gateway API CRDs and a controller, or remove gateway.parentRefs.",
    ),
    _R.INFERENCE_EXTENSION_MISSING: ReasonInfo(
        False,
        "The cluster has no Gateway API Inference Extension.",
        "Install the InferencePool CRD of inference.networking.k8s.io/v1, or remove gateway.parentRefs.",
    ),
    _R.ADDRESS_PENDING: ReasonInfo(
        None,
        "The load balancer has no address yet.",
        "Wait; a cluster without load balancers needs gateway.standalone.serviceType ClusterIP or NodePort.",
    ),
    _R.ROUTE_ACCEPTED: ReasonInfo(True, "Every parent accepts the route."),
    _R.ROUTE_PENDING: ReasonInfo(
        None,
        "No controller has judged the route yet.",
        "Check that the parent Gateway exists and that its controller runs.",
    ),
    _R.ROUTE_NOT_ACCEPTED: ReasonInfo(
        False,
        "A parent refuses the route; the message quotes it.",
        "Let the Gateway's listener allow this namespace and these host names, or correct gateway.parentRefs.",
    ),
    _R.UNSUPPORTED_BY_PARENT: ReasonInfo(
        False,
        "The parent's controller does not support inference pools.",
        "Use a gateway that supports the Inference Extension, or remove gateway.parentRefs.",
    ),
    _R.NOT_AUTOSCALED: ReasonInfo(
        None,
        "Nobody but you sets spec.replicas.",
        "Nothing; with autoscaling.type HPA or KEDA an autoscaler does it.",
    ),
    _R.AUTOSCALER_ACTIVE: ReasonInfo(True, "The autoscaler sets spec.replicas."),
    _R.AUTOSCALER_NOT_READY: ReasonInfo(
        False,
        "The autoscaler cannot compute the replicas; the message quotes it.",
        "Correct the metric or trigger that the message names.",
    ),
    _R.KEDA_MISSING: ReasonInfo(
        False, "The cluster has no KEDA.", "Install KEDA, or set autoscaling.type to HPA or None."
    ),
    _R.METRICS_API_MISSING: ReasonInfo(
        False,
        "The API that the autoscaler's metrics come from is missing.",
        "Install metrics-server (resource metrics) or an adapter (custom and external metrics).",
    ),
    _R.POD_SECURITY_RESTRICTED: ReasonInfo(True, "The pods keep to Pod Security level restricted."),
    _R.POD_SECURITY_EXCEPTION: ReasonInfo(
        None,
        "spec.template asks for what Pod Security level restricted forbids.",
        "Remove the named fields from spec.template if they are not needed.",
    ),
    _R.ACCEPTED: ReasonInfo(True, "The name is served."),
    _R.POOL_NOT_FOUND: ReasonInfo(
        False,
        "poolRef or a fallback names a pool that does not exist.",
        "Create the InferencePool in this namespace, or correct poolRef.name.",
    ),
    _R.MODEL_NAME_IN_USE: ReasonInfo(
        False,
        "An older InferenceModel has the name.",
        "Choose another modelName, or delete the older one: this one is then promoted.",
    ),
    _R.WEIGHTS_INVALID: ReasonInfo(
        False,
        "The weights of targetModels are not usable.",
        "Give every target a weight of 1 or more, or none of them.",
    ),
    _R.CREATED: ReasonInfo(True, "The operator made an object."),
    _R.APPLIED: ReasonInfo(True, "The operator changed an object that it made."),
    _R.SCALED: ReasonInfo(True, "The operator changed the number of a revision's pods."),
    _R.DELETED: ReasonInfo(True, "The operator removed an object that is not needed any more."),
    _R.DRIFT_CORRECTED: ReasonInfo(
        None,
        "Somebody changed fields that the operator owns; they are as before again.",
        "Change the InferencePool instead; what may be changed on pods goes into spec.template.",
    ),
    _R.DRAIN_CANCELLED: ReasonInfo(
        None, "Pods that were to go stay after all.", "Nothing; they serve again."
    ),
    _R.DRAIN_TIMEOUT: ReasonInfo(
        False,
        "Pods are told to end with requests in flight; they have drain.timeoutSeconds once more to finish them.",
        "Raise drain.timeoutSeconds if requests may take longer.",
    ),
}

POLARITY: Final[dict[ConditionType, Status]] = {
    **dict.fromkeys(ConditionType, "True"),
    ConditionType.PROGRESSING: "False",
    ConditionType.SECURITY_EXCEPTIONS: "False",
}
"""The status that each condition has when all is well."""

SUMMARY: Final[dict[ConditionType, str]] = {
    ConditionType.READY: "A request to status.url would succeed, with pods of this generation.",
    ConditionType.PROGRESSING: "Something is under way: a rollout, a change of replicas, a drain.",
    ConditionType.WORKLOADS_READY: "The pods run and are ready.",
    ConditionType.MODEL_READY: "The weights are there and loaded.",
    ConditionType.ENDPOINT_PICKER_READY: "The picker is ready and lists the pool's pods.",
    ConditionType.GATEWAY_READY: "The gateway is ready; with Gateway API its parents know the route.",
    ConditionType.ROUTE_ACCEPTED: "Every parent accepts the route. Only with gateway.parentRefs.",
    ConditionType.SCALING_ACTIVE: "An autoscaler sets the replicas.",
    ConditionType.SECURITY_EXCEPTIONS: "The pods go beyond Pod Security level restricted.",
    ConditionType.ACCEPTED: "The InferenceModel's name is served.",
}
