"""Calls over gRPC: KServe's inference protocol with texts, and SGLang's scheduler service with token ids."""
