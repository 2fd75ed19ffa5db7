# The endpoint picker. Build context: the repository's root (scripts/images.sh epp).
ARG BASE_IMAGE=docker.io/library/python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE_IMAGE} AS build
# Another package index than pip's own, for builds behind one.
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY images/requirements/build.txt images/requirements/epp.txt ./
# No pip in what is shipped: the base image's own works on both environments.
RUN python3 -m venv --without-pip /opt/treeline/venv \
 && python3 -m pip --python /opt/treeline/venv/bin/python install --no-deps --require-hashes -r epp.txt \
 && python3 -m venv --without-pip /tmp/builder \
 && python3 -m pip --python /tmp/builder/bin/python install --no-deps --require-hashes -r build.txt
COPY wire wire
COPY kube kube
COPY epp epp
COPY cli cli
# For its download, treeline_runtime.fetch: pods of foreign engines fetch their models with this image, which is small.
COPY runtime runtime
RUN python3 -m pip --python /tmp/builder/bin/python wheel --no-deps --no-build-isolation -w /tmp/wheels ./wire ./kube ./epp ./cli ./runtime \
 && python3 -m pip --python /opt/treeline/venv/bin/python install --no-deps --no-index /tmp/wheels/*.whl

FROM ${BASE_IMAGE}
RUN echo 'treeline:x:65532:65532:Treeline:/tmp:/sbin/nologin' >> /etc/passwd
COPY --from=build /opt/treeline/venv /opt/treeline/venv
ENV PATH=/opt/treeline/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
# ext_proc, EDS and health, metrics and the list of endpoints.
EXPOSE 9002 9003 9004 9090
ENTRYPOINT ["treeline"]
CMD ["pick", "--kubernetes"]
# Last, since they differ with every commit: nothing above is made anew for them.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="treeline-epp" \
      org.opencontainers.image.description="Treeline's endpoint picker" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
