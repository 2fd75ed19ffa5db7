"""Whom a pod acts as: the ServiceAccount of its own token, which says so itself."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from treeline_kube.credentials import SERVICE_ACCOUNT


def own_account(namespace: str, token: Path = SERVICE_ACCOUNT) -> dict[str, Any] | None:
    """An owner reference to our ServiceAccount, for what is to go with it; None outside of a pod.

    Only for objects of `namespace`: an owner in another one counts as gone, and its objects are collected.
    """
    try:
        claims = token.read_text().split(".")[1]
        told = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["kubernetes.io"]
        account, home = told["serviceaccount"], told["namespace"]
        owner = {"apiVersion": "v1", "kind": "ServiceAccount", "name": account["name"], "uid": account["uid"]}
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None
    return owner if home == namespace else None
