"""Downloads a model into a folder, for a pod's init container: `python -m treeline_runtime.fetch`."""
