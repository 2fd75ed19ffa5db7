"""`treeline conformance`: does an endpoint picker keep the protocol? A black-box suite for any that speaks it.

It plays Envoy towards the picker (`proxy.py`), the pods that it chooses from (`pods.py`) and the Kubernetes API that
tells it of them (`treeline_bench.api_server`). What is expected is in `cases/`: the inference extension's protocol 004,
and what proxies and other pickers do.
"""
