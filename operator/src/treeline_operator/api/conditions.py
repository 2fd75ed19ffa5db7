"""Owns the words of every status: condition types, and reasons with what each means and how it is fixed."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, Self

Status = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """The conditions of an InferencePool, and `ACCEPTED` of an InferenceModel."""

    polarity: Status
    """The status that it has when all is well."""
    summary: str

    def __new__(cls, value: str, polarity: Status = "True", summary: str = "") -> Self:
        kind = str.__new__(cls, value)
        kind._value_, kind.polarity, kind.summary = value, polarity, summary
        return kind

    READY = (
        "Ready",
        "True",
        "A request for the model to status.url would succeed, also while pods are added or replaced.",
    )
    PROGRESSING = "Progressing", "False", "Something is under way: a rollout, a change of replicas, a drain."
    WORKLOADS_READY = "WorkloadsReady", "True", "All pods that are wanted run as the spec says and are ready."
    MODEL_READY = "ModelReady", "True", "The weights are there and loaded."
    ENDPOINT_PICKER_READY = "EndpointPickerReady", "True", "The picker is ready and lists the pool's pods."
    GATEWAY_READY = (
        "GatewayReady",
        "True",
        "The gateway is ready; with Gateway API its parents know the route.",
    )
    ROUTE_ACCEPTED = "RouteAccepted", "True", "Every parent accepts the route. Only with gateway.parentRefs."
    SCALING_ACTIVE = "ScalingActive", "True", "The operator sets the replicas by what the pickers tell."
    WARNINGS = "Warnings", "False", "Something that the spec asks for will not be had so."
    ACCEPTED = "Accepted", "True", "The InferenceModel's name is served."


class ReasonInfo(NamedTuple):
    """What a reason means. `good` is False for what needs somebody, None for what passes or is neither.

    `patience_s` is how long it may be so in a normal start or change; a Warning is told of what lasts longer.
    """

    good: bool | None
    summary: str
    fix: str = ""
    """One line that says what to do; empty where nothing is to be done."""
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
    SERVING = _well("Serving", "Pods serve the model, the picker has them, a request would succeed.")
    PENDING = _passes(
        "Pending",
        "The operator has not seen enough yet to judge.",
        "Wait some seconds; if it stays, look at the operator's log.",
    )
    SPEC_NOT_UNDERSTOOD = _needs_you(
        "SpecNotUnderstood",
        "The stored spec does not fit this version of the operator.",
        "Upgrade the operator to the version of the CRDs, or set the named field to a value that this version knows.",
    )
    PRESET_MISSING = _needs_you(
        "PresetMissing",
        "The spec names a preset that the operator does not have; the pods stay as they are.",
        "Correct spec.preset, or add the preset to the values of the chart (`presets`).",
    )
    PRESET_CONFLICT = _needs_you(
        "PresetConflict",
        "The spec and the preset that it names make no pool together; the pods stay as they are.",
        "Correct the preset in the values of the chart, or the fields of the spec that the message names.",
    )
    RECONCILE_FAILED = _needs_you(
        "ReconcileFailed",
        "The API server refuses what the operator writes (the message quotes it), or no plan could be made.",
        "Correct what the message names (a quota, a policy, a right); report a defect. It is tried again by itself.",
        patience_s=10,
    )
    DELETING = _passes(
        "Deleting",
        "The object is being deleted.",
        "Wait for the pods to drain; drain.timeoutSeconds bounds it.",
    )
    # Rollouts
    ROLLING_OUT = _passes(
        "RollingOut", "Pods of a new revision replace the old ones.", "Wait; the old pods serve meanwhile."
    )
    ROLLOUT_COMPLETE = _well("RolloutComplete", "All pods are of the current revision, and the picker has them.")
    ROLLOUT_STALLED = _needs_you(
        "RolloutStalled",
        "The new revision's pods do not become ready; the old ones serve on.",
        "Look at WorkloadsReady for the cause; going back to the former spec ends the rollout.",
    )
    PAUSED = _passes("Paused", "The rollout is paused.", "Set rollout.paused to false to go on.")
    SCALING = _passes("Scaling", "Pods are added or taken away.", "Wait; pods that go drain first.")
    DRAINING = _passes("Draining", "Old pods finish their requests.", "Wait; drain.timeoutSeconds bounds it.")
    # Pods
    PODS_READY = _well("PodsReady", "All pods are ready.")
    PODS_STARTING = _passes("PodsStarting", "Pods start.", "Wait; `kubectl describe pod` shows how far they are.")
    INSUFFICIENT_CAPACITY = _needs_you(
        "InsufficientCapacity",
        "No node has room for a pod.",
        "Add nodes, lower replicas or engine.resources, or correct accelerator.class, count and "
        "tolerations in template. "
        "A rollout that finds no room replaces pods one by one after rollout.surgeTimeoutSeconds where the "
        "new ones fit in the place of the old; rollout.maxUnavailable 1 or more, or strategy Replace, makes "
        "room at once; the former spec ends the rollout.",
        patience_s=60,
    )
    NODES_TOO_SMALL = _needs_you(
        "NodesTooSmall",
        "No node that a pod may run on is as large as the pod, even when it is empty. A pod is on one node: tensor "
        "parallelism over more devices than a node has is not served.",
        "Lower accelerator.count and engine.tensorParallel to what a node has, or engine.resources; or add larger "
        "nodes, or correct accelerator.class, nodeSelector and tolerations. Wait where an autoscaler adds such nodes.",
        patience_s=60,
    )
    DEVICES_MISSING = _needs_you(
        "DevicesMissing",
        "No node that a pod may run on offers the device that it asks for.",
        "Install the vendor's device plugin or GPU operator, or correct accelerator.type, resourceName, class and "
        "tolerations. Wait where an autoscaler adds such nodes.",
        patience_s=60,
    )
    IMAGE_PULL_FAILING = _needs_you(
        "ImagePullFailing",
        "An image cannot be pulled.",
        "Correct the image's name, or give the pods a pull secret by template.spec.imagePullSecrets.",
        patience_s=15,
    )
    CRASH_LOOPING = _needs_you(
        "CrashLooping",
        "A container ends again and again; the message has its last words.",
        "Act on the quoted last line, or see `kubectl logs --previous`.",
    )
    OUT_OF_MEMORY = _needs_you(
        "OutOfMemory",
        "A container was killed for its memory.",
        "Raise the memory limit in engine.resources, or lower engine.contextLength, memoryFraction or maxTotalTokens.",
    )
    PROBE_FAILING = _needs_you(
        "ProbeFailing",
        "A container runs but its probe fails.",
        "See the pod's log; set engine.port if the server listens elsewhere. A start may take 30 minutes, or "
        "20 s for each GiB of model.size where that is longer; template.spec.containers[runtime].startupProbe "
        "changes it.",
        patience_s=60,
    )
    CONFIG_ERROR = _needs_you(
        "ConfigError",
        "A container cannot be made from its configuration.",
        "Create the Secret or ConfigMap that the message names, or correct the reference to it.",
        patience_s=15,
    )
    KEYS_PENDING = _passes(
        "KeysPending",
        "The pods are made when the gateway has made the Secret with the keys of the cache events.",
        "Wait some seconds; if it stays, see GatewayReady and EndpointPickerReady.",
    )
    KEY_SECRET_MISSING = _needs_you(
        "KeySecretMissing",
        "The Secret with the keys of the cache events is gone.",
        "Wait: the operator makes a new one; then delete the pods that hold the old keys.",
        patience_s=30,
    )
    VOLUME_NOT_READY = _needs_you(
        "VolumeNotReady",
        "A volume is not bound or cannot be mounted.",
        "Correct model.cache or engine.cache (claimName, storageClassName, accessModes) as the message says.",
        patience_s=60,
    )
    QUOTA_EXCEEDED = _needs_you(
        "QuotaExceeded",
        "A quota of the namespace forbids more pods.",
        "Raise the ResourceQuota or lower replicas or resources.",
    )
    POD_REJECTED = _needs_you(
        "PodRejected",
        "An admission policy refuses the pods.",
        "Remove from template what the message names, or run the pool in a namespace whose policy allows it.",
    )
    TEMPLATE_INVALID = _needs_you(
        "TemplateInvalid",
        "The pods rendered with a template (spec.template, endpointPicker.template, gateway.standalone.template or the "
        "chart's templates) are no valid pods.",
        "Correct the field of the template that the message names.",
    )
    SCALED_TO_ZERO = _passes(
        "ScaledToZero",
        "The pool has no pods because none are asked for.",
        "Set replicas to 1 or more, or let an autoscaler do it.",
    )
    # The model
    MODEL_LOADED = _well("ModelLoaded", "The model is loaded.")
    MODEL_LOADING = _passes(
        "ModelLoading",
        "The engine loads the model.",
        "Wait: it may take 30 minutes, or 20 s for each GiB of model.size where that is longer; "
        "template.spec.containers[runtime].startupProbe changes it. With engine.cache later pods compile "
        "less.",
    )
    WEIGHTS_DOWNLOADING = _passes(
        "WeightsDownloading",
        "The weights are being downloaded; status.download has the figures.",
        "Wait; with model.cache the next pods need not download again.",
    )
    WEIGHTS_MISSING = _needs_you(
        "WeightsMissing",
        "There are no weights where model.uri points.",
        "Correct model.uri, or put the files (config.json, *.safetensors, tokenizer.json) there.",
    )
    DOWNLOAD_FAILED = _needs_you(
        "DownloadFailed",
        "The download of the weights fails; the message says why.",
        "Correct model.uri, model.tokenSecretRef (gated models need a token) or model.credentialsSecretRef, or allow"
        " egress to the source.",
    )
    MODEL_TOO_LARGE = _needs_you(
        "ModelTooLarge",
        "The model does not fit into the memory or the volume.",
        "Take a larger accelerator or more of them, more memory or cache.size, or a smaller model.",
    )
    MODEL_NOT_SERVED = _needs_you(
        "ModelNotServed",
        "The pods answer to other model names than the pool's.",
        "Set model.name to a name that the engine serves; an engine custom is told the name by engine.args.",
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
        "Wait some seconds; if it stays, look at the picker's log.",
    )
    PICKER_UNREACHABLE = _passes(
        "PickerUnreachable",
        "The operator cannot ask the picker for its list.",
        "Allow the operator to reach port 9004 of the picker's pods (NetworkPolicy).",
    )
    ENDPOINTS_MISSING = _passes(
        "EndpointsMissing",
        "Ready pods are not in the picker's list yet.",
        "Wait some seconds; if it stays, look at the picker's log and its Role.",
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
        "An older pool of the same gateway asks for other settings, or another one for stricter protections; those "
        "hold.",
        "Make the named settings equal to the other pool's, or give this pool another gateway.name.",
    )
    PROTECTION_RETAINED = _needs_you(
        "ProtectionRetained",
        "A pool that is gone stated API keys, TLS, isolation or FailClose for the gateway, which keeps them though no "
        "pool states them any more.",
        "State them in a pool of the gateway to keep them, or list them in gateway.unprotected of one to drop them.",
    )
    GATEWAY_OPEN = _needs_you(
        "GatewayOpen",
        "The gateway serves, but its load balancer lets everybody in, or shows prompts to the network.",
        "Set gateway.standalone.apiKeysSecretRef and tls; or use serviceType ClusterIP behind a proxy of yours.",
    )
    FAIL_CLOSE_FORCED = _passes(
        "FailCloseForced",
        "The gateway serves, and without a picker it will refuse requests, although failureMode is FailOpen: "
        "at an engine other than treeline the picker alone keeps the clients apart.",
        "Set endpointPicker.failureMode to FailClose, or gateway.isolation to Shared.",
    )
    GATEWAY_API_MISSING = _needs_you(
        "GatewayApiMissing",
        "The cluster has no Gateway API, or the operator may not read it.",
        "Install the Gateway API CRDs and a controller, give the operator the rights of its chart, or remove "
        "gateway.parentRefs.",
        patience_s=60,
    )
    INFERENCE_EXTENSION_MISSING = _needs_you(
        "InferenceExtensionMissing",
        "The cluster has no Gateway API Inference Extension, or the operator may not read it.",
        "Install the InferencePool CRD of inference.networking.k8s.io/v1, give the operator the rights of its "
        "chart, or remove gateway.parentRefs.",
        patience_s=60,
    )
    ADDRESS_PENDING = _passes(
        "AddressPending",
        "The load balancer has no address yet.",
        "Wait; a cluster without load balancers needs gateway.standalone.serviceType ClusterIP or NodePort.",
    )
    ROUTE_ACCEPTED = _well("RouteAccepted", "Every parent accepts the route.")
    ROUTE_PENDING = _passes(
        "RoutePending",
        "No controller has judged the route yet.",
        "Check that the parent Gateway exists and that its controller runs.",
    )
    ROUTE_NOT_ACCEPTED = _needs_you(
        "RouteNotAccepted",
        "A parent refuses the route; the message quotes it.",
        "Let the Gateway's listener allow this namespace and these host names, or correct gateway.parentRefs.",
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
        "A Gateway of gateway.parentRefs has no data plane that listens; the message quotes it.",
        "See `kubectl describe gateway`: its controller says there what it lacks (an address, a certificate, a port).",
        patience_s=120,
    )
    # Scaling
    AUTOSCALER_ACTIVE = _well("AutoscalerActive", "The operator sets spec.replicas by what the pickers tell.")
    SCALED_BY_ANOTHER = _needs_you(
        "ScaledByAnother",
        "An autoscaler of somebody else sets spec.replicas, and so the operator does not.",
        "Delete that autoscaler, or set autoscaling.type to None.",
        patience_s=60,
    )
    SIGNALS_MISSING = _passes(
        "SignalsMissing",
        "No picker of the pool tells of the demand; the replicas stay as they are.",
        "See EndpointPickerReady.",
    )
    # What the spec asks for in vain
    CLAIM_NOT_SHAREABLE = _needs_you(
        "ClaimNotShareable",
        "Pods on several nodes are to have a claim that only one node can mount; some would never start.",
        "Set accessModes of the named cache to [ReadWriteMany], with a storage class that has it, or keep one replica.",
    )
    DEVICES_UNUSED = _needs_you(
        "DevicesUnused",
        "Pods ask for more devices than the engine uses.",
        "Remove engine.tensorParallel (it follows accelerator.count), or lower accelerator.count.",
    )
    VERSIONS_DIFFER = _needs_you(
        "VersionsDiffer",
        "Pods of the pool have different commits of a model: its branch moved while they downloaded it.",
        "Delete the named pods: their successors take the pool's commit; or pin one in the uri (hf://org/name@COMMIT).",
    )
    ROUTED_BY_HISTORY = _needs_you(
        "RoutedByHistory",
        "The picker makes nothing of what the pods publish, mostly for want of the model's tokenizer: it routes by "
        "what it sent where itself, and sees neither what the pods evict nor what others sent them.",
        "Set model.tokenizer to an hf:// uri with the model's tokenizer: its own, or that of the model from which it "
        "was made. For a pvc:// model that pods on several nodes can mount set model.pickerReadsClaim; docs/engines.md "
        "has the other causes.",
        patience_s=120,
    )
    ARGS_UNTOLD = _needs_you(
        "ArgsUntold",
        "The engine is started with arguments that the picker would have to know: prompts are not found in its caches, "
        "or it cannot be asked.",
        "Remove them from engine.args and use the fields that the message names.",
    )
    ARGS_OVERRIDE = _needs_you(
        "ArgsOverride",
        "A setting stands in a field of the engine and in engine.args; what the arguments say holds.",
        "Remove the flags that the message names from engine.args, or the fields.",
    )
    TEMPLATE_OVERRULED = _needs_you(
        "TemplateOverruled",
        "spec.template says something of the pods that it cannot change: labels and ports by which they are found, or "
        "less time than they need to drain.",
        "Remove the fields that the message names from spec.template; drain.timeoutSeconds and engine.port set theirs.",
    )
    # InferenceModels
    ACCEPTED = _well("Accepted", "The name is served.")
    POOL_NOT_FOUND = _needs_you(
        "PoolNotFound",
        "poolRef or a fallback names a pool that does not exist.",
        "Create the InferencePool in this namespace, or correct poolRef.name.",
        patience_s=15,
    )
    MODEL_NAME_IN_USE = _needs_you(
        "ModelNameInUse",
        "An older InferencePool or InferenceModel has the name.",
        "Choose another modelName (of a pool model.name), or delete the older one: this one is then promoted.",
    )
    WEIGHTS_INVALID = _needs_you(
        "WeightsInvalid",
        "The weights of targetModels are not usable.",
        "Give every target a weight of 1 or more, or none of them.",
    )
    # What the operator did (Events only)
    CREATED = _well("Created", "The operator made an object.")
    APPLIED = _well("Applied", "The operator changed an object that it made.")
    AUTOSCALED = _well("Autoscaled", "The operator set spec.replicas by what the pickers tell.")
    SCALED = _well("Scaled", "The operator changed the number of a revision's pods.")
    DELETED = _well("Deleted", "The operator removed an object that is not needed any more.")
    DRIFT_CORRECTED = _passes(
        "DriftCorrected",
        "Somebody changed fields that the operator owns; they are as before again.",
        "Change the InferencePool instead; what may be changed on pods goes into spec.template.",
    )
    DRAIN_CANCELLED = _passes("DrainCancelled", "Pods that were to go stay after all.", "Nothing; they serve again.")
    DRAIN_TIMEOUT = _needs_you(
        "DrainTimeout",
        "Pods are told to end with requests in flight; they have drain.timeoutSeconds once more to finish them.",
        "Raise drain.timeoutSeconds if requests may take longer.",
    )
