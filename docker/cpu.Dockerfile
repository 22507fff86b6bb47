# A machine without GPUs: docker build -f docker/cpu.Dockerfile -t agentrl:cpu .
FROM python:3.11-slim-bookworm

# vLLM's CPU kernels want OpenMP and NUMA libraries; DeepSpeed builds from source.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/agentrl
COPY requirements/build.txt requirements/torch.txt requirements/cpu.txt requirements/vllm.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt \
    && pip install --no-cache-dir --no-deps --require-hashes --index-url https://download.pytorch.org/whl/cpu -r requirements/torch.txt \
    && pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation -r requirements/cpu.txt -r requirements/vllm.txt

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --create-home --uid 10001 agentrl
USER 10001
WORKDIR /home/agentrl

# Signals reach agentrl directly: `docker stop` saves what is trained.
ENTRYPOINT ["agentrl"]
