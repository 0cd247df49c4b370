# Two images: `--target server` has no torch; `--target worker` has the server's commands too.
# A tag moves; for a release give its digest too: --build-arg PYTHON_IMAGE=…@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS base
RUN useradd --create-home --uid 1000 halfstep && install --directory --owner halfstep /data
# Inside a container nobody could reach 127.0.0.1, which is the server's default.
ENV PATH=/opt/halfstep/bin:$PATH PYTHONUNBUFFERED=1 HALFSTEP_DATA=/data HALFSTEP_HOST=0.0.0.0
# The image's pip installs there, for whoever builds on these.
ENV PIP_PYTHON=/opt/halfstep/bin/python PIP_NO_CACHE_DIR=1

FROM base AS build
RUN python -m venv --without-pip /opt/halfstep
WORKDIR /src
COPY constraints.txt .
ENV PIP_CONSTRAINT=/src/constraints.txt

FROM build AS build-server
COPY . .
RUN pip install ./halfstep .
# A fifth of its size that no server loads: of plotly it serves the script alone.
RUN cd /opt/halfstep/lib/python3.*/site-packages \
    && rm -r plotly/graph_objs plotly/labextension plotly/validators pyarrow/*flight* pyarrow/include \
    && find . -type d -name tests -prune -exec rm -r {} +

FROM build AS build-worker
# By default pip's choice, which brings CUDA, so that the base needs none. Without CUDA:
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=""
# Before our code, whose changes would have it installed again.
RUN pip install ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch
COPY . .
RUN pip install ./halfstep '.[worker]'

FROM base AS server
USER halfstep
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=30s --interval=10s --timeout=5s \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:${HALFSTEP_PORT:-8000}/healthz')"
ENTRYPOINT ["halfstep"]
CMD ["server"]
COPY --from=build-server /opt/halfstep /opt/halfstep

FROM base AS worker
USER halfstep
VOLUME /data
HEALTHCHECK --start-period=60s --interval=30s --timeout=10s CMD ["halfstep", "worker", "--check"]
# SIGTERM lets a worker's runs leave a checkpoint first: give it time (docker stop --time 60).
STOPSIGNAL SIGTERM
ENTRYPOINT ["halfstep"]
CMD ["worker"]
COPY --from=build-worker /opt/halfstep /opt/halfstep
