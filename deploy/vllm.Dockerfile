# vLLM with the plug-in. From the repository's root:
#
#   docker build -f deploy/vllm.Dockerfile --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0 -t cacheblend-vllm .
#
# Build arguments:
#   VLLM_IMAGE   any image with vLLM in its python3: docs/vllm-reference.md has the versions that were tested;
#                for CPUs, vLLM's own image for CPUs
#   BASE         a Debian release with Python 3.11 or newer, for the first stage
#
# vLLM's images hold compilers, which Triton and torch.compile need: no build tool is added here, and none removed.
ARG BASE=debian:bookworm-slim
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

# ---- build: the wheel ----------------------------------------------------------------------------------------
FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-pip \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
# vLLM's environment may have no pip (its images are made with uv), so this stage's goes along; a wheel of pip runs as it is.
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python3 -m pip download --no-cache-dir --no-deps --dest /wheels/pip pip \
    && cp constraints/ci.txt /wheels/

# ---- the image: vLLM, and beside it the plug-in --------------------------------------------------------------
FROM ${VLLM_IMAGE}
USER 0:0
# Without dependencies, and what vLLM has already as it is: torch and all else stay those that vLLM's image was made with.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 \
    && pip="$(echo /wheels/pip/pip-*.whl)/pip" \
    && python3 "$pip" install --no-deps jinja2 rich safetensors typer \
    && python3 "$pip" install --no-deps --constraint /wheels/ci.txt /wheels/*.whl obstore redis xxhash \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin cacheblend \
    && install -d -m 0700 -o cacheblend -g cacheblend /var/lib/cacheblend
ENV HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    HF_HOME=/tmp/huggingface \
    VLLM_CACHE_ROOT=/tmp/vllm \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
    TRITON_CACHE_DIR=/tmp/triton
USER 10001:10001
VOLUME /var/lib/cacheblend
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# What is served is named where the image is run: docker run ... --model /models/served --kv-transfer-config '{...}'
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]
