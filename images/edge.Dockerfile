# Envoy and what starts, watches and drains it. Build context: the repository's root (scripts/images.sh edge).
ARG BASE_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE_IMAGE} AS build
# Another package index than pip's own, for builds behind one.
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY images/requirements/build.txt images/requirements/edge.txt ./
# No pip in what is shipped: the base image's own works on both environments.
RUN python3 -m venv --without-pip /opt/treeline/venv \
 && python3 -m pip --python /opt/treeline/venv/bin/python install --no-deps --require-hashes -r edge.txt \
 && python3 -m venv --without-pip /tmp/builder \
 && python3 -m pip --python /tmp/builder/bin/python install --no-deps --require-hashes -r build.txt
COPY wire wire
COPY operator operator
RUN python3 -m pip --python /tmp/builder/bin/python wheel --no-deps --no-build-isolation -w /tmp/wheels ./wire ./operator \
 && python3 -m pip --python /opt/treeline/venv/bin/python install --no-deps --no-index /tmp/wheels/*.whl

FROM ${BASE_IMAGE}
RUN echo 'treeline:x:65532:65532:Treeline:/tmp:/sbin/nologin' >> /etc/passwd
COPY --from=build /opt/treeline/venv /opt/treeline/venv
ENV PATH=/opt/treeline/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
# Requests, health.
EXPOSE 8080 8081
ENTRYPOINT ["python", "-m", "treeline_operator.envoy"]
# Last, since they differ with every commit: nothing above is made anew for them.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="treeline-edge" \
      org.opencontainers.image.description="Envoy as Treeline's gateway" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
