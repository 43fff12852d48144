# Image with the library and every package of a GPU run. docs/gpu.md, "In a container", builds and
# starts it.
#
# CUDA's libraries come with torch, among the packages of requirements/gpu.txt. The base image has
# what lets a container use the host's driver.
FROM nvidia/cuda:13.0.3-base-ubuntu22.04

# g++, which brings gcc, and Python's headers stay in the image: Triton and torch.compile build
# kernels and launchers while a run starts. vLLM's GPU build links no library of the system but the
# driver's; libnuma1 is for its CPU build.
# Ubuntu 22.04 has Python 3.10. The deadsnakes archive has 3.11 for it.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ libc6-dev software-properties-common \
    && add-apt-repository --yes ppa:deadsnakes/ppa \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        python3.11 python3.11-dev python3.11-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /rl
ENV PATH=/rl/.venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1

# The pins come before the sources, so a change of the sources does not install the pins again.
# `vllm download-kernels` runs this command of flashinfer, but starts beside a GPU only, and a build
# has none.
COPY requirements requirements
RUN python3.11 -m venv .venv \
    && pip install --no-deps -r requirements/gpu.txt \
    && python -m flashinfer download-kernels

COPY . .
RUN pip install --no-deps .

# The figures of scripts/gpu_smoke.sh name the commit. The build context has no .git.
ARG COMMIT=unknown
ENV TORCHTITAN_RL_COMMIT=$COMMIT
