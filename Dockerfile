# Image for NVIDIA GPUs. PyTorch's wheels bring their own CUDA libraries; Triton compiles its launcher with gcc.
#   docker build --tag dlm-bridge .
#   docker run --gpus all --shm-size 16g --rm -it --volume "$PWD":/workspace dlm-bridge dlm-bridge env
ARG BASE=nvidia/cuda:13.0.0-cudnn-runtime-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        gcc g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1
RUN python3 -m venv /opt/venv

WORKDIR /opt/dlm-bridge
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY dlm_bridge ./dlm_bridge
COPY cli ./cli
COPY model_cards ./model_cards
ARG EXTRAS=megatron,serve,eval,quantize
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

WORKDIR /workspace
CMD ["dlm-bridge", "env"]
