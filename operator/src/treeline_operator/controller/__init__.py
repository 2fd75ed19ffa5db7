"""The running operator: informer, queue, reconciler, probes, and how they are put together."""
