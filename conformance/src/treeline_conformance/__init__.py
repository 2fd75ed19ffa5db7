"""`treeline conformance`: a black-box suite that checks whether an endpoint picker keeps the protocol.

It plays Envoy towards the picker (`proxy.py`), the pods that it chooses from (`pods.py`) and the Kubernetes API that
lists them (`treeline_bench.api_server`). The expectations are in `cases/`: the inference extension's protocol 004, and
the behaviour of proxies and other pickers.
"""
