"""The Kubernetes API `treeline.dev/v1alpha1`: the typed source of the CRDs, their rules, reasons and reference page."""
