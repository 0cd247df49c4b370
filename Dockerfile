# One image for server and worker: the command tells which. On a GPU machine run the worker with
# `--gpus all`; torch's wheels bring CUDA, so the base needs none.
FROM python:3.11-slim-bookworm

RUN useradd --create-home --uid 1000 halfstep
WORKDIR /srv/halfstep
COPY pyproject.toml constraints.txt README.md ./
COPY app app
COPY db db
COPY halfstep halfstep
COPY migrations migrations
COPY trainer trainer
COPY worker worker
# For CPU-only images: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --constraint constraints.txt --index-url ${TORCH_INDEX} torch \
    && pip install --no-cache-dir --constraint constraints.txt --editable ./halfstep --editable . \
    && mkdir /data && chown halfstep /data

USER halfstep
# Inside a container nobody could reach 127.0.0.1, which is the default.
ENV HALFSTEP_DATA=/data HALFSTEP_HOST=0.0.0.0 PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 8000
# SIGTERM lets a worker's runs leave a checkpoint first: give it time (docker stop --time 60).
STOPSIGNAL SIGTERM
ENTRYPOINT ["halfstep"]
CMD ["up"]
