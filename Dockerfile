# The command `landmark` on a CPU; with another TORCH_INDEX and `docker run --gpus all`, on a GPU.
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY landmark landmark
COPY conf conf
COPY experiments experiments
RUN pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} -c constraints.txt '.[hf,faiss]'
WORKDIR /work
ENTRYPOINT ["landmark"]
