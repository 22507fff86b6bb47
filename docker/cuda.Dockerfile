# A machine with NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t agentrl:cuda .
# Run it with shared memory and all GPUs: docker run --gpus all --shm-size 16g --stop-timeout 40 agentrl:cuda train ...
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv

WORKDIR /opt/agentrl
COPY requirements/build.txt requirements/gpu.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt \
    && pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation -r requirements/gpu.txt

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --create-home --uid 10001 agentrl
USER 10001
WORKDIR /home/agentrl

ENTRYPOINT ["agentrl"]
