# The command `landmark`, with its server, .gguf files and documents. With `docker run --gpus all` on a GPU. For a CPU, PyTorch's
# CPU build is smaller: `docker build --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu …`.
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY landmark landmark
COPY conf conf
COPY experiments experiments
RUN pip install --no-cache-dir -c constraints.txt '.[hf,serve,gguf,documents,faiss]'
WORKDIR /work
ENTRYPOINT ["landmark"]
