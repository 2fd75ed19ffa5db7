"""The operator: what Treeline generates for a cluster and for one machine."""
