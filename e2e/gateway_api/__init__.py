"""Gateways that are not ours, for the journey with Gateway API: their CRDs as files, and their installation here."""
