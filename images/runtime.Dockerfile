# The runtime, for CPUs (ACCELERATOR=cpu) or NVIDIA GPUs (cuda). Build context: the repository's root (scripts/images.sh
# runtime-cpu, runtime-cuda).
ARG BASE_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE_IMAGE} AS torch
ARG PIP_INDEX_URL
ARG ACCELERATOR=cpu
# Where torch's build for CPUs is served. Without it (empty) the build with CUDA is taken, and its libraries are left out.
ARG TORCH_CPU_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY images/requirements/torch-cpu.txt images/requirements/torch-cuda.txt images/requirements/torch-needs.txt \
     images/requirements/tools.txt images/torch_without_cuda.py ./
RUN python3 -m venv --without-pip /opt/treeline/torch && python3 -m venv --without-pip /tmp/tools \
 && python3 -m pip --python /opt/treeline/torch/bin/python install --no-deps --require-hashes -r torch-needs.txt \
 && if [ "$ACCELERATOR${TORCH_CPU_INDEX_URL:+-index}" != cpu-index ]; then \
      python3 -m pip --python /tmp/tools/bin/python install --no-deps --require-hashes -r tools.txt; \
    fi
# The CPU index has files of its own, whose hashes are not locked: of these only the version is fixed.
RUN install="python3 -m pip --python /opt/treeline/torch/bin/python install --no-deps" \
 && case "$ACCELERATOR${TORCH_CPU_INDEX_URL:+-index}" in \
      cpu-index) $install --index-url="$TORCH_CPU_INDEX_URL" -r torch-cpu.txt ;; \
      cpu) awk '/^[^ ]/ {on = /^torch==/} on' torch-cuda.txt > torch.txt && $install --require-hashes -r torch.txt \
        && /tmp/tools/bin/python torch_without_cuda.py /opt/treeline/torch/lib/python3*/site-packages/torch \
             /tmp/tools/bin/python -m ziglang cc ;; \
      cuda|cuda-index) $install --require-hashes -r torch-cuda.txt ;; \
      *) echo "ACCELERATOR is cpu or cuda, not '$ACCELERATOR'" >&2; exit 1 ;; \
    esac
# Triton compiles its driver at its first use: done here, since what is shipped has no compiler.
COPY runtime/src/treeline_runtime/ops/driver.py ./
RUN [ "$ACCELERATOR" != cuda ] || /opt/treeline/torch/bin/python driver.py /tmp/tools/bin/python -m ziglang cc

FROM ${BASE_IMAGE} AS build
# Another package index than pip's own, for builds behind one.
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY images/requirements/build.txt images/requirements/runtime.txt ./
# No pip in what is shipped: the base image's own works on both environments.
RUN python3 -m venv --without-pip /opt/treeline/venv \
 && python3 -m pip --python /opt/treeline/venv/bin/python install --no-deps --require-hashes -r runtime.txt \
 && python3 -m venv --without-pip /tmp/builder \
 && python3 -m pip --python /tmp/builder/bin/python install --no-deps --require-hashes -r build.txt
COPY wire wire
COPY runtime runtime
COPY cli cli
RUN python3 -m pip --python /tmp/builder/bin/python wheel --no-deps --no-build-isolation -w /tmp/wheels ./wire ./runtime ./cli \
 && python3 -m pip --python /opt/treeline/venv/bin/python install --no-deps --no-index /tmp/wheels/*.whl
RUN python3 -c 'import sysconfig; print(sysconfig.get_path("purelib", "venv", {"base": "/opt/treeline/torch"}))' \
    > "$(/opt/treeline/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"

FROM ${BASE_IMAGE}
RUN echo 'treeline:x:65532:65532:Treeline:/tmp:/sbin/nologin' >> /etc/passwd
# By how often they change: gigabytes first, so that a new version of ours is a small layer.
COPY --from=torch /opt/treeline/torch /opt/treeline/torch
COPY models/tiny/config.json models/tiny/generation_config.json models/tiny/tokenizer.json \
     models/tiny/tokenizer_config.json models/tiny/chat_template.jinja models/tiny/model.safetensors \
     /opt/treeline/models/tiny/
COPY --from=build /opt/treeline/venv /opt/treeline/venv
ENV PATH=/opt/treeline/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
# What the NVIDIA container runtime puts in where a device is granted. Which devices is never said here: an image that asks
# for all of them gets them without Kubernetes having granted any.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# HTTP; KV events, their replay, load.
EXPOSE 8000 9600 5557 5657 5757
ENTRYPOINT ["treeline"]
CMD ["serve", "/opt/treeline/models/tiny"]
# Last, since they differ with every commit: nothing above is made anew for them.
ARG ACCELERATOR=cpu
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="treeline-runtime" \
      org.opencontainers.image.description="Treeline's runtime (${ACCELERATOR})" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
